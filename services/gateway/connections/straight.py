"""An exchange's way to its connection by plain calls, beside ASGI's `send` and `receive`."""

import asyncio
import weakref
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from services.common.event import Event

STRAIGHT = "penstock.straight"


class Straight:
    """Of one exchange, among its scope's extensions. What it writes stands in order with what
    `send` writes: pieces of a body of unknown length that has begun."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = weakref.ref(cycle)  # which has the scope: no circle
        self._gone: Callable[[], None] | None = None

    @property
    def is_clear(self) -> bool:
        """Whether a piece may be written now: its client is there, and reads."""
        cycle = self._cycle()
        return (
            cycle is not None
            and bool(cycle.chunked_encoding)
            and not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete)
        )

    def write(self, piece: bytes) -> None:
        """While it is clear. `piece`: not empty, which would be the body's end."""
        cycle = self._cycle()
        assert cycle is not None
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def when_gone(self, gone: Callable[[], None] | None) -> None:
        """Calls once, soon, when the client is gone. To call once the body was read, as `receive`
        would be; None: nobody is to be called any more."""
        self._gone = gone
        cycle = self._cycle()
        if gone is None or cycle is None:
            return
        cycle.flow.resume_reading()  # as `receive` does: else nobody sees that it goes
        if cycle.disconnected:
            asyncio.get_running_loop().call_soon(self.heard)

    def heard(self) -> None:
        """Something came from the client, or it is gone."""
        cycle = self._cycle()
        if self._gone is not None and cycle is not None and cycle.disconnected:
            gone, self._gone = self._gone, None
            gone()


class _Messages(Event):
    """What `receive` waits for."""

    __slots__ = ("_heard",)

    def __init__(self, heard: Callable[[], None]) -> None:
        super().__init__()
        self._heard = heard

    def set(self) -> None:
        super().set()
        self._heard()


def add(cycle: RequestResponseCycle) -> None:
    """Before anybody waits for its messages."""
    straight = Straight(cycle)
    cycle.message_event = cast(asyncio.Event, _Messages(straight.heard))
    extensions: dict[str, Any] = {STRAIGHT: straight}
    cycle.scope["extensions"] = extensions
