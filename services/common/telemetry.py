"""OpenTelemetry for every service: spans on one trace through all processes, and the
records that are made of them.

Spans leave over OTLP when `OTEL_EXPORTER_OTLP_ENDPOINT` is set. Besides, each process keeps the
spans of requests that are still under way, so that a request's record (`common_pb2.Record`) can
carry them up the links and `GET /v1/requests/{id}` shows a waterfall without any collector.
"""

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import Histogram

from protos import common_pb2
from services.common.metrics import STAGE_SECONDS

_TRACES_KEPT = 4096  # of requests that never collected theirs; the oldest are forgotten
_SPANS_PER_TRACE = 256
_propagator = TraceContextTextMapPropagator()


class RequestSpans(SpanProcessor):
    """Keeps finished spans until the request's record takes them.

    A request is what hangs below one span whose parent is remote or none. Its trace would not do:
    clients choose the trace id, and two of them, even of two tenants, may choose the same.
    """

    def __init__(self, service: str) -> None:
        self._service = service
        self._by_root: OrderedDict[int, list[common_pb2.Span]] = OrderedDict()  # by root's span id
        self._root_of: dict[int, int] = {}  # of the spans under way
        self._stages: dict[str, Histogram] = {}  # by span name

    def on_start(self, span: SdkSpan, parent_context: Context | None = None) -> None:
        context, parent = span.get_span_context(), span.parent
        if context is None:
            return
        local = parent is not None and not parent.is_remote
        above = parent.span_id if parent is not None and local else context.span_id
        self._root_of[context.span_id] = self._root_of.get(above, above)

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        if context is None:
            return
        self._time(span)
        root = self._root_of.pop(context.span_id, context.span_id)
        spans = self._by_root.setdefault(root, [])
        if len(spans) < _SPANS_PER_TRACE:
            spans.append(self._brief(span))
        if len(self._by_root) > _TRACES_KEPT:
            self._by_root.popitem(last=False)

    def take(self, root: int) -> list[common_pb2.Span]:
        """The finished spans of the request below the span with this id, each handed out once."""
        return self._by_root.pop(root, [])

    def _time(self, span: ReadableSpan) -> None:
        stage = self._stages.get(span.name)
        if stage is None:
            stage = self._stages[span.name] = STAGE_SECONDS.labels(self._service, span.name)
        stage.observe(max(0, (span.end_time or 0) - (span.start_time or 0)) / 1e9)

    def _brief(self, span: ReadableSpan) -> common_pb2.Span:
        start, end = span.start_time or 0, span.end_time or 0
        return common_pb2.Span(
            service=self._service,
            name=span.name,
            start_ns=start,
            duration_ns=max(0, end - start),
            span_id=f"{span.context.span_id:016x}",
            parent_id=f"{span.parent.span_id:016x}" if span.parent else "",
            attributes={k: str(v) for k, v in (span.attributes or {}).items()},
        )


class Telemetry:
    """One process's tracer. `service` names it on spans ("gateway", "worker", …)."""

    def __init__(self, service: str, replica_id: str) -> None:
        self.service = service
        self._requests = RequestSpans(service)
        resource = Resource.create({SERVICE_NAME: service, SERVICE_INSTANCE_ID: replica_id})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(self._requests)
        if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

            self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("penstock")

    @contextmanager
    def span(
        self, name: str, parent: Context | Span | None = None, **attributes: Any
    ) -> Iterator[Span]:
        """A span around a block. `parent`: a span, a context, or None for the current one.

        An exception marks the span as failed by its type alone: messages may hold user text.
        """
        context = trace.set_span_in_context(parent) if isinstance(parent, Span) else parent
        with self._tracer.start_as_current_span(
            name,
            context,
            attributes=attributes,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except BaseException as error:
                span.set_status(Status(StatusCode.ERROR, type(error).__name__))
                raise

    @contextmanager
    def lone_span(
        self, name: str, parent: Context | None = None, **attributes: Any
    ) -> Iterator[Span]:
        """A span of which no record is made: it leaves for the collector, and nothing of it stays
        here, however it ends."""
        with ExitStack() as after, self.span(name, parent, **attributes) as span:
            after.callback(self.record, span)
            yield span

    def past_span(
        self, name: str, parent: Span, start_ns: int, end_ns: int, **attributes: Any
    ) -> None:
        """A span for something that another process timed, in Unix nanoseconds."""
        context = trace.set_span_in_context(parent)
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=start_ns)
        span.end(end_ns)

    def record(
        self,
        span: Span,
        decisions: Iterable[common_pb2.Decision] = (),
        below: common_pb2.Record | None = None,
    ) -> common_pb2.Record:
        """What this process and the one `below` it know of `span`'s request; call it after the
        span ended. Spans are handed out once.
        """
        record = common_pb2.Record(
            spans=self._requests.take(span.get_span_context().span_id), decisions=decisions
        )
        if below is not None:
            record.MergeFrom(below)
        return record

    def close(self) -> None:
        """Flushes to the collector, if there is one."""
        self._provider.shutdown()


def traceparent(span: Span) -> str:
    """The W3C trace context that makes the other end's spans children of `span`."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, trace.set_span_in_context(span))
    return carrier.get("traceparent", "")


def remote_parent(header: str) -> Context:
    """The caller's trace context; a malformed or empty header starts a new trace."""
    return _propagator.extract({"traceparent": header}, Context())


def decision(
    stage: str, subject: str, choice: str, reasons: Mapping[str, Any] | None = None
) -> common_pb2.Decision:
    """One line of a request's why-record; figures are written as an operator would read them."""
    told = {
        key: f"{value:.4g}" if isinstance(value, float) else str(value)
        for key, value in (reasons or {}).items()
    }
    return common_pb2.Decision(stage=stage, subject=subject, choice=choice, reasons=told)
