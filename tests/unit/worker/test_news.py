import pytest

from protos import worker_pb2
from services.worker import news as news_module
from services.worker.engine import KvEvents, Load, ModelInfo
from services.worker.news import News

A, B, C = (bytes([n]) * 16 for n in (1, 2, 3))
LOAD = Load(
    waiting=1,
    running=2,
    max_running=8,
    free_blocks=3,
    total_blocks=9,
    block_size=16,
    queued_prefill_tokens=40,
    prefill_tokens_per_s=1000.0,
    decode_step_ms=2.5,
    prompt_share=0.5,
)


INFO = ModelInfo(
    architecture="LlamaForCausalLM", vocab_size=10, max_model_len=64, eos_token_ids=(1,),
    dtype="float32", device="cpu", kernels="reference", threads=1, num_parameters=1,
    parameter_bytes=4, weights="memory", huge_bytes=0, workspace_bytes=None, num_blocks=9,
    block_size=16, kv_bytes_per_block=64, kv_shape_per_block=(1, 2, 1, 16, 1),
    kv_format="float32 rows",
)  # fmt: skip


def news_of() -> News:
    return News(INFO, max_running=8)


def test_a_router_knows_a_worker_that_has_not_stepped() -> None:
    load = worker_pb2.WorkerNews.FromString(news_of().snapshot()).load
    assert (load.total_blocks, load.free_blocks, load.max_running) == (9, 9, 8)


def test_adapters_are_told_as_they_change_and_to_whom_comes_late() -> None:
    news = news_of()
    first = worker_pb2.WorkerNews.FromString(news.snapshot())
    assert first.HasField("adapters"), "that there are none is told, too"
    for digests in (["a", "b"], []):
        change = worker_pb2.WorkerNews.FromString(news.of_adapters(digests))
        assert (list(change.adapters.digests), change.HasField("load")) == (digests, False)
        late = worker_pb2.WorkerNews.FromString(news.snapshot())
        assert list(late.adapters.digests) == digests
    step = worker_pb2.WorkerNews.FromString(news.of_step(LOAD, []))
    assert not step.HasField("adapters")


def test_a_step_tells_its_load_and_its_blocks_in_order() -> None:
    news = worker_pb2.WorkerNews.FromString(
        news_of().of_step(LOAD, [KvEvents(True, [A, B]), KvEvents(False, [A]), KvEvents(True, [C])])
    )
    assert not news.snapshot
    assert [(e.stored, e.hashes) for e in news.events] == [(True, A + B), (False, A), (True, C)]
    assert {f.name: v for f, v in news.load.ListFields()} == {
        "waiting": 1,
        "running": 2,
        "max_running": 8,
        "free_blocks": 3,
        "total_blocks": 9,
        "block_size": 16,
        "queued_prefill_tokens": 40,
        "prefill_tokens_per_s": 1000.0,
        "decode_step_ms": 2.5,
        "prompt_share": 0.5,
    }


def test_blocks_on_disk_are_told_apart() -> None:
    news = news_of()
    assert not worker_pb2.WorkerNews.FromString(news.snapshot()).below
    load = LOAD._replace(load_tokens_per_s=5000.0, load_delay_s=0.25)
    below = [KvEvents(True, [A, B]), KvEvents(False, [A])]
    step = worker_pb2.WorkerNews.FromString(news.of_step(load, [KvEvents(True, [C])], below))
    assert (step.load.load_tokens_per_s, step.load.load_delay_s) == (5000, 0.25)
    assert [(e.stored, e.hashes) for e in step.events] == [(True, C)]
    assert [(e.stored, e.hashes) for e in step.below] == [(True, A + B), (False, A)]
    snapshot = worker_pb2.WorkerNews.FromString(news.snapshot())
    assert [(e.stored, e.hashes) for e in snapshot.events] == [(True, C)]
    assert not snapshot.below
    (rest,) = map(worker_pb2.WorkerNews.FromString, news.below())
    assert [(e.stored, e.hashes) for e in rest.below] == [(True, B)]
    assert not rest.HasField("load")


def test_blocks_on_disk_are_told_in_pieces_without_what_has_gone_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(news_module, "_PIECE", 2)
    news = news_of()
    assert not list(news.below())
    names = [bytes([n]) * 16 for n in range(5)]
    news.of_step(LOAD, [], [KvEvents(True, names)])
    pieces = news.below()
    told = [next(pieces)]
    news.of_step(LOAD, [], [KvEvents(False, [names[0], names[2]]), KvEvents(True, [A[:8] + B[8:]])])
    told += pieces
    events = [worker_pb2.WorkerNews.FromString(one).below for one in told]
    assert [[e.hashes for e in one] for one in events] == [
        [names[0] + names[1]],
        [names[3]],
        [names[4]],
    ]


def test_a_snapshot_holds_what_was_stored_and_not_evicted() -> None:
    news = news_of()
    news.of_step(LOAD, [KvEvents(True, [A, B]), KvEvents(False, [A])])
    news.of_step(LOAD, [KvEvents(True, [C, A]), KvEvents(False, [B, B])])
    snapshot = worker_pb2.WorkerNews.FromString(news.snapshot())
    assert snapshot.snapshot
    assert [(e.stored, e.hashes) for e in snapshot.events] == [(True, C + A)]
    assert snapshot.load.running == 2
