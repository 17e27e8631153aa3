"""How a request ends at its worker, whatever happens to it."""

import asyncio
from typing import Any, cast

import grpc
import pytest

from protos import common_pb2, worker_pb2
from services.common.block_hash import tenant_salt
from services.common.telemetry import Telemetry
from services.worker import pipeline
from services.worker.engine import Request, Sampling
from services.worker.sequences import Sequences
from tests.support.waiting import until

Work = worker_pb2.WorkRequest


class Engine:
    """Takes requests, or fails as told; makes no step."""

    def __init__(self, failure: BaseException | None = None) -> None:
        self.failure = failure
        self.running = True
        self.added: list[Request] = []
        self.cancelled: list[str] = []

    def add(self, request: Request) -> None:
        if self.failure is not None:
            raise self.failure
        self.added.append(request)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)


class Call:
    """What `serve` uses of a LinkCall."""

    peer, traceparent = "router-1", ""

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.ends: list[tuple[common_pb2.Status, common_pb2.Record]] = []

    def send(self, payload: bytes) -> None:
        raise AssertionError("nothing is computed here")

    def end(self, status: common_pb2.Status, record: common_pb2.Record) -> None:
        self.ends.append((status, record))


async def serve(engine: Engine, call: Call) -> None:
    unused, fake_engine, fake_call = (cast(Any, one) for one in (None, engine, call))
    stage = pipeline.Stage(
        model="tiny",
        engine=fake_engine,
        sequences=Sequences(fake_engine),
        receiver=unused,
        channels=unused,
        telemetry=Telemetry("worker", "worker-1"),
        share_memory=False,
    )
    await pipeline.serve(stage, fake_call)


def work(**fields: Any) -> bytes:
    return Work(model="tiny", prompt_token_ids=[3, 4], **fields).SerializeToString()


async def test_what_nobody_expected_is_an_internal_error_and_no_success() -> None:
    call = Call(work())
    await serve(Engine(RuntimeError("a bug")), call)
    ((status, record),) = call.ends
    assert status.code == grpc.StatusCode.INTERNAL.value[0]
    assert (status.stage, status.reason) == ("worker", "internal")
    assert "bug" not in status.message
    assert record.spans[0].attributes["error"] == "internal"


async def test_a_cancelled_request_frees_its_blocks_and_is_no_success() -> None:
    engine, call = Engine(), Call(work())
    serving = asyncio.create_task(serve(engine, call))
    await until(lambda: bool(engine.added))
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    ((status, record),) = call.ends
    assert status.code != 0  # the link says why instead, when it was the one to cancel
    assert record.spans
    assert engine.cancelled == [engine.added[0].request_id]


@pytest.mark.parametrize(
    ("payload", "param"),
    [(b"\xff\xff", ""), (work(mode=7), "mode"), (Work(model="other").SerializeToString(), "model")],
)
async def test_what_is_no_work_request_is_refused(payload: bytes, param: str) -> None:
    engine, call = Engine(), Call(payload)
    await serve(engine, call)
    ((status, _),) = call.ends
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert (status.stage, status.param) == ("worker", param)
    assert not engine.added


async def test_the_engine_is_told_all_that_was_asked_for() -> None:
    sampling = common_pb2.Sampling(
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        seed=11,
        max_tokens=5,
        ignore_eos=True,
        stop_token_ids=[7],
    )
    caller = common_pb2.Caller(tenant="t", priority=common_pb2.PRIORITY_LOW)
    payload = work(sampling=sampling, caller=caller, generated_prefix=1)
    engine, call = Engine(), Call(payload)
    serving = asyncio.create_task(serve(engine, call))
    await until(lambda: bool(engine.added))
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    (request,) = engine.added
    assert request.priority == common_pb2.PRIORITY_LOW == 3
    assert (request.prompt_token_ids, request.generated_prefix) == ([3, 4], 1)
    assert request.salt == tenant_salt("t")
    assert request.sampling == Sampling(
        max_tokens=5,
        temperature=0.5,
        top_k=3,
        top_p=pytest.approx(0.9),
        seed=11,
        ignore_eos=True,
        stop_token_ids=(7,),
    )
