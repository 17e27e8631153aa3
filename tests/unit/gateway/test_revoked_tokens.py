"""Revocations of tokens as they are kept in Redis, told, and logged."""

import pytest
from pydantic import ValidationError

from services.common.config import IdentitySettings
from services.common.redis import Redis
from services.gateway.identity import revoked_tokens
from services.gateway.identity.audit import Actor, AuditLog
from services.gateway.identity.news import channel
from services.gateway.identity.revoked_tokens import TokenRevocations

ANN = Actor("ann", "10.0.0.1")


@pytest.fixture
def store(redis: Redis, namespace: str) -> TokenRevocations:
    return TokenRevocations(redis, namespace, IdentitySettings(oidc_longest_s=100, oidc_skew_s=5))


async def test_a_revocation_is_told_and_logged(store, redis, namespace):
    async with redis.pubsub() as news:
        await news.subscribe(channel(namespace))
        await store.revoke("acme", user="oidc:u1", by=ANN)
        await store.revoke(None, token="t 1", by=ANN)
        heard: list[str] = []
        while len(heard) < 2:
            message = await news.get_message(timeout=5)
            assert message is not None
            heard += [message["data"]] if message["type"] == "message" else []
    assert heard == ["tenant acme", "tenant "], "an administrator's tenant has no name"
    last, first = await AuditLog(redis, namespace).read(9)
    assert (first.action, first.what, first.after["tenant"]) == ("token.revoke", "oidc:u1", "acme")
    assert (last.what, last.who, last.source) == ("token:t 1", "ann", "10.0.0.1")


async def test_those_that_end_nothing_any_more_go_with_the_next(store, redis, monkeypatch):
    now = [1000.0]
    clock = type("clock", (), {"time": staticmethod(lambda: now[0])})
    monkeypatch.setattr(revoked_tokens, "time", clock)
    monkeypatch.setattr(revoked_tokens, "_TIDIED", 2)
    for n in range(4):
        await store.revoke("acme", token=f"t{n}")
    now[0] = 1110.0
    assert len(await store.list()) == 4, "a token that ends within its longest time, and both skews"
    now[0] = 1112.0
    assert await store.list() == []
    await store.revoke("acme", token="t3")
    assert [one.token for one in await store.list()] == ["t3"]
    assert await redis.hlen(store._records) == 2, "some at a time"
    await store.revoke("acme", token="t4")
    assert [one.token for one in await store.list()] == ["t3", "t4"]
    assert await redis.hlen(store._records) == 2


async def test_one_tenants_is_not_anothers(store):
    await store.revoke("acme", user="oidc:u1")
    await store.revoke("acme", token="t1")
    claims = {"sub": "u1", "jti": "t1", "iat": 5}
    assert await store.hold("acme", "oidc:u1", claims)
    assert await store.hold("acme", "oidc:u2", claims)
    for tenant in ("rival", None):
        assert not await store.hold(tenant, "oidc:u1", claims)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"user": "oidc:u1", "token": "t"},
        {"user": "u1"},
        {"user": "key_1234567890ab"},
        {"user": "oidc:a b"},
        {"user": "oidc:u1\n"},
        {"token": ""},
        {"token": "\x1b[2J"},
        {"token": "t" * 257},
        {"tenant": "a b", "token": "t"},
    ],
)
async def test_what_is_no_user_and_no_token_is_refused(store, fields):
    with pytest.raises(ValidationError):
        await store.revoke(**{"tenant": "acme", **fields})
    assert await store.list() == []
