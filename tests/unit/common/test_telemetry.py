from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.sdk.trace import ReadableSpan

from protos.common_pb2 import Record, Span
from services.common.telemetry import Telemetry, decision, remote_parent, traceparent


def test_spans_of_two_processes_share_one_trace_and_reach_the_record() -> None:
    near, far = Telemetry("gateway", "g1"), Telemetry("router", "r1")
    with near.span("request") as root:
        with far.span("router", remote_parent(traceparent(root)), workers=2) as span:
            far.past_span("queue", span, 1_000_000_000, 1_500_000_000)
        below = far.record(span, [decision("router", "split", "no", {"tokens": 12})])
    record = near.record(root, below=below)
    spans = {s.name: s for s in record.spans}
    assert set(spans) == {"request", "router", "queue"}
    assert spans["router"].parent_id == spans["request"].span_id
    assert spans["queue"].parent_id == spans["router"].span_id
    assert spans["queue"].duration_ns == 500_000_000
    assert spans["router"].service == "router"
    assert spans["router"].attributes["workers"] == "2"
    assert record.decisions[0].reasons["tokens"] == "12"
    assert not near.record(root).spans, "spans are handed out once"


def test_concurrent_requests_do_not_mix() -> None:
    telemetry = Telemetry("gateway", "g1")
    with telemetry.span("request") as one:
        pass
    with telemetry.span("request") as two:
        pass
    assert [s.span_id for s in telemetry.record(one).spans] != [
        s.span_id for s in telemetry.record(two).spans
    ]


def test_two_requests_on_the_same_trace_do_not_mix() -> None:
    telemetry = Telemetry("gateway", "g1")
    header = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    with telemetry.span("request", remote_parent(header)) as one:
        with (
            telemetry.span("request", remote_parent(header)) as two,
            telemetry.span("step"),
            telemetry.span("deeper"),
        ):
            pass
        with telemetry.span("own"):
            pass
    assert {s.name for s in telemetry.record(one).spans} == {"request", "own"}
    assert {s.name for s in telemetry.record(two).spans} == {"request", "step", "deeper"}


def test_a_failed_span_names_the_exception_but_not_its_text() -> None:
    telemetry = Telemetry("gateway", "g1")
    with pytest.raises(ValueError, match="secret"), telemetry.span("work") as span:
        raise ValueError("a secret prompt")
    assert "secret" not in str(telemetry.record(span))
    assert isinstance(span, ReadableSpan)
    assert span.status.description == "ValueError", "this is what collectors are sent"
    assert not span.events


def test_a_malformed_traceparent_starts_a_new_trace() -> None:
    telemetry = Telemetry("gateway", "g1")
    for header in ("", "junk", "00-zz-yy-01"):
        with telemetry.span("request", remote_parent(header)) as span:
            assert span.get_span_context().is_valid
        assert telemetry.record(span).spans[0].parent_id == ""


def test_of_a_lone_span_nothing_stays_however_it_ends() -> None:
    telemetry = Telemetry("gateway", "gateway-1")
    with telemetry.lone_span("search", number=3) as good, telemetry.span("inner"):
        pass
    with pytest.raises(KeyError), telemetry.lone_span("search") as bad:
        raise KeyError
    for span in (good, bad):
        assert not span.is_recording()
        assert list(telemetry.record(span).spans) == []
    assert (good.attributes["number"], bad.status.description) == (3, "KeyError")
    assert not telemetry._requests._by_root


def test_unclaimed_spans_are_bounded() -> None:
    telemetry = Telemetry("gateway", "g1")
    for number in range(5000):
        with telemetry.span("request", number=number) as last:
            pass
    assert len(telemetry._requests._by_root) == 4096
    assert telemetry.record(last).spans[0].attributes["number"] == "4999", (
        "the oldest are forgotten"
    )
    assert not telemetry._requests._root_of, "nothing is kept of spans that have ended"


def test_a_request_of_endless_spans_is_bounded() -> None:
    telemetry = Telemetry("gateway", "g1")
    with telemetry.span("request") as root:
        for _ in range(1000):
            with telemetry.span("step"):
                pass
    assert len(telemetry.record(root).spans) == 256


def test_figures_are_short_and_the_record_below_comes_behind_ones_own() -> None:
    telemetry = Telemetry("gateway", "g1")
    with telemetry.span("request") as span:
        pass
    own = decision("gateway", "a", "b", {"s": 0.123456, "n": 123456, "why": "so"})
    assert dict(own.reasons) == {"s": "0.1235", "n": "123456", "why": "so"}
    assert not decision("gateway", "a", "b").reasons
    below = Record(spans=[Span(name="below")], decisions=[decision("router", "c", "d")])
    record = telemetry.record(span, [own], below)
    assert [s.name for s in record.spans] == ["request", "below"]
    assert [d.subject for d in record.decisions] == ["a", "c"]


def test_spans_go_to_a_collector_when_an_endpoint_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    received: list[ExportTraceServiceRequest] = []

    class Collector(TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: object) -> object:
            received.append(request)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    telemetry = Telemetry("router", "router-1")
    with telemetry.span("router", mode="split"):
        pass
    telemetry.close()
    server.stop(0)
    (resource,) = received[0].resource_spans
    attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert attributes["service.name"] == "router"
    assert attributes["service.instance.id"] == "router-1"
    assert [s.name for s in resource.scope_spans[0].spans] == ["router"]
