"""How a request ends at its worker, whatever happens to it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from protos import common_pb2, worker_pb2
from services.common.block_hash import tenant_salt
from services.common.errors import PenstockError
from services.common.packed_ids import pack
from services.common.served_models import Checkpoint
from services.common.telemetry.telemetry import Telemetry
from services.worker import pipeline
from services.worker.engine import (
    EngineDied,
    FinishReason,
    KvBlocks,
    Load,
    Pooling,
    Request,
    RequestOutput,
    Sampling,
    StepOutput,
    Usage,
)
from services.worker.metrics import Meter
from services.worker.sequences import Sequences
from services.worker.turns import Turns
from tests.support.waiting import until

Work = worker_pb2.WorkRequest
LOAD = Load(0, 1, 1, 1, 1, 16, 0, 0.0, 0.0, 1.0)


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
        self.sent: list[worker_pb2.TokenDelta] = []

    def send(self, payload: bytes) -> None:
        self.sent.append(worker_pb2.TokenDelta.FromString(payload))

    def end(self, status: common_pb2.Status, record: common_pb2.Record) -> None:
        self.ends.append((status, record))


def stage_of(engine: Engine) -> pipeline.Stage:
    unused, fake_engine = (cast(Any, one) for one in (None, engine))
    return pipeline.Stage(
        checkpoint=Checkpoint("tiny", "own", "", "/tiny"),
        kv_format="f",
        adapters=cast(Any, SimpleNamespace(digests=["own and pirate"])),
        engine=fake_engine,
        sequences=Sequences(fake_engine),
        turns=Turns(),
        receiver=unused,
        channels=unused,
        telemetry=Telemetry("worker", "worker-1"),
        meter=Meter("tiny", "both"),
        share_memory_on="",
    )


async def serve(engine: Engine, call: Call) -> None:
    await pipeline.serve(stage_of(engine), cast(Any, call))


def work(**fields: Any) -> bytes:
    fields = {"checkpoint": "own", "prompt_token_ids": pack([3, 4]), **fields}
    return Work(model="tiny", **fields).SerializeToString()


async def test_a_request_of_a_checkpoint_with_an_adapter_is_computed_with_it() -> None:
    engine = Engine()
    tasks = [
        asyncio.create_task(serve(engine, Call(work(checkpoint=checkpoint))))
        for checkpoint in ("own", "own and pirate")
    ]
    await until(lambda: len(engine.added) == 2)
    assert [one.adapter for one in engine.added] == ["", "own and pirate"]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    call = Call(work(checkpoint="own and lawyer"))
    await serve(engine, call)
    assert call.ends[0][0].reason == "other_checkpoint"


async def test_a_prompt_that_is_no_ids_is_refused_by_name() -> None:
    call = Call(work(prompt_token_ids=pack([3, 4]) + b"\x80"))
    engine = Engine()
    await serve(engine, call)
    ((status, _),) = call.ends
    assert (status.code, status.param, status.stage) == (3, "prompt_token_ids", "worker")
    assert not engine.added


async def test_what_nobody_expected_is_an_internal_error_and_no_success() -> None:
    call = Call(work())
    await serve(Engine(RuntimeError("a bug")), call)
    ((status, record),) = call.ends
    assert status.code == grpc.StatusCode.INTERNAL.value[0]
    assert (status.stage, status.reason) == ("worker", "internal")
    assert "bug" not in status.message
    assert record.spans[0].attributes["error"] == "internal"


async def test_its_span_hangs_below_the_routers() -> None:
    call = Call(work())
    call.traceparent = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    await serve(Engine(RuntimeError("a bug")), call)
    ((_, record),) = call.ends
    assert [(span.name, span.parent_id) for span in record.spans] == [("worker", "cd" * 8)]


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


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (common_pb2.Pooling.LAST, Pooling("last", 5)),
        (common_pb2.Pooling.MEAN, Pooling("mean", 5)),
        (common_pb2.Pooling.LOGITS, Pooling("logits", 5, (7, 8))),
    ],
)
async def test_numbers_are_asked_for_and_told(kind: Any, wanted: Pooling) -> None:
    engine = Engine()
    asked = common_pb2.Pooling(kind=kind, dimensions=5, logits_of=wanted.logits_of)
    stage, call = stage_of(engine), Call(work(pooling=asked))
    serving = asyncio.create_task(pipeline.serve(stage, cast(Any, call)))
    await until(lambda: bool(engine.added))
    (request,) = engine.added
    assert request.pooling == wanted
    output = RequestOutput(request.request_id, [], FinishReason.STOP, pooled=b"1234")
    output.usage = Usage(2, 0, 0)
    stage.sequences.deliver(StepOutput(1, 0, 0, LOAD, 0, outputs=[output]))
    await serving
    (delta,) = call.sent
    assert (delta.pooled, delta.finish) == (b"1234", common_pb2.FINISH_STOP)
    assert delta.usage.prompt_tokens == 2


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


class Suspects:
    """Requests of several routers at one worker, each to give two tokens alone."""

    def __init__(self, count: int) -> None:
        self.engine = Engine()
        self.stage = stage_of(self.engine)
        self.calls = [Call(work(alone_tokens=2)) for _ in range(count)]
        self.tasks = [
            asyncio.create_task(pipeline.serve(self.stage, cast(Any, call))) for call in self.calls
        ]

    def step(self, *outputs: RequestOutput) -> None:
        load = cast(Any, None)
        self.stage.sequences.deliver(StepOutput(1, 0, 1, load, 0, outputs=list(outputs)))

    async def in_engine(self, count: int) -> None:
        await until(lambda: len(self.engine.added) >= count)
        await asyncio.sleep(0)
        assert len(self.engine.added) == count


async def test_suspects_take_turns_until_each_has_given_its_tokens() -> None:
    suspects = Suspects(4)
    await suspects.in_engine(1)
    first = suspects.engine.added[0].request_id
    suspects.step(RequestOutput(first, [7]))
    await suspects.in_engine(1)
    suspects.step(RequestOutput(first, [8]))
    await suspects.in_engine(2)
    suspects.step(RequestOutput(first, [9]))  # no second turn is over by it
    await suspects.in_engine(2)
    suspects.tasks[2].cancel()  # while it waits
    suspects.tasks[1].cancel()  # in its turn
    await suspects.in_engine(3)
    last = suspects.engine.added[2].request_id
    suspects.step(RequestOutput(last, [7], FinishReason.STOP))
    suspects.step(RequestOutput(first, [], FinishReason.LENGTH))
    await asyncio.gather(*suspects.tasks, return_exceptions=True)
    assert [call.ends[0][0].code for call in suspects.calls[::3]] == [0, 0]


async def test_the_next_suspect_was_not_in_the_engine_that_died() -> None:
    suspects = Suspects(2)
    await suspects.in_engine(1)
    beside = Call(work())
    other = asyncio.create_task(pipeline.serve(suspects.stage, cast(Any, beside)))
    await suspects.in_engine(2)  # who is no suspect waits for none
    suspects.engine.failure = EngineDied("gone")
    suspects.stage.sequences.fail_all(EngineDied("gone"))
    await asyncio.gather(other, *suspects.tasks)
    reasons = [call.ends[0][0].reason for call in [*suspects.calls, beside]]
    assert reasons == ["engine_died", "engine_gone", "engine_died"]


class Sender:
    """A hand-over to a decode worker that has two of the prompt's blocks already."""

    bytes_sent = 0

    @asynccontextmanager
    async def sender(self, address: str) -> AsyncIterator["Sender"]:
        yield self

    async def reserve(self, transfer_id: str, prompt_tokens: int, kv_format: str) -> int:
        return 2

    def put(self, blocks: KvBlocks) -> None: ...

    async def push(self) -> None:
        await asyncio.Event().wait()


async def test_what_the_decode_worker_has_is_not_exported() -> None:
    engine, call = Engine(), Call(work(mode=Work.PREFILL, transfer_id="t"))
    stage = replace(stage_of(engine), channels=cast(Any, Sender()))
    serving = asyncio.create_task(pipeline.serve(stage, cast(Any, call)))
    await until(lambda: bool(engine.added))
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    (request,) = engine.added
    assert request.prefill_only
    assert (request.export_kv, request.export_from_block) == ("inline", 2)


async def test_a_cancelled_prefill_frees_its_blocks_before_its_push_has_unwound() -> None:
    class Slow(Sender):
        begun, unwound = asyncio.Event(), asyncio.Event()

        async def push(self) -> None:
            self.begun.set()
            try:
                await super().push()
            finally:
                await self.unwound.wait()

    engine, call = Engine(), Call(work(mode=Work.PREFILL, transfer_id="t"))
    stage = replace(stage_of(engine), channels=cast(Any, Slow()))
    serving = asyncio.create_task(pipeline.serve(stage, cast(Any, call)))
    await asyncio.wait_for(Slow.begun.wait(), 20)
    serving.cancel()
    await until(lambda: bool(engine.cancelled))
    assert not serving.done()
    Slow.unwound.set()
    await asyncio.gather(serving, return_exceptions=True)
    assert engine.cancelled == [engine.added[0].request_id]


async def test_a_request_that_its_engine_never_had_is_not_kept() -> None:
    sequences = Sequences(cast(Any, Engine(EngineDied("gone"))))
    heard: list[RequestOutput] = []
    with pytest.raises(PenstockError):
        sequences.add(Request("1", [3], Sampling(1)), heard.append)
    assert sequences.unseen == 0
    load = cast(Any, None)
    sequences.deliver(StepOutput(1, 0, 1, load, 0, outputs=[RequestOutput("1", [7])]))
    assert not heard


@pytest.mark.parametrize("checkpoint", ["", "other"])
async def test_tokens_of_another_checkpoint_are_not_computed_on(checkpoint: str) -> None:
    """In whichever mode; the router goes on elsewhere."""
    for mode in Work.Mode.values():
        call = Call(work(mode=mode, checkpoint=checkpoint))
        await serve(Engine(RuntimeError("it was asked")), call)
        ((status, _),) = call.ends
        assert status.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert (status.stage, status.reason) == ("worker", "other_checkpoint")
