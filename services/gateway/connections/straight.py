"""An answer's way to its connection by plain calls, beside ASGI's `send`."""

import weakref
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

STRAIGHT = "penstock.straight"


class Straight:
    """Of one exchange, among its scope's extensions. What it writes stands in order with what
    `send` writes: pieces of a body of unknown length that has begun."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = weakref.ref(cycle)  # which has the scope: no circle

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


def add(cycle: RequestResponseCycle) -> None:
    extensions: dict[str, Any] = {STRAIGHT: Straight(cycle)}
    cycle.scope["extensions"] = extensions
