"""What of earlier searches is told again: to whom, for what, how long, and what a write does."""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest

from protos.common_pb2 import Caller, Passage
from protos.retrieval_pb2 import SearchReply, SearchRequest
from services.common.config import RetrievalSettings
from services.common.errors import PenstockError, invalid, unavailable
from services.common.redis import Redis
from services.common.telemetry.telemetry import Telemetry
from services.retrieval import metrics
from services.retrieval.cache import revisions as revisions_module
from services.retrieval.cache import searches as module
from services.retrieval.cache.results import Result, Results
from services.retrieval.cache.revisions import Revision, Revisions
from services.retrieval.cache.searches import Embedded, Searches

TELEMETRY = Telemetry("retrieval", "r-1")
NO_TOKENS = np.empty((0, 1), np.float32)


class Replica:
    """One with a cache, before a store that all replicas share."""

    def __init__(self, redis: Redis, namespace: str, **settings: Any) -> None:
        self.revisions = Revisions(redis, namespace, 60)
        self.searches = Searches(RetrievalSettings(**settings), self.revisions)
        self.embedded = self.looked = 0
        self.text = "found"
        self.vectors: dict[str, list[float]] = {}
        self.failure: Exception | None = None
        self.pause: Callable[[], Any] = lambda: asyncio.sleep(0)

    async def ask(self, query: str = "when?", tenant: str = "acme", **more: Any) -> SearchReply:
        given = {"collections": ["a"], "limit": 5, **more}
        request = SearchRequest(caller=Caller(tenant=tenant, request_id="r"), query=query, **given)

        async def embed() -> Embedded:
            self.embedded += 1
            vector = np.array(self.vectors.get(query, [1.0, 0.0]), np.float32)
            return Embedded(vector, len(query.split()), NO_TOKENS)

        async def look(_: Embedded) -> SearchReply:
            await self.pause()
            self.looked += 1
            if self.failure is not None:
                raise self.failure
            return SearchReply(passages=[Passage(text=f"{self.text} of {tenant}", score=0.5)])

        with TELEMETRY.span("search") as span:
            return await self.searches.find(request, embed, look, span)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine Redis answers late."""
    monkeypatch.setattr(revisions_module, "_LOOK_S", 30.0)


@pytest.fixture
def replica(redis: Redis, namespace: str) -> Replica:
    return Replica(redis, namespace)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def looks(outcome: str) -> float:
    return float(metrics.CACHE_LOOKS.labels(outcome)._value.get())


async def test_the_same_search_is_made_once(replica):
    before = looks("exact"), looks("missed")
    first = await replica.ask("When  is it?")
    again = await replica.ask(" When is\nit? ")
    assert (replica.embedded, replica.looked) == (1, 1)
    assert list(again.passages) == list(first.passages)
    assert (first.cached, first.age_s, first.stale) == (False, 0, False)
    assert again.cached
    assert again.age_s > 0
    assert not again.stale
    assert again.tokens == first.tokens == 3
    assert (looks("exact"), looks("missed")) == (before[0] + 1, before[1] + 1)


async def test_a_query_is_the_same_however_it_is_written(replica):
    await replica.ask("wann öffnet das Café?")
    assert (await replica.ask("wann o\u0308ffnet  das Cafe\u0301?")).cached
    marks = "a" + "\u0301" * 20_000 + "\u0316" * 20_000
    began = time.process_time()
    await replica.ask(marks)
    assert (await replica.ask(marks)).cached
    assert time.process_time() - began < 1.0, "seconds, for each mark passed all others"


@pytest.mark.parametrize(
    "more",
    [
        {"query": "When?"},
        {"tenant": "rival"},
        {"collections": ["b"]},
        {"collections": ["a", "b"]},
        {"limit": 4},
        {"score_threshold": 0.5},
    ],
)
async def test_another_search_is_another(replica, more):
    await replica.ask()
    reply = await replica.ask(**more)
    assert replica.looked == 2
    assert not reply.cached
    assert reply.passages[0].text.endswith(more.get("tenant", "acme"))


async def test_collections_are_the_same_in_any_order(replica):
    await replica.ask(collections=["b", "a", "b"])
    assert (await replica.ask(collections=["a", "b"])).cached


async def test_whatever_a_request_can_say_is_in_its_key():
    """Also what will be added: but for how old, who exactly, and the policy, which judges anew."""
    left_out = {"caller", "judged", "policy", "max_age_s", "similar_at_least"}
    base = SearchRequest(caller=Caller(tenant="t"), collections=["a"], query="q", limit=1)
    known = module._Asked.of(base, RetrievalSettings()).key
    for field in SearchRequest.DESCRIPTOR.fields:
        if field.name in left_out:
            continue
        other = SearchRequest()
        other.CopyFrom(base)
        value = getattr(other, field.name)
        if field.message_type is not None:
            (value.add if field.is_repeated else value.SetInParent)()
        elif field.is_repeated:
            value.append({field.TYPE_STRING: "z"}.get(field.type, 1))
        else:
            given = {field.TYPE_STRING: "z", field.TYPE_BOOL: True, field.TYPE_BYTES: b"z"}
            setattr(other, field.name, given.get(field.type, 7))
        assert module._Asked.of(other, RetrievalSettings()).key != known, field.name


async def test_what_is_taken_out_is_a_copy(replica):
    first = await replica.ask()
    first.passages[0].text = "poison"
    second = await replica.ask()
    second.passages[0].text = "poison"
    assert (await replica.ask()).passages[0].text == "found of acme"


async def test_a_write_anywhere_ends_it_at_once(replica, redis, namespace):
    other = Replica(redis, namespace)
    await replica.ask()
    async with other.revisions.writing("acme", "a"):
        assert not (await replica.ask()).cached
        assert not (await replica.ask()).cached, "nothing is kept while it is under way"
    replica.text = "changed"
    assert (await replica.ask()).passages[0].text == "changed of acme"
    assert (await replica.ask()).cached
    async with other.revisions.writing("rival", "a"), other.revisions.writing("acme", "b"):
        assert (await replica.ask()).cached


async def test_a_search_that_a_write_overtakes_is_not_kept_for_later(replica):
    """It read the store before the write, and is done after."""
    passed, written = asyncio.Event(), asyncio.Event()

    async def overtaken() -> None:
        passed.set()
        await written.wait()

    replica.pause = overtaken
    slow = asyncio.create_task(replica.ask())
    await passed.wait()
    async with replica.revisions.writing("acme", "a"):
        pass
    written.set()
    await slow
    replica.text = "changed"
    assert (await replica.ask()).passages[0].text == "changed of acme"


@pytest.mark.parametrize("seed", range(3))
async def test_no_interleaving_tells_what_was_written_over(redis, namespace, seed):
    """Two replicas, writers and searches at once: what a search tells is as new as the last write
    that had ended when it began."""
    draw = random.Random(seed)
    store = {"a": 0, "b": 0}
    ended = dict(store)
    replicas = [Replica(redis, namespace) for _ in range(2)]
    hits = 0

    async def write(replica: Replica, collection: str) -> None:
        async with replica.revisions.writing("acme", collection):
            await asyncio.sleep(draw.random() / 500)
            store[collection] += 1
            version = store[collection]
            await asyncio.sleep(draw.random() / 500)
        ended[collection] = max(ended[collection], version)

    async def search(replica: Replica, collection: str) -> None:
        nonlocal hits
        least = ended[collection]
        request = SearchRequest(
            caller=Caller(tenant="acme"), collections=[collection], query="q", limit=1
        )

        async def embed() -> Embedded:
            await asyncio.sleep(draw.random() / 500)
            return Embedded(np.ones(1, np.float32), 1, NO_TOKENS)

        async def look(_: Embedded) -> SearchReply:
            read = store[collection]
            await asyncio.sleep(draw.random() / 500)
            return SearchReply(passages=[Passage(position=read)])

        with TELEMETRY.span("search") as span:
            reply = await replica.searches.find(request, embed, look, span)
        hits += reply.cached
        assert reply.passages[0].position >= least

    async def client() -> None:
        for _ in range(60):
            do = write if draw.random() < 0.15 else search
            await do(draw.choice(replicas), draw.choice("ab"))

    await asyncio.gather(*(client() for _ in range(4)))
    assert hits > 10


async def test_it_is_told_no_longer_than_it_may(replica, clock):
    await replica.ask()
    clock[0] += 299
    reply = await replica.ask()
    assert reply.cached
    assert reply.age_s == 299
    assert not (await replica.ask(max_age_s=299)).cached
    clock[0] += 10
    assert not (await replica.ask(max_age_s=0)).cached
    assert (await replica.ask(max_age_s=11)).cached
    clock[0] += 300
    assert not (await replica.ask()).cached


async def test_nothing_is_kept_of_a_store_that_allows_no_age(replica):
    await replica.ask(max_age_s=0)
    assert not (await replica.ask()).cached
    replica.failure = unavailable("away", stage="retrieval", reason="store_away")
    with pytest.raises(PenstockError):
        await replica.ask("other", max_age_s=0)


async def test_a_similar_query_will_do_where_that_is_allowed(replica):
    replica.vectors = {"one": [1, 0], "near": [0.96, 0.28], "far": [0.6, 0.8]}
    await replica.ask("one", similar_at_least=0.95)
    near = await replica.ask("near", similar_at_least=0.95)
    assert (replica.looked, near.cached, near.age_s > 0) == (1, False, True)
    assert near.tokens == 1, "its own, as it was embedded"
    assert (await replica.ask("far", similar_at_least=0.95)).age_s == 0
    assert (await replica.ask("near")).age_s == 0, "off, where nothing is said"


@pytest.mark.parametrize(
    "more", [{"tenant": "rival"}, {"collections": ["b"]}, {"limit": 4}, {"score_threshold": 0.1}]
)
async def test_similar_is_no_other_tenants_store_or_limit(replica, more):
    await replica.ask("one", similar_at_least=0.1)
    assert (await replica.ask("two", similar_at_least=0.1, **more)).age_s == 0
    assert replica.looked == 2


async def test_a_similar_one_is_as_fresh_as_any(replica):
    await replica.ask("one")
    async with replica.revisions.writing("acme", "a"):
        assert (await replica.ask("two", similar_at_least=0.1)).age_s == 0
    assert (await replica.ask("three", similar_at_least=0.1)).age_s == 0
    assert (await replica.ask("four", similar_at_least=0.1)).age_s > 0


AWAY = [
    unavailable("slow", stage="retrieval", reason="store_slow"),
    PenstockError(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", reason="queue_full"),
    PenstockError(grpc.StatusCode.INTERNAL, "failed"),
]


@pytest.mark.parametrize("failure", AWAY)
async def test_while_the_store_is_away_what_was_found_before_is_told_and_marked(
    replica, clock, failure
):
    await replica.ask()
    clock[0] += 2000  # long past its freshness
    replica.failure = failure
    reply = await replica.ask()
    assert (reply.stale, reply.age_s) == (True, 2000)
    assert reply.passages[0].text == "found of acme"
    for other in ({"tenant": "rival"}, {"query": "never asked"}, {"limit": 1}):
        with pytest.raises(PenstockError) as raised:
            await replica.ask(**other)
        assert raised.value is failure
    clock[0] += 2000  # too old for that, too
    with pytest.raises(PenstockError):
        await replica.ask()


async def test_what_is_gone_for_good_is_not_told_even_then(replica):
    await replica.ask()
    async with replica.revisions.writing("acme", "a"):
        pass
    replica.failure = AWAY[0]
    assert (await replica.ask()).stale, "something was added: what was there still is"
    async with replica.revisions.writing("acme", "a", removes=True):
        with pytest.raises(PenstockError):
            await replica.ask()
    with pytest.raises(PenstockError):
        await replica.ask()


async def test_a_request_that_is_wrong_is_not_answered_from_before(replica, clock):
    await replica.ask()
    clock[0] += 400
    replica.failure = invalid("no", "query")
    with pytest.raises(PenstockError) as raised:
        await replica.ask()
    assert raised.value is replica.failure


async def test_without_redis_searches_are_made_and_none_is_told_again(replica, monkeypatch):
    await replica.ask()

    async def away(tenant: str, collections: Any) -> None:
        return None

    monkeypatch.setattr(replica.revisions, "seen", away)
    before = looks("unusable")
    assert not (await replica.ask()).cached
    assert looks("unusable") == before + 1
    replica.failure = AWAY[0]
    with pytest.raises(PenstockError):
        await replica.ask()


# ---- bounds -------------------------------------------------------------------------------------


def result(tenant: str, name: str, size: int) -> Result:
    vector = np.zeros(0, np.float32)
    reply = bytes(size - 1024)
    revision = (Revision("r", "c"),)
    return Result(tenant, b"kind", name.encode(), revision, 0.0, 0.0, reply, vector)


def test_there_is_room_for_so_many_bytes_and_for_every_tenant():
    results = Results(80 * 1024)
    for number in range(200):
        results.put(result("greedy", f"{number}", 2048))
    assert results.held <= 40 * 1024, "one alone has half"
    assert results.get("greedy", b"199") is not None
    assert results.get("greedy", b"0") is None
    kept = len(results)
    for number in range(200):
        results.put(result("other", f"{number}", 2048))
    theirs = [results.get("greedy", f"{number}".encode()) for number in range(200)]
    assert sum(one is not None for one in theirs) == kept, "no tenant takes away another's"
    assert results.get("other", b"199") is not None
    assert results.held <= 80 * 1024


def test_a_newcomer_finds_room_where_all_is_taken():
    results = Results(64 * 1024)
    for tenant in range(40):
        results.put(result(f"t{tenant}", "x", 2048))
    assert results.get("t39", b"x") is not None
    assert results.held <= 64 * 1024


def test_the_one_used_last_stays_and_one_too_large_is_not_kept():
    results = Results(20 * 1024)
    for name in "abcde":
        results.put(result("t", name, 2048))
    assert results.get("t", b"a") is not None
    results.put(result("t", "f", 2048))
    assert results.get("t", b"a") is not None
    assert results.get("t", b"b") is None
    results.put(result("t", "large", 3000))
    assert results.get("t", b"large") is None
    results.put(result("t", "a", 1500))
    assert len(results) == 5


def test_without_room_nothing_is_kept():
    results = Results(0)
    results.put(result("t", "a", 2048))
    assert len(results) == results.held == 0


def test_nothing_is_left_of_what_is_dropped():
    results = Results(10**6)
    for name in "ab":
        results.put(result("t", name, 2048))
    results.drop("t", [b"a", b"b", b"c"])
    assert (len(results), results.held, results._of, dict(results._kinds)) == (0, 0, {}, {})
    assert results.alike("t", b"kind", np.zeros(0, np.float32)) == []
