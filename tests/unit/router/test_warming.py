"""Prompts that are computed ahead: only while nobody could be kept waiting."""

import asyncio
from typing import Any

import grpc
import pytest

from protos import worker_pb2
from protos.common_pb2 import FINISH_LENGTH, PRIORITY_LOW
from services.common.block_hash import block_hashes, tenant_salt
from services.common.link import LinkState
from services.router import metrics
from tests.support.prompts import prompt_of
from tests.support.waiting import until
from tests.unit.router.test_requests_way import PROMPT, Rig, Served, request

SIZE = 16
HELD = 32  # tokens of the prompt that the worker has


@pytest.fixture
async def rig() -> Rig:
    made = Rig()
    made.door.waits = False  # type: ignore[attr-defined]
    made.door.waiting = lambda model: made.door.waits  # type: ignore[attr-defined]
    return made


def worker(rig: Rig, id: str = "w", held: int = HELD, tenant: str = "acme", **load: Any) -> None:
    """One that computes a block in a piece's time."""
    peer = rig.pool.peer(id)
    # 1,000 tokens/s: 20 tokens in a piece, which is a block.
    told = worker_pb2.Load(block_size=SIZE, prefill_tokens_per_s=1000, max_running=8, **load)
    hashes = block_hashes(PROMPT, SIZE, tenant_salt(tenant))[: held // SIZE]
    rig.pool.tell(peer, load=told, events=[(True, hashes)])


def warm(rig: Rig, **facts: Any) -> Served:
    return rig.serve(request(warm=True, sampling={"max_tokens": 1}, **facts))


async def told(served: Served) -> tuple[int, int]:
    """Tokens in the cache now, and before."""
    assert (await served.end()).code == 0
    (delta,) = served.call.deltas
    assert (list(delta.token_ids), delta.finish) == ([], FINISH_LENGTH)
    return delta.usage.prompt_tokens, delta.usage.cached_tokens


def counted(outcome: str) -> float:
    return float(metrics.warmed.labels(outcome)._value.get())


async def piece(rig: Rig, count: int, id: str = "w") -> None:
    opened = await rig.nth(id, count)
    opened.give(7, finish=FINISH_LENGTH)
    opened.end()


async def test_what_is_not_held_is_computed_in_small_pieces_of_the_low_lane(rig: Rig) -> None:
    worker(rig)
    before = counted("whole"), metrics.warmed_tokens._value.get()
    served = warm(rig)
    for count in range(1, 5):
        await piece(rig, count)
    assert await told(served) == (96, HELD), "a partial block is nobody's"
    works = [opened.work for opened in rig.pool.opened["w"]]
    assert [len(prompt_of(work)) for work in works] == [48, 64, 80, 96]
    assert {(work.caller.priority, work.sampling.max_tokens) for work in works} == {
        (PRIORITY_LOW, 1)
    }
    assert rig.door.came == [], "it takes no slot"
    assert (counted("whole") - before[0], metrics.warmed_tokens._value.get() - before[1]) == (1, 64)


async def test_it_is_dropped_when_a_request_of_the_model_comes(rig: Rig) -> None:
    worker(rig)
    served = warm(rig)
    await piece(rig, 1)
    second = await rig.nth("w", 2)
    assert len(prompt_of(second.work)) == 64
    asked = rig.serve(request())
    assert await told(served) == (48, HELD)
    assert rig.pool.log[0] == "stop w", "before the request is on its worker"
    answer = await rig.nth("w", 3)
    assert answer.work.caller.priority != PRIORITY_LOW
    answer.give(1, finish=FINISH_LENGTH)
    answer.end()
    await asked.end()


async def test_it_is_dropped_between_two_pieces_too(rig: Rig) -> None:
    worker(rig)
    served = warm(rig)
    first = await rig.nth("w", 1)
    first.end()
    rig.router.warming.drop("m")
    assert await told(served) == (HELD, HELD)
    assert len(rig.pool.opened["w"]) == 1


async def test_it_ends_with_a_drained_router_and_goes_no_further_on_a_drained_worker(
    rig: Rig,
) -> None:
    worker(rig)
    served = warm(rig)
    await rig.nth("w", 1)
    rig.router.warming.stop()
    assert await told(served) == (HELD, HELD)
    served = warm(rig)
    opened = await rig.nth("w", 2)
    next(iter(rig.router.workers.all())).link.state = LinkState.DRAINING
    opened.end()
    assert await told(served) == (48, HELD)


async def test_another_models_requests_are_nothing_to_it(rig: Rig) -> None:
    worker(rig)
    served = warm(rig)
    await rig.nth("w", 1)
    rig.router.warming.drop("n")
    for count in range(1, 5):
        await piece(rig, count)
    assert await told(served) == (96, HELD)


async def test_it_is_dropped_when_the_worker_tells_of_requests_from_elsewhere(rig: Rig) -> None:
    worker(rig)
    served = warm(rig)
    opened = await rig.nth("w", 1)
    (peer,) = rig.router.workers._workers
    load = worker_pb2.Load(block_size=SIZE, prefill_tokens_per_s=1000, running=2, max_running=8)
    rig.pool.tell(peer, load=load)
    opened.give(7, finish=FINISH_LENGTH)
    opened.end()
    assert await told(served) == (48, HELD)


@pytest.mark.parametrize("load", [{"running": 1}, {"waiting": 1}])
async def test_a_worker_that_does_anything_is_left_alone(rig: Rig, load: dict[str, int]) -> None:
    worker(rig, **load)
    before = counted("busy")
    assert await told(warm(rig)) == (0, 0)
    assert rig.pool.opened["w"] == []
    assert counted("busy") - before == 1


async def test_so_is_one_that_a_request_is_on_its_way_to(rig: Rig) -> None:
    worker(rig)
    asked = rig.serve(request())
    await rig.nth("w", 1)
    assert await told(warm(rig)) == (0, 0)
    asked.task.cancel()
    await asked.end()


async def test_so_is_one_that_is_warmed_already(rig: Rig) -> None:
    worker(rig)
    first = warm(rig)
    await rig.nth("w", 1)
    assert await told(warm(rig)) == (0, 0)
    first.task.cancel()
    await first.end()
    assert not rig.router.warming.on(next(iter(rig.router.workers._workers.values())))


async def test_nothing_is_computed_while_a_request_waits_for_its_turn(rig: Rig) -> None:
    worker(rig)
    rig.door.waits = True  # type: ignore[attr-defined]
    assert await told(warm(rig)) == (0, 0)
    assert rig.pool.opened["w"] == []


async def test_it_goes_to_the_worker_that_holds_most_of_it(rig: Rig) -> None:
    worker(rig, "little", held=16)
    worker(rig, "most", held=80)
    served = warm(rig)
    await piece(rig, 1, "most")
    assert await told(served) == (96, 80)


async def test_where_that_one_is_busy_it_is_not_computed_anew_elsewhere(rig: Rig) -> None:
    worker(rig, "little", held=16)
    worker(rig, "most", held=80, running=1)
    assert await told(warm(rig)) == (0, 0)
    assert rig.pool.opened["little"] == []


async def test_its_pieces_speak_for_no_worker_and_it_is_counted_apart(rig: Rig) -> None:
    worker(rig)
    ends = ("warmed", "ok")
    before = [metrics.ended.labels(one)._value.get() for one in ends]
    served = warm(rig)
    for count in range(1, 5):
        await piece(rig, count)
    assert await told(served) == (96, HELD)
    (its,) = rig.router.workers.all()
    assert its.breaker.describe() == "closed, 0 of its last 0 requests failed"
    after = [metrics.ended.labels(one)._value.get() for one in ends]
    assert [one - was for one, was in zip(after, before, strict=True)] == [1, 0]


async def test_another_tenants_blocks_are_not_its_own(rig: Rig) -> None:
    worker(rig, tenant="other")
    before = counted("unheld")
    assert await told(warm(rig)) == (0, 0)
    assert rig.pool.opened["w"] == [], "nobody's answer was just computed there"
    assert counted("unheld") - before == 1


async def test_a_worker_that_is_lost_under_it_ends_it_alone(rig: Rig) -> None:
    worker(rig)
    served = warm(rig)
    opened = await rig.nth("w", 1)
    opened.end(grpc.StatusCode.UNAVAILABLE, "engine_died")
    status = await served.end()
    assert (status.code, status.reason) == (14, "engine_died")
    assert len(rig.pool.opened["w"]) == 1, "it is not tried elsewhere"
    await until(lambda: not rig.router.warming._running["m"])
    await asyncio.sleep(0)
