"""What one tenant's requests may take of the gateway, and the end of new ones when it drains.

Places and bytes are taken once a request's key is known and before its body is read; neither is
ever all one tenant's (shares.py).
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from services.common.errors import PenstockError, invalid, unavailable
from services.common.fairness.shares import Shares
from services.gateway import metrics

Holding = Callable[[int], None]
"""Counts so many bytes that come into memory, or raises (`Place.hold`)."""

_RETRY_AFTER_S = 1.0
_LAST_WORDS_S = 1.0  # for what still runs after a drain's grace, to be told so


class Place:
    """One request of a tenant, and the bytes of it that the gateway has in memory."""

    def __init__(self, tenant: str, memory: Shares) -> None:
        self.tenant = tenant
        self._memory = memory
        self._held = 0

    def hold(self, size: int) -> None:
        """Counts `size` more bytes until the request ends.

        Raises RESOURCE_EXHAUSTED ("too_many_bytes"), or INVALID_ARGUMENT ("body_too_large") where
        waiting would not help.
        """
        if not self._memory.take(self.tenant, size):
            if not self._memory.fits_alone(self._held, size):
                metrics.refused.labels("body_too_large").inc()
                raise invalid(
                    f"this request would take {self._held + size} bytes of a gateway's memory, "
                    f"which has {self._memory.total} for all requests: ask for less at once",
                    "",
                    reason="body_too_large",
                    stage="gateway",
                )
            raise refused(
                "too_many_bytes",
                f"this gateway holds {self._memory.held(self.tenant)} bytes of your requests; "
                "try again when some have ended",
            )
        self._held += size

    def release(self, size: int) -> None:
        """Of those held."""
        self._memory.give_back(self.tenant, size)
        self._held -= size

    def leave(self) -> None:
        if self._held:
            self.release(self._held)


class Intake:
    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._slots = Shares(max_requests)
        self._memory = Shares(max_bytes)
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: Counter[asyncio.Task[Any]] = Counter()  # that a drain waits for
        self._over = False
        self.leaving = False  # a load balancer should send no more, but what comes is taken
        self.draining = False  # it is refused

    @property
    def running(self) -> int:
        return self._slots.taken

    @property
    def bytes_held(self) -> int:
        return self._memory.taken

    @contextmanager
    def visit(self, tenant: str) -> Iterator[Place]:
        """For looking at things: it is cheap, and stays possible on a gateway that is full or
        drains. What is large counts all the same."""
        place = Place(tenant, self._memory)
        try:
            yield place
        finally:
            place.leave()

    def slot(self, tenant: str) -> "Slot":
        """Holds a place among the running requests.

        Raises RESOURCE_EXHAUSTED ("too_many_requests") or UNAVAILABLE ("draining"), the latter also
        in a request that still runs when the drain's grace is over.
        """
        return Slot(self, tenant)

    def attended(self) -> "Attended":
        """A drain waits for this task, and at the end of its grace ends it: raises UNAVAILABLE
        ("draining") in it."""
        return Attended(self)

    def take_slot(self, tenant: str) -> Place:
        """To be given back. Raises as `slot`."""
        if self.draining:
            raise _shutting_down("this gateway is shutting down")
        if not self._slots.take(tenant):
            raise refused(
                "too_many_requests",
                f"{self._slots.held(tenant)} of your requests run here, and no more fit in now",
            )
        metrics.running.inc()
        return Place(tenant, self._memory)

    def give_back_slot(self, place: Place) -> None:
        place.leave()
        self._slots.give_back(place.tenant)
        metrics.running.dec()

    def attend(self) -> "asyncio.Task[Any]":
        """A drain waits for the current task from here on."""
        task = asyncio.current_task()
        assert task is not None
        self._idle.clear()
        self._tasks[task] += 1
        return task

    def leave(self, task: "asyncio.Task[Any]", error: BaseException | None) -> None:
        """No longer. Raises UNAVAILABLE ("draining") where `error` is that a drain ended it."""
        self._tasks[task] -= 1
        if not self._tasks[task]:
            del self._tasks[task]
        if not self._tasks:
            self._idle.set()
        if isinstance(error, asyncio.CancelledError) and self._over and not task.uncancel():
            raise _shutting_down("this gateway was shut down before the answer was whole") from None

    async def drain(self, grace_s: float) -> None:
        """Refuses new requests, and returns when the running ones have ended.

        Those that run for longer than `grace_s` are told why they end: no other gateway can go on
        with them, as the connection is this one's.
        """
        self.draining = True
        if await self._has_ended(grace_s):
            return
        self._over = True
        for task in list(self._tasks):
            task.cancel()
        await self._has_ended(_LAST_WORDS_S)

    async def _has_ended(self, within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


class Attended:
    """A context manager: each request is in one as long as it takes, and a generator for it would
    be 400 bytes."""

    __slots__ = ("_intake", "_task")

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    def __enter__(self) -> None:
        self._task = self._intake.attend()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._intake.leave(self._task, error)


class Slot:
    """Likewise."""

    __slots__ = ("_intake", "_place", "_task", "_tenant")

    def __init__(self, intake: Intake, tenant: str) -> None:
        self._intake = intake
        self._tenant = tenant

    def __enter__(self) -> Place:
        self._place = self._intake.take_slot(self._tenant)
        self._task = self._intake.attend()
        return self._place

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._intake.give_back_slot(self._place)
        self._intake.leave(self._task, error)


def _shutting_down(message: str) -> PenstockError:
    return unavailable(message, stage="gateway", reason="draining")


def refused(why: str, message: str) -> PenstockError:
    """Too much at once: RESOURCE_EXHAUSTED, and when to come back."""
    metrics.refused.labels(why).inc()
    return PenstockError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        message,
        stage="gateway",
        reason=why,
        retry_after_s=_RETRY_AFTER_S,
    )
