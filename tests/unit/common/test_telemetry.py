import asyncio
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

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

from protos import common_pb2
from protos.common_pb2 import Record
from services.common.telemetry.spans import Span, current_span
from services.common.telemetry.telemetry import Telemetry, decision, remote_parent, traceparent


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
    assert span.error == "ValueError", "this is what collectors are sent"


def test_a_malformed_traceparent_starts_a_new_trace() -> None:
    telemetry = Telemetry("gateway", "g1")
    nobody = ["00-" + "0" * 32 + "-" + "cd" * 8 + "-01", "ff-" + "ab" * 16 + "-" + "cd" * 8 + "-01"]
    for header in ("", "junk", "00-zz-yy-01", *nobody):
        with telemetry.span("request", remote_parent(header)) as span:
            assert span.trace_id
            assert span.span_id
        assert telemetry.record(span).spans[0].parent_id == ""


def test_of_a_lone_span_nothing_stays_however_it_ends() -> None:
    telemetry = Telemetry("gateway", "gateway-1")
    with telemetry.lone_span("search", number=3) as good, telemetry.span("inner"):
        pass
    with pytest.raises(KeyError), telemetry.lone_span("search") as bad:
        raise KeyError
    for span in (good, bad):
        assert span.end_ns
        assert list(telemetry.record(span).spans) == []
    assert (good.attributes["number"], bad.error) == (3, "KeyError")


def test_unclaimed_spans_go_with_their_request() -> None:
    telemetry = Telemetry("gateway", "g1")
    with telemetry.span("request") as span:
        pass
    gone = weakref.ref(span)
    del span
    assert gone() is None, "nobody else has it, nor a cycle of its own"


def test_the_current_span_is_the_innermost_of_its_own_task() -> None:
    telemetry = Telemetry("gateway", "g1")

    async def deeper(name: str) -> Span:
        with telemetry.span(name) as span:
            await asyncio.sleep(0)
            assert current_span() is span
        return span

    async def run() -> tuple[Span, Span, Span]:
        with telemetry.span("request") as root:
            one, two = await asyncio.gather(deeper("one"), deeper("two"))
            assert current_span() is root
        assert current_span() is None
        return root, one, two

    root, one, two = asyncio.run(run())
    assert one.parent_id == two.parent_id == root.span_id
    assert root.trace_id == one.trace_id == two.trace_id


def test_a_request_of_endless_spans_is_bounded() -> None:
    telemetry = Telemetry("gateway", "g1")
    with telemetry.span("request") as root:
        for _ in range(1000):
            with telemetry.span("step"):
                pass
    told = telemetry.record(root).spans
    assert len(told) == 257
    assert told[-1].name == "request", "what the others hang below is never left out"


def test_figures_are_short_and_the_record_below_comes_behind_ones_own() -> None:
    telemetry = Telemetry("gateway", "g1")
    with telemetry.span("request") as span:
        pass
    own = decision("gateway", "a", "b", {"s": 0.123456, "n": 123456, "why": "so"})
    assert dict(own.reasons) == {"s": "0.1235", "n": "123456", "why": "so"}
    assert not decision("gateway", "a", "b").reasons
    below = Record(spans=[common_pb2.Span(name="below")], decisions=[decision("router", "c", "d")])
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
    unsampled = remote_parent("00-" + "ab" * 16 + "-" + "cd" * 8 + "-00")
    with telemetry.span("not wanted", unsampled) as left_out, telemetry.span("nor below"):
        pass
    assert len(telemetry.record(left_out).spans) == 2, "records tell of it all the same"
    assert traceparent(left_out).endswith("-00")
    with suppress(KeyError), telemetry.span("router", mode="split") as root:
        telemetry.past_span("queue", root, 5, 7)
        raise KeyError
    telemetry.close()
    server.stop(0)
    (resource,) = received[0].resource_spans
    attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert attributes["service.name"] == "router"
    assert attributes["service.instance.id"] == "router-1"
    queue, router = resource.scope_spans[0].spans
    assert (router.name, router.status.message) == ("router", "KeyError")
    assert (queue.name, queue.parent_span_id) == ("queue", router.span_id)
    assert (queue.start_time_unix_nano, queue.end_time_unix_nano) == (5, 7)
    assert (queue.trace_id, router.parent_span_id) == (router.trace_id, b"")
    assert [a.key for a in router.attributes] == ["mode"]


def test_of_the_traces_that_begin_here_the_sampler_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    telemetry = Telemetry("router", "router-1")
    with telemetry.span("router") as root, telemetry.span("below") as below:
        pass
    telemetry.close()
    assert not root.sampled
    assert not below.sampled
    assert len(telemetry.record(root).spans) == 2
