"""Spans for a collector, over OTLP: OpenTelemetry's SDK batches them and sends them."""

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from services.common.telemetry.spans import Span

_SCOPE = InstrumentationScope("penstock")
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class OtlpCollector:
    """The one that OpenTelemetry's own variables name."""

    def __init__(self, service: str, replica_id: str) -> None:
        told = {SERVICE_NAME: service, SERVICE_INSTANCE_ID: replica_id}
        self._resource = Resource.create(told)
        self._sampler = TracerProvider(resource=self._resource).sampler
        self._sending = BatchSpanProcessor(OTLPSpanExporter())

    def samples(self, span: Span) -> bool:
        """As `OTEL_TRACES_SAMPLER` says of a trace that begins here."""
        found = self._sampler.should_sample(None, span.trace_id, span.name)
        return bool(found.decision.is_sampled())

    def take(self, span: Span) -> None:
        """One that has ended."""
        status = Status(StatusCode.ERROR, span.error) if span.error else Status()
        parent = _context(span.trace_id, span.parent_id) if span.parent_id else None
        self._sending.on_end(
            ReadableSpan(
                span.name,
                _context(span.trace_id, span.span_id),
                parent,
                self._resource,
                span.attributes,
                status=status,
                start_time=span.start_ns,
                end_time=span.end_ns,
                instrumentation_scope=_SCOPE,
            )
        )

    def close(self) -> None:
        self._sending.shutdown()


def _context(trace_id: int, span_id: int) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=_SAMPLED)
