"""What is timed of a request: spans on one trace through all processes, as OpenTelemetry has them.

They are ours because each request has a dozen in each service, record or not: one of the SDK's
takes 30 µs to make and to end, one of these 3. What a collector is sent is made of them.
"""

import random
import re
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import Any, NamedTuple

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_KEPT = 256  # of one request, beside its first


class Remote(NamedTuple):
    """A span of another process, to begin below it. Without ids: a new trace begins."""

    trace_id: int = 0
    span_id: int = 0
    sampled: bool = True

    @classmethod
    def of(cls, traceparent: str) -> "Remote":
        """What a W3C trace context names; a malformed or an empty one names nothing."""
        match = _TRACEPARENT.fullmatch(traceparent)
        if match is None or traceparent.startswith("ff"):
            return cls()
        trace_id, span_id = int(match[1], 16), int(match[2], 16)
        if not trace_id or not span_id:
            return cls()
        return cls(trace_id, span_id, bool(int(match[3], 16) & 1))


class Ended(NamedTuple):
    """Of a span, what its request's record tells."""

    name: str
    span_id: int
    parent_id: int  # 0: none
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]


class Span:
    """A context manager around what it times; the current one meanwhile.

    A request is what hangs below one span whose parent is remote or none: `ended` is shared by all
    of it. Its trace would not do: clients choose the trace id, and two of them, even of two
    tenants, may choose the same.
    """

    __slots__ = (
        "__weakref__",
        "_before",
        "_on_end",
        "attributes",
        "end_ns",
        "ended",
        "error",
        "is_root",
        "name",
        "parent_id",
        "sampled",
        "span_id",
        "start_ns",
        "trace_id",
    )

    def __init__(
        self,
        name: str,
        parent: "Span | Remote",
        attributes: dict[str, Any],
        on_end: Callable[["Span"], None],
        start_ns: int = 0,
    ) -> None:
        """`on_end` is told once. `start_ns`: 0 is now."""
        self.name = name
        self.trace_id: int = parent.trace_id or random.getrandbits(128) or 1
        self.parent_id: int = parent.span_id
        self.span_id: int = random.getrandbits(64) or 1
        self.sampled: bool = parent.sampled
        self.is_root = not isinstance(parent, Span)
        self.ended: list[Ended] = parent.ended if isinstance(parent, Span) else []
        self.attributes = attributes
        self.error = ""  # the type of what it failed of: a message may hold user text
        self.start_ns = start_ns or time.time_ns()
        self.end_ns = 0  # it runs
        self._on_end = on_end
        self._before: Span | None = None

    def set_attribute(self, name: str, value: Any) -> None:
        self.attributes[name] = value

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        self.attributes.update(attributes)

    def end(self, end_ns: int = 0) -> None:
        """0: now."""
        if self.end_ns:
            return
        self.end_ns = max(end_ns or time.time_ns(), self.start_ns)
        if len(self.ended) < _KEPT or self.is_root:  # without it the others hang in the air
            told = (self.name, self.span_id, self.parent_id, self.start_ns, self.end_ns)
            self.ended.append(Ended(*told, self.attributes))
        self._on_end(self)

    @property
    def traceparent(self) -> str:
        """The W3C trace context that makes another process' spans children of this one."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{'01' if self.sampled else '00'}"

    def __enter__(self) -> "Span":
        self._before = _current.get()
        _current.set(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _current.set(self._before)
        if kind is not None:
            self.error = kind.__name__
        self.end()


class Within:
    """A context manager in which a span, perhaps one that has ended, is the current one."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def __enter__(self) -> None:
        self._before = _current.get()
        _current.set(self._span)

    def __exit__(self, *_: object) -> None:
        _current.set(self._before)


_current: ContextVar[Span | None] = ContextVar("span", default=None)


def current_span() -> Span | None:
    return _current.get()
