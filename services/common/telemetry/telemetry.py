"""What is timed and told of requests: spans (spans.py), and the records that are made of them.

Spans leave over OTLP when `OTEL_EXPORTER_OTLP_ENDPOINT` is set, as far as `OTEL_TRACES_SAMPLER`
lets them. Besides, a request's record (`common_pb2.Record`) carries all of its spans up the links,
so that `GET /v1/requests/{id}` shows a waterfall without any collector.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from protos import common_pb2
from services.common.telemetry.metrics import STAGE_SECONDS
from services.common.telemetry.spans import Ended, Remote, Span, current_span
from services.common.telemetry.tally import Counts


class Collector(Protocol):
    """Where spans go beside the records (collector.py)."""

    def samples(self, span: Span) -> bool:
        """Of a new trace: whether it is wanted."""

    def take(self, span: Span) -> None: ...
    def close(self) -> None: ...


class Telemetry:
    """One process's spans. `service` is whose they are ("gateway", "worker", …)."""

    def __init__(self, service: str, replica_id: str) -> None:
        self.service = service
        self._stages: dict[str, Counts] = {}  # by span name
        self._collector: Collector | None = None
        if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
            from services.common.telemetry.collector import OtlpCollector

            self._collector = OtlpCollector(service, replica_id)

    def span(self, name: str, parent: Span | Remote | None = None, **attributes: Any) -> Span:
        """A span around a block. `parent`: None is the current one.

        An exception marks the span as failed by its type alone: messages may hold user text.
        """
        return self._begin(name, parent or current_span() or Remote(), attributes)

    @contextmanager
    def lone_span(
        self, name: str, parent: Remote | None = None, **attributes: Any
    ) -> Iterator[Span]:
        """A span of which no record is made: it leaves for the collector, and nothing of it stays
        here, however it ends."""
        with ExitStack() as after, self.span(name, parent, **attributes) as span:
            after.callback(span.ended.clear)
            yield span

    def past_span(
        self, name: str, parent: Span, start_ns: int, end_ns: int, **attributes: Any
    ) -> None:
        """A span for something that another process timed, in Unix nanoseconds."""
        self._begin(name, parent, attributes, start_ns).end(end_ns)

    def record(
        self,
        span: Span,
        decisions: Iterable[common_pb2.Decision] = (),
        below: common_pb2.Record | None = None,
    ) -> common_pb2.Record:
        """What this process and the one `below` it know of `span`'s request; call it after the
        span ended. Spans are handed out once.
        """
        spans = [self._told(one) for one in span.ended] if span.is_root else ()
        record = common_pb2.Record(spans=spans, decisions=decisions)
        if span.is_root:
            span.ended.clear()
        if below is not None:
            record.MergeFrom(below)
        return record

    def close(self) -> None:
        """Flushes to the collector, if there is one."""
        if self._collector is not None:
            self._collector.close()

    def _begin(
        self, name: str, parent: Span | Remote, attributes: dict[str, Any], start_ns: int = 0
    ) -> Span:
        span = Span(name, parent, attributes, self._ended, start_ns)
        if self._collector is not None and not parent.trace_id:
            span.sampled = self._collector.samples(span)
        return span

    def _ended(self, span: Span) -> None:
        stage = self._stages.get(span.name)
        if stage is None:
            stage = self._stages[span.name] = STAGE_SECONDS.labels(self.service, span.name)
        stage.observe((span.end_ns - span.start_ns) / 1e9)
        if self._collector is not None and span.sampled:
            self._collector.take(span)

    def _told(self, one: Ended) -> common_pb2.Span:
        return common_pb2.Span(
            service=self.service,
            name=one.name,
            start_ns=one.start_ns,
            duration_ns=one.end_ns - one.start_ns,
            span_id=f"{one.span_id:016x}",
            parent_id=f"{one.parent_id:016x}" if one.parent_id else "",
            attributes={name: str(value) for name, value in one.attributes.items()},
        )


def traceparent(span: Span) -> str:
    """The W3C trace context that makes the other end's spans children of `span`."""
    return span.traceparent


def remote_parent(header: str) -> Remote:
    """The caller's trace context; a malformed or empty header starts a new trace."""
    return Remote.of(header)


def decision(
    stage: str, subject: str, choice: str, reasons: Mapping[str, Any] | None = None
) -> common_pb2.Decision:
    """One line of a request's why-record; figures are written as an operator would read them."""
    told = {
        key: f"{value:.4g}" if isinstance(value, float) else str(value)
        for key, value in (reasons or {}).items()
    }
    return common_pb2.Decision(stage=stage, subject=subject, choice=choice, reasons=told)
