"""Requests share batches; none waits behind another's size, none fails for another's fault."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

import grpc
import numpy as np
import pytest

from services.common.errors import PenstockError
from services.retrieval import embedder as module
from services.retrieval.embedder import Embedder
from services.retrieval.embedding_model import Read
from tests.support.inside import check


class Model:
    """Embeds a text as [its first id, its length]; `gate` holds the thread up."""

    def __init__(self) -> None:
        self.batches: list[list[list[int]]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.computing = threading.Event()
        self.steps = 0

    def read(self, batch: list[list[int]]) -> list[Read]:
        self.batches.append(batch)
        self.computing.set()
        assert self.gate.wait(60)
        if any(13 in text for text in batch):
            raise ValueError("an unlucky token")
        vectors = np.array([[text[0], len(text)] for text in batch], dtype=np.float32)
        return [Read(vector, np.zeros((1, 2), np.float32)) for vector in vectors]


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
async def embedder(model: Model) -> AsyncIterator[Embedder]:
    made = Embedder(model.read, lambda: model.steps)
    made.start()
    yield made
    model.gate.set()
    await made.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):  # the thread imports torch first
        while not condition():  # noqa: ASYNC110 - the embedder has no event for its inner state
            await asyncio.sleep(0.001)


async def hold(model: Model, embedder: Embedder) -> asyncio.Task[np.ndarray]:
    """Brings the model's thread to a stop within a batch."""
    model.gate.clear()
    task = asyncio.create_task(embedder.embed("t", [[1]]))
    await until(model.computing.is_set)
    return task


async def test_each_text_gets_its_own_vector_whatever_the_order_of_work(embedder: Embedder) -> None:
    texts = [[n] * (1 + n * 7 % 50) for n in range(1, 13)] + [[n] * 3 for n in range(14, 90)]
    vectors = await embedder.embed("t", texts)
    assert vectors.tolist() == [[text[0], len(text)] for text in texts]


async def test_what_waits_goes_into_one_batch(model: Model, embedder: Embedder) -> None:
    first = await hold(model, embedder)
    others = [asyncio.create_task(embedder.embed("t", [[n]])) for n in range(20, 30)]
    await until(lambda: embedder._waiting.taken == 10)
    model.gate.set()
    await asyncio.gather(first, *others)
    assert [len(batch) for batch in model.batches] == [1, 10]


async def test_batches_are_bounded_in_texts_and_in_padded_tokens(
    model: Model, embedder: Embedder
) -> None:
    await embedder.embed("t", [[2] * (1 + n % 200) for n in range(300)])
    for batch in model.batches:
        assert len(batch) <= module.MAX_BATCH_TEXTS
        assert len(batch) * max(map(len, batch)) <= module.MAX_BATCH_TOKENS


async def test_a_question_does_not_wait_behind_a_document(model: Model, embedder: Embedder) -> None:
    first = await hold(model, embedder)
    document = asyncio.create_task(embedder.embed("t", [[3] * 100] * 500))
    await until(lambda: embedder._waiting.taken == 500)
    question = asyncio.create_task(embedder.embed("t", [[99]]))
    await until(lambda: embedder._waiting.taken == 501)
    model.gate.set()
    await question
    assert [99] in model.batches[1]
    await asyncio.gather(first, document)


async def test_a_question_does_not_wait_behind_another_tenants_requests(
    model: Model, embedder: Embedder
) -> None:
    first = await hold(model, embedder)
    flood = [asyncio.create_task(embedder.embed("flood", [[3] * 100])) for _ in range(500)]
    await until(lambda: embedder._waiting.taken == 500)
    question = asyncio.create_task(embedder.embed("other", [[99]]))
    await until(lambda: embedder._waiting.taken == 501)
    model.gate.set()
    await question
    assert [99] in model.batches[1]
    await asyncio.gather(first, *flood)
    assert embedder._turns == {}


async def test_one_tenants_waiting_texts_leave_room_for_others(
    model: Model, embedder: Embedder
) -> None:
    first = await hold(model, embedder)
    half = [[3]] * (module.MAX_WAITING_TEXTS // 2)
    flood = asyncio.create_task(embedder.embed("flood", half))
    await until(lambda: embedder._waiting.taken == len(half))
    with pytest.raises(PenstockError, match="too much waiting"):
        await embedder.embed("flood", [[3]])
    other = asyncio.create_task(embedder.embed("other", [[4]] * 2048))
    await until(lambda: embedder._waiting.taken == len(half) + 2048)
    for task in (flood, other):
        task.cancel()
    await asyncio.gather(flood, other, return_exceptions=True)
    assert (embedder._waiting.taken, embedder._turns) == (0, {})
    model.gate.set()
    await first


async def test_cancelling_gives_up_what_is_not_computed(model: Model, embedder: Embedder) -> None:
    first = await hold(model, embedder)
    document = asyncio.create_task(embedder.embed("t", [[3]] * 500))
    await until(lambda: embedder._waiting.taken == 500)
    document.cancel()
    with pytest.raises(asyncio.CancelledError):
        await document
    assert embedder._waiting.taken == 0
    model.gate.set()
    await first
    assert (await embedder.embed("t", [[5]])).tolist() == [[5, 1]]
    assert len(model.batches) == 2


async def test_a_bad_text_fails_its_own_request_alone(model: Model, embedder: Embedder) -> None:
    first = await hold(model, embedder)
    good = asyncio.create_task(embedder.embed("t", [[4], [5]]))
    bad = asyncio.create_task(embedder.embed("t", [[13]]))
    await until(lambda: embedder._waiting.taken == 3)
    model.gate.set()
    assert (await good).tolist() == [[4, 1], [5, 1]]
    with pytest.raises(PenstockError, match="failed on this text") as raised:
        await bad
    assert raised.value.code == grpc.StatusCode.INTERNAL
    check(raised.value.message)
    await first


async def test_too_much_waiting_is_refused_at_once(embedder: Embedder) -> None:
    with pytest.raises(PenstockError) as raised:
        await embedder.embed("t", [[1]] * (module.MAX_WAITING_TEXTS + 1))
    assert raised.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert raised.value.reason == "queue_full"
    assert raised.value.retry_after_s > 0


async def test_stopping_ends_what_waits(model: Model) -> None:
    embedder = Embedder(model.read)
    embedder.start()
    running = await hold(model, embedder)
    waiting = asyncio.create_task(embedder.embed("t", [[6]]))
    await until(lambda: embedder._waiting.taken == 1)
    stopping = asyncio.create_task(embedder.stop())
    for task in (running, waiting):
        with pytest.raises(PenstockError) as raised:
            await task
        assert raised.value.code == grpc.StatusCode.UNAVAILABLE
    model.gate.set()
    await stopping


async def test_a_stalled_model_fails_the_check(
    model: Model, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder.check()
    first = await hold(model, embedder)
    embedder.check()
    monkeypatch.setattr(module, "STALLED_S", 0.0)
    with pytest.raises(RuntimeError, match="no embedding batch"):
        embedder.check()
    model.gate.set()
    await first
    embedder.check()


async def test_a_dead_loop_fails_the_check(embedder: Embedder) -> None:
    embedder.check()
    assert embedder._task is not None
    embedder._task.cancel()
    await asyncio.gather(embedder._task, return_exceptions=True)
    with pytest.raises(RuntimeError, match="loop ended"):
        embedder.check()


async def test_texts_of_like_length_share_a_batch(model: Model, embedder: Embedder) -> None:
    """What is padded is computed all the same."""
    await embedder.embed("t", [[2] * (200 if n % 2 else 2) for n in range(60)])
    padded = sum(len(batch) * max(map(len, batch)) for batch in model.batches)
    assert padded < 1.2 * 30 * (200 + 2)


async def test_a_batch_that_goes_on_is_no_stall_however_long_it_takes(
    model: Model, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await hold(model, embedder)
    began = time.monotonic()
    monkeypatch.setattr(module, "STALLED_S", 60.0)
    for minute in range(1, 5):
        now = began + 59.0 * minute
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda now=now: now))
        model.steps += 1
        embedder.check()
    late = now + 61.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: late))
    with pytest.raises(RuntimeError, match="no embedding batch"):
        embedder.check()
    monkeypatch.undo()
    model.gate.set()
    await first


async def test_what_nobody_waits_for_is_behind_those_who_wait_but_not_for_ever(
    model: Model, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BATCH_TEXTS", 2)
    monkeypatch.setattr(module, "_BEHIND", 3)

    def unhurried(*texts: list[int]) -> "asyncio.Task[list[float]]":
        read = embedder.read("t", [*texts], lambda read: float(read.vector[0]), low=True)
        return asyncio.create_task(read)

    first = await hold(model, embedder)
    low = unhurried([50], [51], [52], [53])
    await until(lambda: embedder._waiting.taken == 4)
    texts = [[n] for n in range(20, 30)]
    others = [asyncio.create_task(embedder.embed(who, texts)) for who in ("t", "u")]
    await until(lambda: embedder._waiting.taken == 24)
    model.gate.set()
    numbers, *_ = await asyncio.gather(low, first, *others)
    lanes = "".join("L" if batch[0][0] >= 50 else "n" for batch in model.batches[1:])
    assert lanes == "nnnLnnnLnnnn"
    assert numbers == [50, 51, 52, 53]
    again = [unhurried([60]) for _ in range(2)]
    await asyncio.gather(*again)
    first = await hold(model, embedder)
    given_up = unhurried([70])
    await until(lambda: embedder._waiting.taken == 1)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    model.gate.set()
    await first
    assert (embedder._waiting.taken, len(embedder._low)) == (0, 0)
    assert not any(text[0] == 70 for batch in model.batches for text in batch)
