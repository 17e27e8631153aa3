"""Whether a search may be told again: what two replicas see of each other's writes, in Redis."""

import pytest

from services.common.errors import PenstockError
from services.common.redis import Redis, connect
from services.retrieval.cache import revisions as module
from services.retrieval.cache.revisions import Revisions, Seen
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine Redis answers late."""
    monkeypatch.setattr(module, "_LOOK_S", 30.0)


@pytest.fixture
def one(redis: Redis, namespace: str) -> Revisions:
    return Revisions(redis, namespace, 60)


@pytest.fixture
def other(redis: Redis, namespace: str) -> Revisions:
    return Revisions(redis, namespace, 60)


async def seen(revisions: Revisions, *collections: str, tenant: str = "acme") -> Seen:
    found = await revisions.seen(tenant, collections)
    assert found is not None
    return found


async def test_a_write_is_seen_by_all_from_its_beginning(one, other):
    before = await seen(one, "a", "b")
    assert before == await seen(other, "a", "b")
    assert before.settled
    async with one.writing("acme", "a"):
        during = await seen(other, "a", "b")
        assert not during.settled
        assert (await seen(other, "b")).settled
        assert during.revisions[0] != before.revisions[0]
        assert during.revisions[1] == before.revisions[1]
    after = await seen(other, "a", "b")
    assert after == Seen(during.revisions, True)


async def test_what_adds_is_told_from_what_removes(one):
    first = (await seen(one, "a")).revisions[0]
    async with one.writing("acme", "a"):
        pass
    added = (await seen(one, "a")).revisions[0]
    assert added.removal == first.removal
    assert added.content != first.content
    async with one.writing("acme", "a", removes=True):
        pass
    removed = (await seen(one, "a")).revisions[0]
    assert removed.removal != added.removal
    assert removed.content != added.content


async def test_tenants_are_apart(one):
    async with one.writing("rival", "a"):
        assert (await seen(one, "a")).settled
    mine = await seen(one, "a")
    assert mine.revisions != (await seen(one, "a", tenant="rival")).revisions


async def test_all_writes_have_to_be_done(one, other):
    async with one.writing("acme", "a"):
        async with other.writing("acme", "a"):
            pass
        assert not (await seen(one, "a")).settled
    assert (await seen(one, "a")).settled


async def test_one_that_failed_may_go_on_in_the_store_and_counts_until_its_lease_is_over(one):
    with pytest.raises(ValueError, match="failed"):
        async with one.writing("acme", "a"):
            raise ValueError("failed")
    assert not (await seen(one, "a")).settled


async def test_a_killed_writers_lease_ends_it(redis, namespace, one):
    dies = Revisions(redis, namespace, 0.2)
    before = await seen(one, "a")
    await dies.writing("acme", "a").__aenter__()
    assert not (await seen(one, "a")).settled

    async def settled() -> bool:
        return (await seen(one, "a")).settled

    await until(settled, 10, "its lease is over")
    after = await seen(one, "a")
    assert after.revisions != before.revisions


async def test_a_lost_revision_never_comes_back(redis, one):
    before = await seen(one, "a")
    await redis.delete(*one._keys("acme"))
    assert (await seen(one, "a")).revisions != before.revisions


async def test_without_redis_nothing_is_known_and_nothing_is_written(monkeypatch, namespace):
    nowhere = connect("unix:///nowhere/redis.sock?db=0")
    away = Revisions(nowhere, namespace, 60)
    monkeypatch.setattr(module, "_PATIENCE_S", 0.05)
    assert await away.seen("acme", ["a"]) is None
    asked = away._asks_again
    assert await away.seen("acme", ["a"]) is None
    assert away._asks_again == asked, "it is not asked again at once"
    with pytest.raises(PenstockError) as refused:
        async with away.writing("acme", "a"):
            pytest.fail("written")
    assert refused.value.reason == "revisions_away"
    await nowhere.aclose()
