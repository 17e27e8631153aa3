"""Revocation is told at once: two gateways' authenticators on one real Redis."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.common.config import GatewaySettings
from services.common.embedded_redis import EmbeddedRedis
from services.common.errors import PenstockError
from services.common.redis import Redis, ResponseError, connect
from services.gateway.identity.api_keys import KeyVerifier
from services.gateway.identity.auth import Authenticator
from services.gateway.identity.key_record import KeyRecord, key_hash
from services.gateway.identity.keys import KeyStore
from services.gateway.identity.news import News, channel
from services.gateway.identity.tenants import TenantStore
from tests.support.waiting import until


class Door:
    """What of a gateway knows its callers; its keys are trusted for an hour."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self.redis = redis
        self.keys = SlowStore(redis, namespace)
        self.tenants = TenantStore(redis, namespace)
        settings = GatewaySettings(key_cache_s=3600, key_stale_s=3600)
        self.auth = Authenticator([KeyVerifier(self.keys, self.tenants)], self.keys, settings)
        self.listening = 0
        self.news = News(redis, channel(namespace), self.auth.told, self._recheck)

    async def _recheck(self) -> None:
        await self.auth.recheck()
        self.listening += 1

    async def admits(self, key: str) -> bool:
        """Raises what is no verdict on the key, a 503."""
        try:
            await self.auth.identify(f"Bearer {key}")
        except PenstockError as refused:
            if refused.reason != "invalid_api_key":
                raise
            return False
        return True

    async def refuses(self, key: str) -> bool:
        return not await self.admits(key)


class SlowStore(KeyStore):
    """Hands out what it found only once `go_on` is set."""

    go_on: asyncio.Event | None = None
    found = 0

    async def find(self, hashed: str) -> KeyRecord | None:
        record = await super().find(hashed)
        self.found += 1
        if self.go_on is not None:
            await self.go_on.wait()
        return record


@asynccontextmanager
async def doors(url: str, namespace: str, number: int = 2) -> AsyncIterator[list[Door]]:
    opened = [Door(connect(url), namespace) for _ in range(number)]
    for door in opened:
        door.news.start()
    try:
        await until(lambda: all(door.listening for door in opened), 10, "they listen")
        yield opened
    finally:
        for door in opened:
            await door.news.stop()
            await door.redis.aclose()


@pytest.fixture
async def operator(redis_url: str, namespace: str) -> AsyncIterator[KeyStore]:
    redis = connect(redis_url)
    yield KeyStore(redis, namespace)
    await redis.aclose()


async def test_all_gateways_hear_of_it_at_once(operator, redis_url, namespace):
    key, record = await operator.create("acme")
    other, _ = await operator.create("acme")
    async with doors(redis_url, namespace) as both:
        for door in both:
            assert await door.admits(key)
            assert await door.admits(other)
        await operator.revoke(record.id)
        for door in both:
            await until(lambda door=door: door.refuses(key), 5, "the revoked key is refused")
            assert await door.admits(other)
            assert door.keys.found == 2, "nobody looked anything up for it"


async def test_a_revoked_key_stays_dead_while_redis_is_away(namespace):
    with EmbeddedRedis() as server:
        async with doors(server.url, namespace) as both:
            operator = both[0].keys
            key, record = await operator.create("acme")
            other, _ = await operator.create("acme")
            for door in both:
                assert await door.admits(key)
                assert await door.admits(other)
            await operator.revoke(record.id)
            for door in both:
                await until(lambda door=door: door.refuses(key), 5)
                door.auth._settings.key_cache_s = 0  # nothing but the stale cache is left
            server.stop()
            for door in both:
                assert await door.refuses(key), "401, and not 503"
                assert await door.admits(other), "known, and not revoked"


async def test_news_missed_while_the_connection_was_down_are_made_up_for(
    operator, redis_url, namespace
):
    key, record = await operator.create("acme")
    async with doors(redis_url, namespace, 1) as (door,):
        assert await door.admits(key)
        await door.news.stop()
        await operator.revoke(record.id)  # nobody hears it
        assert await door.admits(key)
        door.news.start()
        await until(lambda: door.refuses(key), 5, "it was asked for after the connection")
        assert not door.auth.knows_keys, "nothing of it is kept that could let it in"


async def test_a_cut_connection_is_made_again_and_rechecked(operator, redis_url, namespace):
    key, _ = await operator.create("acme")
    async with doors(redis_url, namespace, 1) as (door,):
        assert await door.admits(key)
        heard = door.listening
        hashed = key_hash(key)
        # Revoked without a message: what is told while a connection is cut reaches nobody.
        await operator._redis.hset(f"{namespace}:{{identity}}:revoked", hashed, "1")
        await operator._redis.client_kill_filter(_type="pubsub")
        await until(lambda: door.listening > heard, 10, "it listens again")
        assert await door.refuses(key)
        second, other = await operator.create("acme")
        assert await door.admits(second)
        await operator.revoke(other.id)
        await until(lambda: door.refuses(second), 5, "and hears news again")


async def test_a_key_revoked_while_it_is_looked_up_is_not_remembered(
    operator, redis_url, namespace
):
    key, record = await operator.create("acme")
    async with doors(redis_url, namespace, 1) as (door,):
        door.keys.go_on = asyncio.Event()
        asked = asyncio.create_task(door.admits(key))
        await until(lambda: door.keys.found == 1, 5)  # it has the record of a good key in hand
        await operator.revoke(record.id)
        await until(lambda: key_hash(key) in door.auth._revoked, 5)
        door.keys.go_on.set()
        assert not await asked
        assert await door.refuses(key)


async def test_a_look_up_older_than_the_recheck_is_made_again(operator, redis_url, namespace):
    key, record = await operator.create("acme")
    async with doors(redis_url, namespace, 1) as (door,):
        await door.news.stop()
        door.keys.go_on = asyncio.Event()
        asked = asyncio.create_task(door.admits(key))
        await until(lambda: door.keys.found == 1, 5)
        await operator.revoke(record.id)  # not heard, and the key is not yet known here
        heard = door.listening
        door.news.start()
        await until(lambda: door.listening > heard, 5)
        door.keys.go_on.set()
        assert not await asked


class OddRedis:
    """Fails as each of `failures` says, one connection each; then it tells that one is subscribed,
    and news of one key to who has listened without a fault."""

    def __init__(self, failures: list[Exception]) -> None:
        self.failures = failures
        self.tells: list[dict[str, str]] = []
        self.open = 0

    def pubsub(self) -> "OddRedis":
        return self

    async def __aenter__(self) -> "OddRedis":
        self.open += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self.open -= 1

    async def subscribe(self, channel: str) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.tells = [{"type": "subscribe", "data": "1"}, {"type": "message", "data": "hash"}]

    async def get_message(self, timeout: float) -> dict[str, str] | None:
        if self.tells:
            return self.tells.pop(0)
        await asyncio.sleep(0.001)
        return None


async def test_whatever_redis_answers_it_listens_on(monkeypatch):
    monkeypatch.setattr("services.gateway.identity.news._RETRY_S", 0)
    redis = OddRedis([ConnectionError(), ResponseError("NOPERM"), TimeoutError()])
    happened = []

    async def recheck() -> None:
        happened.append("recheck")
        if len(happened) == 1:
            raise ConnectionError  # what was missed is still to be asked for

    news = News(redis, "news", happened.append, recheck)
    await news.stop()  # of what was not started
    news.start()
    await until(lambda: "hash" in happened, 5)
    assert happened == ["recheck", "recheck", "hash"]
    await news.stop()
    assert redis.open == 0
