"""Followers of one run at one gateway: what they hear, and how often it is read for them."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from protos.runs_pb2 import RunEvent, RunEvents, StoredRun
from protos.tokenizer_pb2 import TextDelta
from services.common.config import RunsSettings
from services.common.redis import Redis
from services.gateway.runs.lasting.feeds import Feeds
from services.gateway.runs.lasting.store import Hold, Page, RunStore
from services.gateway.runs.lasting.stored import text_of
from tests.support.waiting import until

OURS = Hold("acme", "req_1")


def said(text: str) -> str:
    delta = RunEvent.Delta(delta=TextDelta(text=text))
    return text_of(RunEvents(events=[RunEvent(delta=delta)]))


class CountingStore(RunStore):
    reads = 0
    away = False

    async def read(self, place: tuple[str, str], after: int = 0) -> Page:
        self.reads += 1
        if self.away:
            raise ConnectionError("away")
        return await super().read(place, after)


@pytest.fixture
async def store(redis: Redis, namespace: str) -> CountingStore:
    store = CountingStore(redis, namespace, "one", RunsSettings())
    await store.begin(OURS.place, text_of(StoredRun()), "", "")
    return store


@pytest.fixture
async def feeds(redis: Redis, store: CountingStore) -> AsyncIterator[Feeds]:
    """That look for themselves hardly ever."""
    feeds = Feeds(redis, store, 600)
    feeds.start()
    yield feeds
    await feeds.stop()


async def next_text(events: AsyncGenerator[RunEvent, None]) -> str:
    async with asyncio.timeout(10):
        return (await anext(events)).delta.delta.text


async def heard(redis: Redis, store: RunStore) -> bool:
    channel = store.channel(OURS.place)
    return dict(await redis.pubsub_numsub(channel)) == {channel: 1}


async def test_what_messages_missed_is_read(
    redis: Redis, store: CountingStore, feeds: Feeds
) -> None:
    """And what they brought is not, for however many."""
    await store.add(OURS, 1, said("a"), {})
    all = [feeds.follow(OURS.place, 1) for _ in range(5)]
    assert await asyncio.gather(*map(next_text, all)) == ["a"] * 5
    waiting = [asyncio.create_task(next_text(one)) for one in all]
    await until(lambda: heard(redis, store))
    await store.add(OURS, 2, said("b"), {})
    assert await asyncio.gather(*waiting) == ["b"] * 5
    assert store.reads <= 3, "once at first, and when it was listened to"

    before = store.reads
    waiting = [asyncio.create_task(next_text(one)) for one in all]
    await redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    await store.add(OURS, 3, said("c"), {})
    assert await asyncio.gather(*waiting) == ["c"] * 5
    assert store.reads <= before + 3
    for one in all:
        await one.aclose()


async def test_who_is_far_behind_reads_for_itself(
    redis: Redis, store: CountingStore, feeds: Feeds
) -> None:
    texts = [f"{number} " + "x" * 20_000 for number in range(5)]
    slow, fast = feeds.follow(OURS.place, 1), feeds.follow(OURS.place, 1)
    for seq, text in enumerate(texts, 1):
        await store.add(OURS, seq, said(text), {})
        assert await next_text(fast) == text
        if seq == 1:
            assert await next_text(slow) == text
    (feed,) = feeds._feeds.values()
    assert feed.behind(1) is None, "not all of it is kept"
    for text in texts[1:]:
        assert await next_text(slow) == text
    await store.drop(OURS.place)
    for one in (slow, fast):
        with pytest.raises(StopAsyncIteration):
            await next_text(one)
    assert not feeds._feeds


async def test_while_redis_is_away_followers_wait_for_so_long(
    store: CountingStore, feeds: Feeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.away = True
    with pytest.raises(ConnectionError):
        await next_text(feeds.follow(OURS.place, 0.0))
    events: Any = feeds.follow(OURS.place, 60.0)
    async with aclosing(events):
        first, before = asyncio.create_task(next_text(events)), store.reads
        await until(lambda: store.reads > before)
        store.away = False
        await store.add(OURS, 1, said("a"), {})
        assert await first == "a"
