"""A worker as routers see it: what its link tells, how requests end, what its engine is told."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import REGISTRY

from protos import common_pb2
from services.common.checkpoints.checkpoint import digest
from services.common.config import ModelSpec, Settings
from services.common.errors import PenstockError
from services.common.telemetry.telemetry import Telemetry
from services.worker.engine import (
    FinishReason,
    KvBlocks,
    KvEvents,
    PrefillChunk,
    RequestError,
    Timeline,
)
from services.worker.engine.kv import payload as kv_payload
from services.worker.metrics import Meter
from services.worker.server import WorkerService
from tests.support.waiting import until
from tests.unit.worker.worker_rig import (
    LOAD,
    NO_REDIS,
    Worker,
    first,
    last,
    output,
    running_worker,
    spans_of,
    status_of,
)


@pytest.fixture
async def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Worker]:
    monkeypatch.setattr(kv_payload, "FOLDER", tmp_path)
    async with running_worker(tmp_path) as running:
        yield running


async def test_the_engine_and_the_registry_are_told_the_settings(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "device": "cuda:1",
        "block_size": 8,
        "kv_cache_bytes": 12345,
        "max_model_len": 77,
        "max_batched_tokens": 99,
        "target_itl_ms": 12.5,
        "max_running": 5,
        "threads": 3,
        "max_adapters": 4,
        "max_step_adapters": 2,
        "max_adapter_rank": 32,
    }
    async with running_worker(tmp_path, role="decode", **options) as worker:
        config = worker.engine.config
        assert config.model == str(tmp_path)
        assert {name: getattr(config, name) for name in options} == options
        # What the engine found out counts, not what was asked for.
        told = worker.service.describe()
        assert abs(float(told.pop("began")) - time.time()) < 60
        assert told == {
            "role": "decode",
            "model": "tiny",
            "digest": digest(tmp_path),
            "device": "cpu",
            "kernels": "reference",
            "threads": "1",
            "weights": "memory",
            "huge_bytes": "0",
            "dtype": "bfloat16",
            "quantization": "auto",
            "kv_format": f"{digest(tmp_path)} float32 rows",
            "block_size": "16",
            "max_running": "5",
            "max_model_len": "640",
            "adapters": "",
        }
        assert worker.news[0].load.max_running == 5


async def test_rounded_weights_are_registered_as_another_checkpoint(tmp_path: Path) -> None:
    """So neither requests nor KV go between them and the weights as they are."""
    async with running_worker(tmp_path, quantization="int8") as worker:
        assert worker.engine.config.quantization == "int8"
        told = worker.service.describe()
        assert told["quantization"] == "int8"
        assert told["digest"] == digest(tmp_path, "int8") != digest(tmp_path)
        assert told["kv_format"].startswith(told["digest"])


async def test_a_kv_format_reaches_the_engine(tmp_path: Path) -> None:
    async with running_worker(tmp_path, kv_format="int8") as worker:
        assert worker.engine.config.kv_format == "int8"
        assert worker.service.describe()["digest"] == digest(tmp_path)


async def test_without_a_limit_the_checkpoints_own_holds(worker: Worker) -> None:
    assert worker.engine.config.max_model_len is None
    assert worker.engine.config.target_itl_ms is None


async def test_tokens_and_usage_come_as_the_engine_made_them(worker: Worker) -> None:
    answer, request = await worker.ask()
    id = request.request_id
    worker.engine.step(first(id, 7, 8, cached=16))
    worker.engine.step(output(id, 9, draft_tokens=4, accepted_tokens=2))
    worker.engine.step()
    worker.engine.step(last(id, 10, reason=FinishReason.STOP))
    end = await answer.end()
    assert status_of(end) == (0, "", "", "")
    assert answer.tokens == [7, 8, 9, 10]
    told = [
        (d.usage.cached_tokens if d.HasField("usage") else None, d.finish) for d in answer.deltas
    ]
    assert told == [(16, 0), (None, 0), (32, common_pb2.FINISH_STOP)]
    usage = answer.deltas[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (40, 5)
    assert [(d.draft_tokens, d.accepted_tokens) for d in answer.deltas] == [(0, 0), (4, 2), (0, 0)]
    assert not worker.engine.cancelled


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        (FinishReason.LENGTH, common_pb2.FINISH_LENGTH),
        (FinishReason.STOP, common_pb2.FINISH_STOP),
    ],
)
async def test_an_end_may_come_without_a_token(
    worker: Worker, reason: FinishReason, finish: int
) -> None:
    answer, request = await worker.ask()
    worker.engine.step(last(request.request_id, reason=reason))
    assert (await answer.end()).status.code == 0
    assert [(list(d.token_ids), d.finish) for d in answer.deltas] == [([], finish)]


@pytest.mark.parametrize(
    ("error", "told", "message"),
    [
        (
            RequestError("invalid_request", "top_k must not be negative", "top_k"),
            (grpc.StatusCode.INVALID_ARGUMENT, "invalid_request", "top_k"),
            "top_k must not be negative",
        ),
        (
            RequestError("context_length_exceeded", "too long", "prompt_token_ids"),
            (grpc.StatusCode.INVALID_ARGUMENT, "context_length_exceeded", "prompt_token_ids"),
            "too long",
        ),
        (
            RequestError("kv_transfer", "No such file: /dev/shm/x"),
            (grpc.StatusCode.UNAVAILABLE, "kv_transfer", ""),
            "handing KV blocks over failed",
        ),
        (
            RequestError("internal", "The model failed: ZeroDivisionError"),
            (grpc.StatusCode.INTERNAL, "internal", ""),
            "the engine failed on this request",
        ),
    ],
)
async def test_an_engines_error_ends_its_request_alone(
    worker: Worker, error: RequestError, told: tuple[grpc.StatusCode, str, str], message: str
) -> None:
    answer, request = await worker.ask()
    other, beside = await worker.ask()
    failed = output(request.request_id, finish_reason=FinishReason.ERROR, error=error)
    worker.engine.step(failed, output(beside.request_id, 7))
    end = await answer.end()
    code, reason, param = told
    assert status_of(end) == (code.value[0], "worker", reason, param)
    assert end.status.message == message
    assert spans_of(end)["worker"].attributes["error"] == reason
    worker.engine.step(last(beside.request_id, 8, reason=FinishReason.STOP))
    assert (await other.end()).status.code == 0
    assert other.tokens == [7, 8]
    assert not worker.engine.cancelled


@pytest.mark.parametrize("reason", [None, FinishReason.STOP])
async def test_what_cannot_be_sent_ends_its_request_alone(
    worker: Worker, reason: FinishReason | None
) -> None:
    """And frees what the engine holds for it, once, if it holds anything."""
    answer, request = await worker.ask()
    other, beside = await worker.ask()
    bad = output(request.request_id, -1, finish_reason=reason)
    worker.engine.step(bad, output(beside.request_id, 7))
    end = await answer.end()
    assert status_of(end) == (grpc.StatusCode.INTERNAL.value[0], "worker", "internal", "")
    assert worker.engine.cancelled == ([] if reason else [request.request_id])
    worker.engine.step(last(request.request_id, 9, reason=FinishReason.CANCELLED))
    worker.engine.step(last(beside.request_id, 8, reason=FinishReason.STOP))
    assert (await other.end()).status.code == 0
    assert other.tokens == [7, 8]


async def test_a_cancel_frees_the_engines_blocks_at_once(worker: Worker) -> None:
    answer, request = await worker.ask()
    other, beside = await worker.ask()
    answer.request.stop()  # the peer's own end is waited for
    assert status_of(await answer.end())[:3] == (
        grpc.StatusCode.CANCELLED.value[0], "worker", "cancelled",
    )  # fmt: skip
    assert worker.engine.cancelled == [request.request_id]
    # What its last steps still made is nobody's.
    worker.engine.step(output(request.request_id, 7), output(beside.request_id, 7))
    worker.engine.step(last(beside.request_id, 8, reason=FinishReason.STOP))
    assert (await other.end()).status.code == 0
    assert not answer.tokens
    assert worker.engine.cancelled == [request.request_id]


async def test_blocks_exported_for_nobody_leave_no_segment(worker: Worker, tmp_path: Path) -> None:
    _, plain = await worker.ask()
    for id in ("gone", plain.request_id):
        ref = kv_payload.share(b"x" * 64)
        worker.engine.step(kv_exports=[KvBlocks(id, 0, 1, ref)])
        assert not (tmp_path / ref.name).exists(), id


async def test_news_come_with_each_step_and_as_a_whole_to_who_attaches(worker: Worker) -> None:
    a, b = b"a" * 16, b"b" * 16
    worker.engine.step(kv_events=[KvEvents(True, [a]), KvEvents(True, [b])])
    worker.engine.step(kv_events=[KvEvents(False, [a])])
    await until(lambda: len(worker.news) == 3)
    assert [n.snapshot for n in worker.news] == [True, False, False]
    assert (worker.news[0].load.free_blocks, worker.news[1].load.free_blocks) == (9, 3)
    assert [(e.stored, e.hashes) for n in worker.news[1:] for e in n.events] == [
        (True, a),
        (True, b),
        (False, a),
    ]
    late = Worker(worker.service, worker.engine, worker.address)
    await late.link.start()
    await late.link.wait_ready(20)
    assert late.news[0].snapshot
    assert [e.hashes for e in late.news[0].events] == [b]
    assert late.news[0].load.waiting == LOAD.waiting
    await late.link.close()


async def test_what_the_engine_owes_a_step_is_told(worker: Worker) -> None:
    """What it has not seen yet counts: by that an engine that hangs idle is found out."""
    answer, request = await worker.ask()
    await worker.ask()

    async def told(steps: int, pending: int, step_s: float = 0.0) -> None:
        news = len(worker.news)
        worker.service._links.broadcast(worker.service._news.snapshot())
        await until(lambda: len(worker.news) > news)
        assert worker.link.vitals == (steps, pending, step_s)

    await told(0, 2)
    worker.engine.step(first(request.request_id, 7), pending=1)
    await told(1, 1)
    worker.engine.on_long_step(2.5)
    await told(1, 1, 2.5)
    worker.engine.step(pending=1)
    await told(2, 1)
    await worker.ask()
    await told(2, 2)
    worker.engine.step(last(request.request_id, reason=FinishReason.STOP))
    await told(3, 0)
    assert (await answer.end()).status.code == 0


@pytest.mark.parametrize("reason", ["engine_died", "engine_killed"])
async def test_an_engine_that_dies_ends_all_and_takes_the_worker_away(
    worker: Worker, reason: str
) -> None:
    done, ended = await worker.ask()
    answer, _ = await worker.ask()
    other, _ = await worker.ask()
    # One has ended in the same moment and is not unwound yet.
    worker.engine.step(last(ended.request_id, 7, reason=FinishReason.STOP))
    worker.engine.die(killed=reason == "engine_killed")
    unavailable = grpc.StatusCode.UNAVAILABLE.value[0]
    for one in (answer, other):
        assert status_of(await one.end()) == (unavailable, "worker", reason, "")
    assert (await done.end()).status.code == 0
    assert not worker.engine.cancelled, "there is nobody to tell"
    with pytest.raises(PenstockError, match="the engine process ended") as told:
        worker.service.check()
    assert told.value.reason == "engine_died"
    late = worker.open()
    assert (await late.end()).status.reason in ("draining", "peer_lost")


async def test_a_request_for_an_engine_that_is_gone_was_not_in_it(worker: Worker) -> None:
    worker.engine.running = False  # and nobody has noticed yet
    answer = worker.open()
    assert status_of(await answer.end())[2] == "engine_gone"
    assert worker.service._vitals().pending == 0


async def test_a_drain_refuses_the_new_and_lets_the_running_finish(worker: Worker) -> None:
    answer, request = await worker.ask()
    drained = asyncio.create_task(worker.service.drain(20))
    await until(lambda: worker.link.state.value == "draining")
    late = worker.open()
    assert (await late.end()).status.reason == "draining"
    assert not drained.done()
    worker.engine.step(last(request.request_id, 7, reason=FinishReason.LENGTH))
    assert (await answer.end()).status.code == 0
    await asyncio.wait_for(drained, 20)


async def test_a_drain_ends_after_its_grace(worker: Worker) -> None:
    answer, request = await worker.ask()
    await asyncio.wait_for(worker.service.drain(0.01), 20)
    assert (await answer.end()).status.reason == "draining"
    assert worker.engine.cancelled == [request.request_id]


async def test_an_orderly_stop_is_no_death(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_worker(tmp_path) as worker:
        pass
    assert worker.engine.stopped
    assert "the engine is gone" not in caplog.text


async def test_a_worker_that_never_started_is_not_sound_and_stops(tmp_path: Path) -> None:
    settings = Settings(
        models=[ModelSpec(name="tiny", path=str(tmp_path / "missing"))], data_dir=tmp_path
    )
    service = WorkerService(settings, NO_REDIS, Telemetry("worker", "w"), "w")
    with pytest.raises(PenstockError) as told:
        service.check()
    assert told.value.reason == "engine_died"
    await service.stop()


async def test_a_record_shows_the_engines_own_clock(worker: Worker) -> None:
    answer, request = await worker.ask()
    id = request.request_id
    chunks = (PrefillChunk(1_200, 1_300, 30), PrefillChunk(1_400, 1_450, 10))
    worker.engine.step(output(id, 7, timeline=Timeline(1_000, 1_100, chunks)))
    worker.engine.step(output(id, 8))
    worker.engine.step(last(id, 9, reason=FinishReason.STOP))
    end = await answer.end()
    spans = spans_of(end)
    assert {s.parent_id for s in end.record.spans} - {""} == {spans["worker"].span_id}
    assert spans["worker"].attributes["mode"] == "unsplit"
    assert (spans["queue"].start_ns, spans["queue"].duration_ns) == (1_000, 100)
    prefills = [s for s in end.record.spans if s.name == "prefill"]
    assert [(s.start_ns, s.duration_ns, s.attributes["tokens"]) for s in prefills] == [
        (1_200, 100, "30"),
        (1_400, 50, "10"),
    ]
    assert spans["decode"].attributes["tokens"] == "3"
    assert spans["decode"].duration_ns > 0
    assert spans["decode"].start_ns > spans["queue"].start_ns


@pytest.mark.parametrize(
    ("made", "names"),
    [
        (last("1", 7, reason=FinishReason.STOP, timeline=Timeline(10, 20, ())), {"queue"}),
        (last("1", reason=FinishReason.STOP, timeline=Timeline(10, 0, ())), set()),
        (last("1", 7, 8, reason=FinishReason.STOP), set()),
    ],
)
async def test_a_record_has_no_span_of_what_did_not_happen(
    worker: Worker, made: Any, names: set[str]
) -> None:
    answer, request = await worker.ask()
    assert request.request_id == made.request_id == "1"
    worker.engine.step(made)
    assert set(spans_of(await answer.end())) == {"worker"} | names


def sample(name: str, **labels: str) -> float | None:
    own = {"model": "tiny", "role": "both", **labels}
    return REGISTRY.get_sample_value(f"penstock_worker_{name}", own)


async def test_an_engine_that_makes_no_step_is_seen_to_owe_one(worker: Worker) -> None:
    """Which its steps, that do not come, could not tell."""
    assert sample("pending_requests") == 0
    _, request = await worker.ask()
    steps = sample("steps_total")
    assert sample("pending_requests") == 1
    worker.engine.step(last(request.request_id, 7, reason=FinishReason.STOP))
    assert (sample("pending_requests"), sample("steps_total")) == (0, (steps or 0) + 1)


async def test_the_prompts_time_and_the_tokens_are_measured(worker: Worker) -> None:
    names = ("prefill_seconds_count", "decode_token_seconds_count")
    before = [sample(name) or 0.0 for name in names]
    answer, request = await worker.ask()
    id, chunk = request.request_id, PrefillChunk(1_200, 1_300, 30)
    worker.engine.step(output(id, 7, timeline=Timeline(1_000, 1_100, (chunk,))))
    worker.engine.step(last(id, 8, reason=FinishReason.STOP))
    await answer.end()
    assert [sample(name) for name in names] == [count + 1 for count in before]


@pytest.mark.parametrize(
    ("chunks", "first", "last", "tokens", "spent"),
    [
        ((PrefillChunk(5, 6, 2),), 7.0, 12.0, 3, [2.0, 1, 2.5, 1]),
        ((PrefillChunk(5, 6, 2),), 7.0, 7.0, 1, [2.0, 1, 0, 0]),
        ((PrefillChunk(5, 6, 2),), 0, 0, 0, [0, 0, 0, 0]),
        ((), 7.0, 8.0, 2, [0, 0, 1.0, 1]),  # the prompt was computed elsewhere
    ],
)
def test_a_requests_latencies_are_the_engines_own(
    chunks: Any, first: float, last: float, tokens: int, spent: list[float]
) -> None:
    names = ("prefill_seconds_sum", "prefill_seconds_count")
    names += ("decode_token_seconds_sum", "decode_token_seconds_count")
    meter = Meter("latencies", "decode")

    def told() -> list[float]:
        return [sample(name, model="latencies", role="decode") or 0.0 for name in names]

    before = told()
    timeline = Timeline(10**9, 5 * 10**9, chunks)
    meter.request(timeline, int(first * 1e9), int(last * 1e9), tokens)
    assert [a - b for a, b in zip(told(), before, strict=True)] == pytest.approx(spent)


async def test_metrics_add_up_what_the_steps_made(worker: Worker) -> None:
    names = {
        "steps_total": 2,
        "prefill_tokens_total": 30,
        "decode_tokens_total": 7,
        "preemptions_total": 3,
        "kv_blocks_exported_total": 5,
        "step_seconds_count": 2,
    }

    def values() -> dict[str, float]:
        found = {name: sample(name) for name in names}
        return {name: value or 0.0 for name, value in found.items()}

    before = values()
    worker.engine.step(prefill_tokens=10, decode_tokens=7, preempted=["a", "b"])
    exported = [KvBlocks("a", 0, 3, b""), KvBlocks("b", 0, 2, b"")]
    worker.engine.step(prefill_tokens=20, preempted=["c"], kv_exports=exported)
    assert {name: values()[name] - before[name] for name in names} == names
    gauges = {"waiting_sequences": 1, "running_sequences": 2, "kv_free_blocks": 3, "kv_blocks": 9}
    for name, value in gauges.items():
        assert sample(name) == value, name
