"""Runs in Redis: one owner, writes that count once, bounds that hold."""

from collections.abc import Callable
from typing import Any

import pytest

from protos.runs_pb2 import RunEvent, RunEvents, StoredCaller, StoredRun
from protos.tokenizer_pb2 import TextDelta
from services.common.config import RunsSettings
from services.common.redis import Redis
from services.gateway.runs.lasting.store import RunStore
from services.gateway.runs.lasting.stored import text_of

PLACE = ("acme", "req_1")
BODY = text_of(StoredRun(request_id="req_1", caller=StoredCaller(tenant="acme")))


def said(text: str) -> str:
    delta = RunEvent.Delta(delta=TextDelta(text=text))
    return text_of(RunEvents(events=[RunEvent(delta=delta)]))


@pytest.fixture
def store(redis: Redis, namespace: str) -> Callable[..., RunStore]:
    def made(owner: str = "gateway-1", **settings: Any) -> RunStore:
        return RunStore(redis, namespace, owner, RunsSettings(**{"lease_s": 60, **settings}))

    return made


async def begun(store: RunStore, id: str = "req_1", name: str = "", digest: str = "d") -> Any:
    return await store.begin(("acme", id), BODY, name, digest)


async def text(store: RunStore, place: tuple[str, str] = PLACE) -> str:
    return "".join(event.delta.delta.text for event in (await store.read(place)).events)


async def test_a_write_that_is_made_twice_counts_once(store: Callable[..., RunStore]) -> None:
    one = store()
    assert await begun(one) == await begun(one) == ["begun", "req_1"]
    for _ in range(2):
        assert await one.add(PLACE, 1, said("a"), {0: [7, 8]}) == "ok"
    assert await one.add(PLACE, 2, said("b"), {0: [9]}) == "ok"
    assert await text(one) == "ab"
    assert await one.progress(PLACE, 1) == (2, [[7, 8, 9]])
    for _ in range(2):
        assert await one.finish(PLACE, 3, said("c"), forget=False) == "ok"
    assert await text(one) == "abc"
    assert await one.progress(PLACE, 1) == (3, [[]]), "tokens go with the run's end"
    for _ in range(2):
        assert await one.keep(("acme", "req_2"), BODY, said("whole")) == "ok"
    assert await text(one, ("acme", "req_2")) == "whole"


async def test_who_was_taken_for_dead_writes_nothing_more(
    store: Callable[..., RunStore], redis: Redis, namespace: str
) -> None:
    """A gateway that froze, and another that goes on."""
    slow, other = store("slow"), store("other")
    await begun(slow)
    assert await slow.add(PLACE, 1, said("a"), {}) == "ok"
    assert await other.claim() is None, "its lease has not run out"
    await redis.zadd(f"{namespace}:{{runs}}:due", {"acme:req_1": 0})  # as after its lease
    assert await other.claim() == (PLACE, 1)
    assert await slow.add(PLACE, 2, said("late"), {}) == "lost"
    assert await slow.renew(PLACE) == "lost"
    assert await slow.finish(PLACE, 2, said("late"), forget=False) == "lost"
    await slow.release(PLACE)
    assert await other.claim() is None, "it is not the slow one's to give"
    assert await other.add(PLACE, 2, said("b"), {}) == "ok"
    assert await text(other) == "ab"


async def test_what_is_left_is_anothers_at_once(store: Callable[..., RunStore]) -> None:
    one, other = store("one"), store("other")
    await begun(one)
    await one.release(PLACE)
    assert await other.claim() == (PLACE, 0), "nobody was killed"
    assert await one.claim() is None
    await other.finish(PLACE, 1, said("x"), forget=False)
    assert await store("third").claim() is None, "it has ended"


async def test_who_finds_its_own_run_was_not_killed(
    store: Callable[..., RunStore], redis: Redis, namespace: str
) -> None:
    """Redis was away for longer than its lease: a few times of that are no reason to give it up."""
    one = store()
    await begun(one)
    await redis.zadd(f"{namespace}:{{runs}}:due", {"acme:req_1": 0})
    assert await one.claim() == (PLACE, 0)


async def test_a_lease_lives_on_by_writes_and_renewals(
    store: Callable[..., RunStore], redis: Redis, namespace: str
) -> None:
    one, due = store(), f"{namespace}:{{runs}}:due"
    await begun(one)
    for step in (lambda: one.renew(PLACE), lambda: one.add(PLACE, 1, said("a"), {})):
        await redis.zadd(due, {"acme:req_1": 1})
        assert await step() == "ok"
        assert float(await redis.zscore(due, "acme:req_1") or 0) > 1e15
        assert await store("other").claim() is None


async def test_names(store: Callable[..., RunStore]) -> None:
    one = store()
    assert await begun(one, "req_1", "key") == ["begun", "req_1"]
    assert await begun(one, "req_2", "key") == ["same", "req_1"]
    assert await begun(one, "req_2", "key", "other") == ["other"]
    assert await one.begin(("else", "req_2"), BODY, "key", "other") == ["begun", "req_2"]
    await one.finish(PLACE, 1, said("x"), forget=False)
    assert await begun(one, "req_3", "key") == ["same", "req_1"], "an answer is kept"
    await one.drop(PLACE)
    assert await begun(one, "req_3", "key", "other") == ["begun", "req_3"]
    await one.finish(("acme", "req_3"), 1, said("x"), forget=True)
    assert await begun(one, "req_4", "key") == ["begun", "req_4"], "a failure is none"


async def test_a_failure_takes_no_name_that_is_anothers(
    store: Callable[..., RunStore], redis: Redis, namespace: str
) -> None:
    one = store()
    await begun(one, "req_1", "key")
    await redis.set(f"{namespace}:{{runs}}:name:acme:key", "req_12 d")  # as after it expired
    await begun(one, "req_12")
    await one.finish(PLACE, 1, said("x"), forget=True)
    assert await begun(one, "req_3", "key") == ["same", "req_12"]


async def test_what_runs_for_long_is_not_dropped_for_its_age(
    store: Callable[..., RunStore], redis: Redis, namespace: str
) -> None:
    one, all = store(), f"{namespace}:{{runs}}:all:acme"
    for id in ("req_1", "req_2"):
        await begun(one, id)
        await redis.zadd(all, {id: 1})
    await one.finish(("acme", "req_2"), 1, said("x"), forget=False)
    assert await one.add(PLACE, 1, said("a"), {0: [7]}) == "ok"
    assert await text(one) == "a"
    assert await redis.zrange(all, 0, -1) == ["req_1"]


async def test_cancelled(store: Callable[..., RunStore]) -> None:
    one, other = store(), store("other")
    assert await other.cancel(PLACE) == "none"
    await begun(one)
    assert await other.cancel(PLACE) == "cancelled"
    assert await one.renew(PLACE) == await one.add(PLACE, 1, said("a"), {}) == "cancelled"
    assert await one.finish(PLACE, 1, said("end"), forget=True) == "ok"
    assert await other.cancel(PLACE) == "ended"


async def test_bounds(store: Callable[..., RunStore], redis: Redis, namespace: str) -> None:
    one = store(kept=3, max_bytes_per_tenant=4 * len(BODY) + 400)
    for number in range(3):
        assert (await begun(one, f"req_{number}"))[0] == "begun"
    assert await begun(one, "req_3") == ["full"], "all of them run"
    await one.finish(("acme", "req_1"), 1, said("x"), forget=False)
    assert (await begun(one, "req_3"))[0] == "begun"
    assert await one.find(("acme", "req_1")) is None
    assert await one.add(("acme", "req_0"), 1, said("x" * 400), {}) == "full"
    assert (await one.begin(("else", "req_9"), BODY, "", "d"))[0] == "begun"

    root = f"{namespace}:{{runs}}"
    sizes = await redis.hgetall(f"{root}:sizes:acme")
    assert set(sizes) == {"req_0", "req_2", "req_3"}
    assert int(await redis.get(f"{root}:bytes:acme")) == sum(map(int, sizes.values()))
    for id in sizes:
        await one.drop(("acme", id))
    left = {key async for key in redis.scan_iter(f"{root}:*") if "acme" in key}
    assert left == {f"{root}:bytes:acme"}
    assert await redis.get(f"{root}:bytes:acme") == "0"
