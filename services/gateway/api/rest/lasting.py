"""What a client says to have its answer outlive its connection, in headers or metadata."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from services.common.errors import invalid
from services.gateway.api.rest.http import Exchange
from services.gateway.api.schema import Body

KEY, LAST = "Idempotency-Key", "Last-Event-ID"
_KEY = re.compile(r"[!-~]{1,255}")
_MOST_DIGITS = 9


class Numbered:
    """Server-sent events with ids, from 1 on, in which those up to `after` are left out. What is
    told of a run is the same each time, so its numbers are. `field` said `after`."""

    def __init__(self, after: int = 0, field: str = LAST) -> None:
        self._after = after
        self._field = field
        self._count = 0

    def of(self, events: bytes) -> bytes:
        """Whole events, without line ends in their data."""
        out: list[bytes] = []
        for event in events.split(b"\n\n")[:-1]:
            self._count += 1
            if self._count > self._after:
                out.append(b"id: %d\n%b\n\n" % (self._count, event))
        return b"".join(out)

    def ending(self, events: bytes) -> bytes:
        """As `of`, of the last ones: who has them all is told the last once more. Raises
        INVALID_ARGUMENT where there is no event `after`."""
        told = self.of(events)
        check_event(self._after, self._count, self._field)
        if not told:
            *_, last = events.split(b"\n\n")[:-1]
            told = b"id: %d\n%b\n\n" % (self._count, last)
        return told


def check_event(after: int, last: int, field: str) -> None:
    """Of an answer that has ended with event `last`. Raises INVALID_ARGUMENT."""
    if after > last:
        raise _invalid(field, f"there is no event {after}, the last one is {last}")


class Resume(Body):
    """The query string of an answer that is asked for again."""

    stream: bool = False
    starting_after: int | None = None

    def behind(self, headers: Mapping[str, str]) -> tuple[int | None, str]:
        """The number of the last event that the client has, and which field says it. Raises
        INVALID_ARGUMENT."""
        if self.starting_after is not None:
            after: int | None = self.starting_after
            field = "starting_after"
        else:
            after, field = last_event(headers), LAST
        if after is not None and not self.stream:
            raise _invalid(field, "only allowed when 'stream' is true")
        return after, field


def idempotency_key(headers: Mapping[str, str]) -> str:
    """Empty without one. Raises INVALID_ARGUMENT."""
    key = headers.get(KEY.lower())
    if key is None:
        return ""
    if not _KEY.fullmatch(key):
        raise _invalid(KEY, "must be up to 255 visible ASCII characters")
    return key


def refuse_key(headers: Mapping[str, str]) -> None:
    """For what can be asked again without one, or not at all. Raises INVALID_ARGUMENT."""
    if headers.get(KEY.lower()) is not None:
        message = f"Unsupported header: '{KEY}' is for chats, completions and responses."
        raise invalid(message, KEY, stage="gateway", reason="unsupported_parameter")


def last_event(headers: Mapping[str, str]) -> int | None:
    """The number of the last event that the client has. Raises INVALID_ARGUMENT."""
    last = headers.get(LAST.lower())
    if last is None:
        return None
    if not last.isdecimal() or len(last) > _MOST_DIGITS:
        raise _invalid(LAST, "must be the id of an event, a number")
    return int(last)


def resume_query(exchange: Exchange) -> dict[str, Any]:
    """For `Resume`. What is no boolean or number stays as it is, to be refused."""
    read: dict[str, Any] = {"true": True, "false": False}
    return {
        name: int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else read.get(text, text)
        for name, text in exchange.query.items()
    }


def digest(route: str, body: bytes) -> str:
    return hashlib.sha256(route.encode() + b"\0" + body).hexdigest()


def _invalid(header: str, why: str) -> Exception:
    return invalid(f"Invalid '{header}': {why}.", header, stage="gateway", reason="invalid_value")
