"""What both ends of a link share: the frame being gathered, limits, and statuses."""

import asyncio
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import grpc

from protos.common_pb2 import End, LinkDown, LinkUp, Record, Status

PROTOCOL = 1
MAX_FRAME_BYTES = 64 * 2**20
MAX_PENDING_BYTES = 32 * 2**20  # half a frame: what is gathered always fits in one
STEP_PATIENCE = 3.0
ENTRY_BYTES = 64  # charged for each entry beside its payload, so that empty ones count too

Frame = TypeVar("Frame", LinkUp, LinkDown)


class Vitals(NamedTuple):
    """A peer's liveness: while `pending` is not 0, `steps` must move."""

    steps: int
    pending: int
    step_s: float = 0.0  # what the step under way is expected to take; 0: not worth mentioning

    def patience_s(self, stall_timeout_s: float) -> float:
        """How long `steps` may stand still. A long step is given a multiple of its time, so that a
        slow machine is not taken for a hung one; a hung one is found out that much later."""
        return stall_timeout_s + STEP_PATIENCE * self.step_s


class LinkLostError(Exception):
    """The link cannot go on; the message says why, for logs and for the status of its requests."""


class Outbox(Generic[Frame]):
    """Gathers entries for one peer in `frame` until they are sent.

    They leave one loop turn after the first entry, so whatever else that turn produces rides along;
    while flow control holds them, entries go on gathering.
    """

    def __init__(self, new_frame: Callable[[], Frame]) -> None:
        self._new_frame: Callable[[], Frame] = new_frame
        self._ready = asyncio.Event()
        self._flushed = asyncio.Event()
        self._wake: Callable[[], None] | None = None  # instead of who waits in `take`
        self._soon = False  # it is to be called
        self._hurried = False  # something left in this turn already
        self.frame: Frame = new_frame()
        self.pending_bytes = 0

    def mark(self, payload_bytes: int = 0) -> None:
        """To call after each change of `frame`."""
        if not self.pending_bytes:
            self._flushed.clear()
            self._ready.set()
            if self._wake is not None and not self._soon:
                self._soon = True
                asyncio.get_running_loop().call_soon(self._next_turn)
        self.pending_bytes += payload_bytes + ENTRY_BYTES

    def wake(self, send: Callable[[], None] | None) -> None:
        """From now on `send` is called, one turn after the first entry; it is to `pop`."""
        self._wake = send
        if send is not None and self.pending_bytes:
            send()

    def hurry(self) -> None:
        """What has gathered leaves now, where that takes a call alone: somebody waits for it, and
        whatever else is done in this turn comes after it. What another hurries in the same turn
        leaves as one frame behind that: many at once are cheaper together."""
        if self._wake is not None and not self._hurried:
            self._hurried = True
            self._wake()

    def _next_turn(self) -> None:
        self._soon = self._hurried = False
        if self._wake is not None:
            self._wake()

    async def take(self) -> Frame:
        """Waits for a marked frame and starts the next. Calling it again says: that was sent."""
        if not self.pending_bytes:
            self._flushed.set()
            await self._ready.wait()
        self._ready.clear()
        return self.pop()

    def pop(self) -> Frame:
        """What has gathered, and starts the next."""
        taken: Frame = self.frame
        self.frame = self._new_frame()
        self.pending_bytes = 0
        return taken

    def sent(self) -> None:
        """All that was popped has been handed on."""
        if not self.pending_bytes:
            self._flushed.set()

    async def flushed(self) -> None:
        """Returns when all that was marked before has been handed to gRPC or to the socket."""
        await self._flushed.wait()


def status(code: grpc.StatusCode, message: str, *, stage: str, reason: str) -> Status:
    return Status(code=code.value[0], message=message, stage=stage, reason=reason)


def stage_of(method: str) -> str:
    """The service that serves a link method: "/penstock.v1.Router/Link" is "router"."""
    return method.split("/")[1].rsplit(".", 1)[-1].lower()


__all__ = ["End", "LinkDown", "LinkUp", "Record", "Status"]
