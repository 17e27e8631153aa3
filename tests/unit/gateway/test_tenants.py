"""What tenants grant, and limits as they are written."""

import pytest
from pydantic import ValidationError

from services.common.config import GatewaySettings
from services.common.errors import PenstockError
from services.gateway.identity.api_keys import KeyVerifier
from services.gateway.identity.auth import Authenticator
from services.gateway.identity.keys import KeyStore
from services.gateway.identity.limits import Bound, Limit
from services.gateway.identity.principal import Permission, Principal, Role, granted
from services.gateway.identity.tenants import TenantRecord, TenantStore
from tests.support.tenants import put

PER_MINUTE = Limit(name="rpm", of="requests", per="minute", most=60)
AT_ONCE = Limit(name="at-once", of="concurrent", most=4)
BUDGET = Limit(name="month", of="cost", per="month", most=100, model="tiny")


@pytest.fixture
def keys(redis, namespace) -> KeyStore:
    return KeyStore(redis, namespace)


@pytest.fixture
def tenants(redis, namespace) -> TenantStore:
    return TenantStore(redis, namespace)


@pytest.fixture
def auth(keys, tenants) -> Authenticator:
    return Authenticator([KeyVerifier(keys, tenants)], keys, GatewaySettings(key_cache_s=600))


async def test_a_key_has_what_its_tenant_has_and_its_own_instead(auth, keys, tenants):
    await put(
        tenants,
        TenantRecord(
            name="acme",
            models=("tiny", "large"),
            priority="low",
            weight=3,
            limits=(BUDGET,),
            user_limits=(AT_ONCE,),
        ),
    )
    plain, first = await keys.create("acme")
    own, second = await keys.create(
        "acme", priority="high", weight=5, models=["tiny", "other"], limits=[PER_MINUTE]
    )
    found = await auth.identify(f"Bearer {plain}")
    assert (found.priority, found.weight, found.models) == ("low", 3, {"tiny", "large"})
    each = f"user:acme:{first.id}:each"
    assert found.limits == (Bound(each, AT_ONCE), Bound("tenant:acme", BUDGET))
    found = await auth.identify(f"Bearer {own}")
    assert (found.user, found.priority, found.weight) == (second.id, "high", 5)
    assert found.models == {"tiny"}, "no key covers more than its tenant"
    own_rule = Bound(f"user:acme:{second.id}", PER_MINUTE)
    assert found.limits[0] == own_rule
    assert len({(bound.owner, bound.limit.name) for bound in found.limits}) == 3


async def test_a_changed_tenant_holds_at_once_for_its_keys_and_no_others(auth, keys, tenants):
    key, _ = await keys.create("acme")
    other, _ = await keys.create("acme.2")
    before = await auth.identify(f"Bearer {key}")
    others = await auth.identify(f"Bearer {other}")
    assert (before.priority, before.models) == ("normal", None)
    await put(tenants, TenantRecord(name="acme", models=()))
    assert await auth.identify(f"Bearer {key}") is before, "nobody has told yet"
    auth.told("tenant acme")
    with pytest.raises(PenstockError):
        (await auth.identify(f"Bearer {key}")).authorize("tiny")
    assert await auth.identify(f"Bearer {other}") is others


class Overtaken(TenantStore):
    """The record changes, and that is told, while the old one is on its way."""

    def __init__(self, store: TenantStore, namespace: str) -> None:
        super().__init__(store._redis, namespace)
        self.told: list[str] = []
        self.away = False
        self.auth: Authenticator | None = None

    async def find(self, name: str) -> TenantRecord | None:
        found = await super().find(name)
        if not self.told:
            self.told.append(name)
            await put(self, TenantRecord(name=name, priority="high"))
            assert self.auth is not None
            self.auth.told(f"tenant {name}")
            if self.away:
                raise ConnectionError
        return found


async def test_what_is_told_while_a_key_is_looked_up_holds(keys, tenants, namespace):
    store = Overtaken(tenants, namespace)
    settings = GatewaySettings(key_cache_s=600)
    store.auth = Authenticator([KeyVerifier(keys, store)], keys, settings)
    key, _ = await keys.create("acme")
    assert (await store.auth.identify(f"Bearer {key}")).priority == "high"


async def test_what_was_told_is_not_forgotten_when_redis_goes_away(keys, tenants, namespace):
    """Nobody goes on as what he was before the change."""
    store = Overtaken(tenants, namespace)
    store.told = ["not yet"]
    settings = GatewaySettings(key_cache_s=0)
    store.auth = Authenticator([KeyVerifier(keys, store)], keys, settings)
    key, _ = await keys.create("acme")
    await store.auth.identify(f"Bearer {key}")
    store.told, store.away = [], True
    with pytest.raises(PenstockError) as refused:
        await store.auth.identify(f"Bearer {key}")
    assert refused.value.reason == "keys_unavailable"


async def test_tenants_are_kept(tenants):
    assert await tenants.find("acme") is None
    assert await tenants.add("acme")
    assert not await tenants.add("acme")
    record = await tenants.find("acme")
    assert record is not None
    changed = record.model_copy(update={"limits": (PER_MINUTE, BUDGET), "models": ("tiny",)})
    await put(tenants, changed)
    await tenants.add("a-first")
    assert [one.name for one in await tenants.list()] == ["a-first", "acme"]
    assert await tenants.find("acme") == changed
    for odd in ("", "a b", "a:b", "ä", "{a}", "a" * 65):
        with pytest.raises(ValidationError):
            await tenants.add(odd)


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "A"},
        {"name": ""},
        {"name": "a:b"},
        {"of": "characters"},
        {"most": -1},
        {"most": 2.5},
        {"of": "concurrent", "per": None, "most": 0.5},
        {"most": float("inf")},
        {"most": float("nan")},
        {"per": None},
        {"per": "year"},
        {"of": "concurrent"},
        {"without_redis": "maybe"},
        {"burst": 3},
        {"model": ""},
    ],
)
def test_an_odd_limit_is_refused(fields):
    with pytest.raises(ValidationError):
        Limit(**{"name": "rpm", "of": "requests", "per": "minute", "most": 60, **fields})


def test_two_limits_of_one_name_are_refused():
    with pytest.raises(ValidationError, match="two limits are called rpm"):
        TenantRecord(name="acme", limits=(PER_MINUTE, PER_MINUTE))


def test_scopes_take_away_and_never_add():
    acme = TenantRecord(name="acme")
    everything = frozenset(Permission)
    looks = granted(acme, "u", roles=[Role.READ_ONLY], scopes=everything)
    assert Permission.INFERENCE not in looks.permissions
    reads = granted(acme, "u", roles=[Role.MEMBER], scopes=[Permission.FILES_READ])
    assert reads.permissions == {Permission.FILES_READ}
    assert granted(acme, "u", roles=[]).permissions == frozenset()
    with pytest.raises(PenstockError) as refused:
        reads.require(Permission.INFERENCE)
    assert (refused.value.reason, "inference" in str(refused.value)) == ("permission_missing", True)
    reads.require(Permission.FILES_READ)


def test_who_is_given_nothing_may_nothing():
    assert Principal("acme", "u").permissions == frozenset()


def test_nobody_sees_limits_by_printing_who_asks():
    assert "rpm" not in repr(Principal("acme", "u", limits=(Bound("tenant:acme", PER_MINUTE),)))
