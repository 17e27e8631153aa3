"""What one tenant's requests may take of the gateway, and the end of new ones when it drains.

Places and bytes are taken once a request's key is known and before its body is read; neither is
ever all one tenant's (shares.py).
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from services.common.errors import PenstockError, unavailable
from services.gateway import metrics
from services.gateway.shares import Shares

_RETRY_AFTER_S = 1.0


class Place:
    """One request of a tenant, and the bytes of it that the gateway has in memory."""

    def __init__(self, tenant: str, memory: Shares) -> None:
        self.tenant = tenant
        self._memory = memory
        self._held = 0

    def hold(self, size: int) -> None:
        """Counts `size` more bytes until the request ends.

        Raises RESOURCE_EXHAUSTED ("too_many_bytes").
        """
        if not self._memory.take(self.tenant, size):
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
        self.draining = False

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

    @contextmanager
    def slot(self, tenant: str) -> Iterator[Place]:
        """Holds a place among the running requests.

        Raises RESOURCE_EXHAUSTED ("too_many_requests") or UNAVAILABLE ("draining").
        """
        if self.draining:
            raise unavailable("this gateway is shutting down", stage="gateway", reason="draining")
        if not self._slots.take(tenant):
            raise refused(
                "too_many_requests",
                f"{self._slots.held(tenant)} of your requests run here, and no more fit in now",
            )
        self._idle.clear()
        metrics.running.inc()
        try:
            with self.visit(tenant) as place:
                yield place
        finally:
            self._slots.give_back(tenant)
            metrics.running.dec()
            if not self.running:
                self._idle.set()

    async def drain(self, grace_s: float) -> None:
        """Refuses new requests; returns when none runs, or after `grace_s`."""
        self.draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            return


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
