"""One request at the serving end of a link, as its handler has it."""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from protos.common_pb2 import LinkDown, Open
from services.common.link.frames import Outbox, Record, Status

log = logging.getLogger(__name__)

UNWIND_S = 1.0  # for a cancelled handler, until its request ends without it


class Attached(Protocol):
    """The link that a request came on."""

    peer: str
    outbox: Outbox[LinkDown]

    def mark(self, payload_bytes: int = 0) -> None: ...
    def forget(self, call: "LinkCall") -> None: ...


class LinkCall:
    """One request at the serving end. All methods are synchronous and never raise for the peer."""

    def __init__(self, link: "Attached", opened: Open, deadline: float) -> None:
        self.payload = opened.payload
        self.deadline = deadline  # time.monotonic() seconds
        self.traceparent = opened.traceparent
        self.peer = link.peer  # replica id of the caller
        self.cancelled = False  # by the client, the loss of the link, the deadline or a drain
        self._id = opened.id
        self._link = link
        self._why: Status | None = None  # it was cancelled
        self._ended = False
        self._callbacks: list[Callable[[], object]] = []
        self._timer: asyncio.TimerHandle | None = None  # to its end, once it was cancelled
        self._task: asyncio.Task[None] | None = None

    def send(self, payload: bytes) -> None:
        """Sends an item with the frame of this loop turn. Dropped after a cancel or the end."""
        if not self._ended and not self.cancelled:
            self._link.outbox.frame.items.add(id=self._id, payload=payload)
            self._link.mark(len(payload))

    def end(self, status: Status | None = None, record: Record | None = None) -> None:
        """The request's last word; None is success. Ignored when it has ended already.

        After a cancel the status is the cancel's, whatever is said here, but the record goes out:
        a handler that ends its request in `finally` tells even then what it knows. The handler's
        task may go on after the end; it is not cancelled any more.
        """
        if self._ended:
            return
        self._ended = True
        self._link.forget(self)
        why = self._why or status
        end = self._link.outbox.frame.ends.add(id=self._id, status=why, record=record)
        self._link.mark(end.ByteSize())

    def on_cancel(self, callback: Callable[[], object]) -> None:
        """Calls back once when the request is cancelled, before its task is; at once if it was."""
        if self.cancelled:
            callback()
        elif not self._ended:
            self._callbacks.append(callback)

    def _cancel(self, why: Status) -> None:
        """Ends with `why` as soon as the handler has unwound, and soon in any case."""
        if self._ended or self.cancelled:
            return
        self.cancelled = True
        self._why = why
        self._timer = asyncio.get_running_loop().call_later(UNWIND_S, self.end)
        for callback in self._callbacks:
            try:
                callback()
            except Exception:
                log.exception("on_cancel of a request of %s failed", self.peer)
        if self._task is not None:
            self._task.cancel()
