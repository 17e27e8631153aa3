"""Runs in Redis: one owner, writes that count once, bounds that hold."""

from collections.abc import Callable
from typing import Any

import pytest

from protos.runs_pb2 import RunEvent, RunEvents, StoredCaller, StoredRun
from protos.tokenizer_pb2 import TextDelta
from services.common.config import RunsSettings
from services.common.redis import Redis
from services.gateway.runs.lasting.store import Hold, RunStore
from services.gateway.runs.lasting.stored import text_of

PLACE = ("acme", "req_1")
OURS = Hold("acme", "req_1")
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
        assert await one.add(OURS, 1, said("a"), {0: [7, 8]}) == "ok"
    assert await one.add(OURS, 2, said("b"), {0: [9]}) == "ok"
    assert await text(one) == "ab"
    assert await one.progress(PLACE, 1) == (2, [[7, 8, 9]])
    for _ in range(2):
        assert await one.finish(OURS, 3, said("c")) == "ok"
    assert await text(one) == "abc"
    assert await one.progress(PLACE, 1) == (3, [[]]), "tokens go with the run's end"
    for _ in range(2):
        assert await one.keep(("acme", "req_2"), BODY, said("whole")) == "ok"
    assert await text(one, ("acme", "req_2")) == "whole"


def due(redis: Redis, namespace: str, id: str = "req_1") -> Any:
    """As after its lease."""
    return redis.zadd(f"{namespace}:{{runs}}:due", {f"acme:{id}": 0})


async def test_who_was_taken_for_dead_writes_nothing_more(
    store: Callable[..., RunStore], redis: Redis, namespace: str
) -> None:
    """A gateway that froze, and another that goes on."""
    slow, other = store("slow"), store("other")
    await begun(slow)
    assert await slow.add(OURS, 1, said("a"), {}) == "ok"
    assert await other.claim() is None, "its lease has not run out"
    await due(redis, namespace)
    theirs = Hold(*PLACE, 2)
    assert await other.claim() == (theirs, 1)
    assert await slow.add(OURS, 2, said("late"), {}) == "lost"
    assert await slow.renew(OURS) == "lost"
    assert await slow.finish(OURS, 2, said("late")) == "lost"
    assert await slow.fail(OURS, said("late")) == "lost"
    await slow.release(OURS)
    assert await other.claim() is None, "it is not the slow one's to give"
    assert await other.add(theirs, 2, said("b"), {}) == "ok"
    assert await text(other) == "ab"


async def test_who_slept_while_another_had_it_does_not_go_on_where_it_was(
    store: Callable[..., RunStore], redis: Redis, namespace: str
) -> None:
    """Also where the run is this gateway's again: what it has of it is not what was told."""
    slow, other = store("slow"), store("other")
    await begun(slow)
    assert await slow.add(OURS, 1, said("a"), {}) == "ok"
    await due(redis, namespace)
    claimed = await other.claim()
    assert claimed is not None
    assert await other.add(claimed[0], 2, said("b"), {}) == "ok"
    await other.release(claimed[0])
    again = await slow.claim()
    assert again is not None
    for seq in (2, 3):
        assert await slow.add(OURS, seq, said("late"), {}) == "lost"
    assert await slow.add(again[0], 3, said("c"), {}) == "ok"
    assert await text(slow) == "abc"


async def test_what_is_left_is_anothers_at_once(store: Callable[..., RunStore]) -> None:
    one, other = store("one"), store("other")
    await begun(one)
    await one.add(OURS, 1, said("a"), {})
    await one.release(OURS)
    assert await one.add(OURS, 2, said("late"), {}) == "lost"
    claimed = await other.claim()
    assert claimed is not None
    assert claimed[1] == 0, "nobody was killed"
    assert await one.claim() is None
    assert await other.finish(claimed[0], 2, said("x")) == "ok"
    assert await store("third").claim() is None, "it has ended"


async def test_what_nobody_was_told_of_is_not_run(
    store: Callable[..., RunStore], redis: Redis, namespace: str
) -> None:
    """Redis took it and its gateway did not hear that: nobody would ever look at it."""
    one, other = store("one"), store("other")
    await begun(one, name="key")
    await due(redis, namespace)
    assert await other.claim() is None
    assert await other.find(PLACE) is None
    assert await one.add(OURS, 1, said("a"), {}) == "lost"
    assert await begun(other, "req_2", "key") == ["begun", "req_2"], "and has no name any more"


async def test_who_finds_its_own_run_was_not_killed(
    store: Callable[..., RunStore], redis: Redis, namespace: str
) -> None:
    """Redis was away for longer than its lease: a few times of that are no reason to give it up."""
    one = store()
    await begun(one)
    await one.add(OURS, 1, said("a"), {})
    await due(redis, namespace)
    assert await one.claim() == (OURS, 0)
    assert await one.add(OURS, 2, said("b"), {}) == "ok"


async def test_a_lease_lives_on_by_writes_and_renewals(
    store: Callable[..., RunStore], redis: Redis, namespace: str
) -> None:
    one, leases = store(), f"{namespace}:{{runs}}:due"
    await begun(one)
    for step in (lambda: one.renew(OURS), lambda: one.add(OURS, 1, said("a"), {})):
        await redis.zadd(leases, {"acme:req_1": 1})
        assert await step() == "ok"
        assert float(await redis.zscore(leases, "acme:req_1") or 0) > 1e15
        assert await store("other").claim() is None


async def test_names(store: Callable[..., RunStore]) -> None:
    one = store()
    assert await begun(one, "req_1", "key") == ["begun", "req_1"]
    assert await begun(one, "req_2", "key") == ["same", "req_1"]
    assert await begun(one, "req_2", "key", "other") == ["other"]
    assert await one.begin(("else", "req_2"), BODY, "key", "other") == ["begun", "req_2"]
    await one.finish(OURS, 1, said("x"))
    assert await begun(one, "req_3", "key") == ["same", "req_1"], "an answer is kept"
    await one.drop(PLACE)
    assert await begun(one, "req_3", "key", "other") == ["begun", "req_3"]
    await one.fail(Hold("acme", "req_3"), said("x"))
    assert await begun(one, "req_4", "key") == ["begun", "req_4"], "a failure is none"


async def test_a_failure_takes_no_name_that_is_anothers(
    store: Callable[..., RunStore], redis: Redis, namespace: str
) -> None:
    one = store()
    await begun(one, "req_1", "key")
    await redis.set(f"{namespace}:{{runs}}:name:acme:key", "req_12 d")  # as after it expired
    await begun(one, "req_12")
    await one.fail(OURS, said("x"))
    assert await begun(one, "req_3", "key") == ["same", "req_12"]


async def test_what_runs_for_long_is_not_dropped_for_its_age(
    store: Callable[..., RunStore], redis: Redis, namespace: str
) -> None:
    one, all = store(), f"{namespace}:{{runs}}:all:acme"
    for id in ("req_1", "req_2"):
        await begun(one, id)
        await redis.zadd(all, {id: 1})
    await one.finish(Hold("acme", "req_2"), 1, said("x"))
    assert await one.add(OURS, 1, said("a"), {0: [7]}) == "ok"
    assert await text(one) == "a"
    assert await redis.zrange(all, 0, -1) == ["req_1"]


async def test_what_is_cancelled_has_ended(
    store: Callable[..., RunStore], redis: Redis, namespace: str
) -> None:
    """At once, whether its owner lives or not."""
    one, other = store(), store("other")
    assert await other.cancel(PLACE, said("end")) == "none"
    await begun(one, name="key")
    assert await one.add(OURS, 1, said("a"), {0: [7]}) == "ok"
    for told in ("cancelled", "ended"):
        assert await other.cancel(PLACE, said("end")) == told
    assert await text(one) == "aend"
    assert await one.renew(OURS) == await one.add(OURS, 2, said("a"), {}) == "cancelled"
    assert await one.finish(OURS, 2, said("whole")) == "cancelled", "it is no answer"
    assert await text(one) == "aend"
    await due(redis, namespace)
    assert await other.claim() is None
    assert await one.progress(PLACE, 1) == (2, [[]])
    assert await begun(one, "req_2", "key") == ["begun", "req_2"]


@pytest.mark.parametrize(
    ("name", "why", "heard"), [("k", "no", "no"), ("k", "", ""), ("", "no", "")]
)
async def test_what_is_refused_is_heard_by_who_waits_for_it_and_leaves_nothing(
    store: Callable[..., RunStore], redis: Redis, namespace: str, name: str, why: str, heard: str
) -> None:
    one = store()
    await one.begin(PLACE, BODY, name, "d", about="x" * 1000)
    for _ in range(2):
        await one.refuse(OURS, why and said(why))
    assert await text(one) == heard
    assert await one.find(PLACE) is None
    assert await begun(one, "req_2", name) == ["begun", "req_2"]
    root = f"{namespace}:{{runs}}"
    left = [key async for key in redis.scan_iter(f"{root}:*:req_1")]
    assert len(left) == (2 if heard else 0)
    for key in left:
        assert 0 < await redis.ttl(key) <= 60
    fields = await redis.hkeys(f"{root}:run:acme:req_1")
    assert not {"body", "about"} & set(fields), "what its client sent counts as nobody's"
    assert await redis.zrange(f"{root}:all:acme", 0, -1) == ["req_2"]
    assert int(await redis.get(f"{root}:bytes:acme")) == len(BODY)


async def test_bounds(store: Callable[..., RunStore], redis: Redis, namespace: str) -> None:
    one = store(kept=3, max_bytes_per_tenant=4 * len(BODY) + 400)
    for number in range(3):
        assert (await begun(one, f"req_{number}"))[0] == "begun"
    assert await begun(one, "req_3") == ["full"], "all of them run"
    await one.finish(Hold("acme", "req_1"), 1, said("x"))
    assert (await begun(one, "req_3"))[0] == "begun"
    assert await one.find(("acme", "req_1")) is None
    assert await one.add(Hold("acme", "req_0"), 1, said("x" * 400), {}) == "full"
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
