"""Keys that are changed, replaced and used; and what the audit log says of it."""

import asyncio
import json
import logging
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from services.common.config import GatewaySettings
from services.common.errors import PenstockError
from services.gateway.identity.api_keys import KeyVerifier
from services.gateway.identity.audit import Actor, AuditLog, Conflict
from services.gateway.identity.auth import Authenticator
from services.gateway.identity.key_record import key_hash
from services.gateway.identity.keys import KeyStore
from services.gateway.identity.last_use import LastUse
from services.gateway.identity.limits import Limit
from services.gateway.identity.news import News, channel
from services.gateway.identity.principal import Permission, Role
from services.gateway.identity.tenants import TenantRecord, TenantStore
from tests.support.tenants import put
from tests.support.waiting import until

ANN = Actor("ann", "10.0.0.1")


@pytest.fixture
def keys(redis, namespace) -> KeyStore:
    return KeyStore(redis, namespace)


@pytest.fixture
def tenants(redis, namespace) -> TenantStore:
    return TenantStore(redis, namespace)


@pytest.fixture
def audit(redis, namespace) -> AuditLog:
    return AuditLog(redis, namespace)


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    now = SimpleNamespace(now=10_000.0)
    times = SimpleNamespace(time=lambda: now.now, monotonic=lambda: now.now)
    for module in ("auth", "keys", "stored_keys", "key_record", "principal"):
        monkeypatch.setattr(f"services.gateway.identity.{module}.time", times)
    return now


@pytest.fixture
def auth(keys, tenants) -> Authenticator:
    return Authenticator([KeyVerifier(keys, tenants)], keys, GatewaySettings(key_cache_s=0))


async def lets_in(auth: Authenticator, *shown: str) -> list[bool]:
    async def one(key: str) -> bool:
        try:
            await auth.identify(f"Bearer {key}")
        except PenstockError as refused:
            if refused.reason != "invalid_api_key":
                raise
            return False
        return True

    return [await one(key) for key in shown]


async def test_a_replaced_key_holds_for_the_overlap_and_the_new_one_on(auth, keys, clock):
    limit = Limit(name="rpm", of="requests", per="minute", most=1)
    old, record = await keys.create("acme", models=["tiny"], limits=[limit], priority="high")
    new, same = await keys.rotate(record.id, 100)
    assert same == record
    assert await lets_in(auth, old, new) == [True, True]
    first, second = [await auth.identify(f"Bearer {key}") for key in (old, new)]
    assert (first.expires, second.expires) == (10_100, None)
    assert first.limits == second.limits, "both count as one"
    [listed] = await keys.list()
    assert (listed.id, listed.old_until, listed.expires) == (record.id, 10_100, None)
    clock.now = 10_100.0
    assert await lets_in(auth, old, new) == [False, True]
    [listed] = await keys.list()
    assert listed.old_until is None


async def test_without_overlap_the_old_one_ends_at_once_also_where_it_is_trusted(
    keys, tenants, redis, namespace
):
    patient = Authenticator([KeyVerifier(keys, tenants)], keys, GatewaySettings(key_cache_s=3600))
    listening = asyncio.Event()

    async def recheck() -> None:
        listening.set()

    news = News(redis, channel(namespace), patient.told, recheck)
    news.start()
    try:
        await asyncio.wait_for(listening.wait(), 10)
        old, record = await keys.create("acme")
        assert await lets_in(patient, old) == [True]
        new, _ = await keys.rotate(record.id, 0)

        async def ended() -> bool:
            return await lets_in(patient, old) == [False]

        await until(ended, 5, "the old key is refused")
        assert await lets_in(patient, new) == [True]
        newer, _ = await keys.rotate(record.id, 1000)
        assert await lets_in(patient, new, newer) == [True, True]
        await keys.revoke(record.id)

        async def both() -> bool:
            return await lets_in(patient, new, newer) == [False, False]

        await until(both, 5, "a revocation ends the replaced one too")
    finally:
        await news.stop()


async def test_all_that_were_before_end_with_the_latest_overlap(auth, keys, clock):
    """As when it turns out that the first one has leaked."""
    first, record = await keys.create("acme")
    second, _ = await keys.rotate(record.id, 1000)
    third, _ = await keys.rotate(record.id, 0)
    assert await lets_in(auth, first, second, third) == [False, False, True]


async def test_a_revocation_ends_the_replaced_one_for_who_hears_of_it_late(auth, keys):
    old, record = await keys.create("acme")
    new, _ = await keys.rotate(record.id, 1000)
    await keys.revoke(record.id)
    assert await lets_in(auth, old, new) == [False, False]


async def test_the_overlap_never_outlasts_the_key(keys, clock):
    _, record = await keys.create("acme", expires_in_s=50)
    _, new = await keys.rotate(record.id, 100)
    assert new.expires == 10_050
    [listed] = await keys.list()
    assert listed.old_until == 10_050
    clock.now = 10_060.0
    with pytest.raises(ValueError, match="holds no more"):
        await keys.rotate(record.id, 100)


async def test_what_has_ended_is_forgotten_when_it_is_replaced_again(keys, clock, redis, namespace):
    first, record = await keys.create("acme")
    await keys.rotate(record.id, 10)
    clock.now = 10_020.0
    third, _ = await keys.rotate(record.id, 10)
    assert await keys.find(key_hash(first)) is None
    assert await redis.hlen(f"{namespace}:{{identity}}:keys") == 2
    assert await keys.revoke(record.id)
    with pytest.raises(ValueError, match="holds no more"):
        await keys.rotate(record.id, 10)
    assert await keys.rotate("key_" + "0" * 12, 10) is None
    found = await keys.find(key_hash(third))
    assert found is not None
    assert found.revoked


async def test_a_change_holds_for_the_replaced_key_too(auth, keys):
    old, record = await keys.create("acme", scopes=[Permission.INFERENCE])
    new, _ = await keys.rotate(record.id, 1000)

    def narrower(record):
        return {"models": ("tiny",), "role": Role.READ_ONLY}

    changed = await keys.change(record.id, "key.change", narrower)
    assert changed.models == ("tiny",)
    for key in (old, new):
        principal = await auth.identify(f"Bearer {key}")
        assert principal.models == {"tiny"}
        assert principal.permissions == frozenset(), "no role has more than it has"
    old_record, new_record = [await keys.find(key_hash(key)) for key in (old, new)]
    assert (old_record.expires is None, new_record.expires) == (False, None)
    with pytest.raises(ValidationError):
        await keys.change(record.id, "key.change", lambda one: {"weight": -1})
    assert await keys.change("key_" + "0" * 12, "key.change", narrower) is None


async def test_two_changes_at_once_are_both_made(keys):
    _, record = await keys.create("acme")
    names = ["name", "priority", "weight", "models"]
    values = ["n", "low", 2.0, ("m",)]

    async def change(name, value):
        await keys.change(record.id, "c", lambda one: {name: value})

    await asyncio.gather(*(change(*pair) for pair in zip(names, values, strict=True)))
    found = await keys.find_id(record.id)
    assert [getattr(found, name) for name in names] == values


async def test_a_rotation_that_was_overtaken_is_made_on_what_is_there_now(keys, monkeypatch):
    """A key that is revoked while it is replaced leaves no key behind that holds."""
    _, record = await keys.create("acme")
    other, calls = KeyStore(keys._redis, keys.namespace), []
    asked = keys._audit.change

    async def slow(*args):
        if not calls:
            calls.append(await other.revoke(record.id))
        await asked(*args)

    monkeypatch.setattr(keys._audit, "change", slow)
    with pytest.raises(ValueError, match="holds no more"):
        await keys.rotate(record.id, 1000)
    assert calls == [True]
    found = await keys.find_id(record.id)
    assert found.revoked
    [listed] = await keys.list()
    assert listed.revoked


@pytest.mark.parametrize(
    ("tenant", "role"),
    [("acme", "admin"), ("acme", "operator"), (None, "member"), ("acme", "root"), (None, "")],
)
async def test_a_role_of_the_other_kind_is_refused(keys, tenant, role):
    with pytest.raises(ValidationError):
        await keys.create(tenant, role=role)


async def test_an_administrators_key_is_none_for_the_public_door(auth, keys, redis, namespace):
    key, record = await keys.create(None, role=Role.ADMIN)
    assert key.startswith("psa-")
    assert await lets_in(auth, key, f"psk-{key[4:]}") == [False, False]
    # Not even where its text had the form of a tenant's.
    posing = "psk-" + "a" * 43
    await redis.hset(
        f"{namespace}:{{identity}}:keys",
        key_hash(posing),
        record.model_dump_json(exclude_none=True),
    )
    assert await lets_in(auth, posing) == [False]


async def test_a_key_of_an_older_penstock_is_told_so(auth, redis, namespace):
    key = "psk-" + "b" * 43
    await redis.hset(f"{namespace}:keys", key_hash(key), json.dumps({"id": "key_1"}))
    with pytest.raises(PenstockError, match="older Penstock; make a new one") as refused:
        await auth.identify(f"Bearer {key}")
    assert refused.value.reason == "invalid_api_key"


async def test_nobody_of_a_suspended_tenant_is_let_in(auth, keys, tenants):
    key, _ = await keys.create("acme")
    await put(tenants, TenantRecord(name="acme", suspended=1))
    with pytest.raises(PenstockError, match="'acme' is suspended"):
        await auth.identify(f"Bearer {key}")
    await put(tenants, TenantRecord(name="acme"))
    assert await lets_in(auth, key) == [True]


# ---- last use -----------------------------------------------------------------------------------


async def test_the_last_use_is_written_behind_the_requests(keys, tenants, redis, namespace):
    class Counts(KeyStore):
        writes = 0

        async def note_uses(self, uses):
            self.writes += 1
            await super().note_uses(uses)

    store = Counts(redis, namespace)
    use = LastUse(store)
    auth = Authenticator([KeyVerifier(store, tenants)], store, GatewaySettings(), use.note)
    key, record = await store.create("acme")
    _, unused = await store.create("acme")
    use.start()
    for _ in range(3):
        await auth.identify(f"Bearer {key}")
    await lets_in(auth, "psk-" + "a" * 43)
    use.note("oidc:someone")
    assert store.writes == 0
    await use.stop()
    assert store.writes == 1
    told = {one.id: one.used for one in await store.list()}
    assert 0 <= told[record.id] - record.created < 60
    assert told[unused.id] is None
    assert await redis.hlen(f"{namespace}:{{identity}}:used") == 1


async def test_uses_that_redis_did_not_take_are_written_later(keys, monkeypatch):
    use = LastUse(keys)
    use.note("key_1")
    taken = keys.note_uses

    async def away(uses):
        use.note("key_2")
        raise ConnectionError

    monkeypatch.setattr(keys, "note_uses", away)
    await use.write()
    monkeypatch.setattr(keys, "note_uses", taken)
    await use.write()
    await use.write()
    assert set(await keys._redis.hkeys(keys._used)) == {"key_1", "key_2"}


async def test_one_tenants_list_reads_nobody_elses(keys, redis, caplog):
    own, _ = [(await keys.create("acme"))[1] for _ in range(2)]
    theirs = (await keys.create("rival"))[1]
    await keys.create(None, role=Role.ADMIN)
    await keys.note_uses({own.id: 77})
    await redis.hset(keys._records, await redis.hget(keys._ids, theirs.id), "{")
    assert [(one.tenant, one.used) for one in await keys.list_of("acme") if one.used] == [
        ("acme", 77)
    ]
    assert len(await keys.list_of("acme")) == 2
    assert [one.tenant for one in await keys.list_of(None)] == [None]
    assert await keys.list_of("nobody") == []
    warned = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert not warned, "whatever is wrong with others'"
    assert len(await keys.list()) == 3
    assert theirs.id in caplog.text


# ---- how many -----------------------------------------------------------------------------------


async def test_a_tenants_keys_are_bounded_and_what_ended_first_makes_room(
    tenants, redis, namespace, clock
):
    keys = KeyStore(redis, namespace, most=3)
    auth = Authenticator([KeyVerifier(keys, tenants)], keys, GatewaySettings(key_cache_s=3600))
    made = [await keys.create("acme") for _ in range(2)]
    made.append(await keys.create("acme", expires_in_s=100))
    assert await lets_in(auth, made[1][0]) == [True]
    with pytest.raises(PenstockError, match="A tenant may have 3 API keys") as refused:
        await keys.create("acme")
    assert (refused.value.reason, refused.value.param) == ("too_many_keys", "tenant")
    assert refused.value.retry_after_s == 0, "no waiting helps"
    _, others = await keys.create("rival", expires_in_s=50)
    await keys.create(None, role=Role.ADMIN)  # administrators' are counted by themselves
    clock.now += 200
    await keys.revoke(made[1][1].id)  # after the third had expired
    new = [(await keys.create("acme"))[1].id]
    assert await keys.find_id(made[2][1].id) is None
    assert await keys.find_id(made[1][1].id) is not None
    new.append((await keys.create("acme", by=ANN))[1].id)
    with pytest.raises(PenstockError, match="revoke some"):
        await keys.create("acme")
    assert {one.id for one in await keys.list() if one.tenant == "acme"} == {made[0][1].id, *new}
    assert await lets_in(auth, made[0][0]) == [True]
    assert await keys.find_id(others.id) is not None, "it takes no room of this tenant's"
    assert await redis.hlen(keys._revoked) == 0, "nothing is left of what is forgotten"
    assert await redis.hlen(keys._records) == await redis.hlen(keys._ids) == 5
    last = await keys._audit.read(2)
    assert [(line.action, line.who) for line in last] == [
        ("key.create", "ann"),
        ("key.forget", "ann"),
    ]
    assert last[1].what == made[1][1].id


async def test_what_is_forgotten_lets_nobody_in(tenants, redis, namespace):
    """A gateway that missed the revocation is told when the key is forgotten."""
    keys = KeyStore(redis, namespace, most=1)
    auth = Authenticator([KeyVerifier(keys, tenants)], keys, GatewaySettings(key_cache_s=3600))
    key, record = await keys.create("acme")
    await keys.revoke(record.id)
    deaf = Authenticator([KeyVerifier(keys, tenants)], keys, GatewaySettings(key_cache_s=3600))
    async with redis.pubsub() as news:
        await news.subscribe(channel(namespace))
        await keys.create("acme")
        heard = []
        while not heard:
            message = await news.get_message(timeout=5)
            assert message is not None
            heard += [message["data"]] if message["type"] == "message" else []
    assert heard == [f"revoked {key_hash(key)}"]
    assert await lets_in(auth, key) == await lets_in(deaf, key) == [False]


async def test_keys_made_side_by_side_do_not_pass_the_bound(redis, namespace):
    stores = [KeyStore(redis, namespace, most=5) for _ in range(4)]
    made = await asyncio.gather(
        *(stores[n % 4].create("acme") for n in range(12)), return_exceptions=True
    )
    refused = [one for one in made if isinstance(one, PenstockError)]
    assert (len(refused), len(await stores[0].list())) == (7, 5)


async def test_a_key_has_ten_texts_that_hold_at_most(keys, auth):
    first, record = await keys.create("acme")
    texts = [first]
    for _ in range(9):
        texts.append((await keys.rotate(record.id, 3600))[0])
    assert all(await lets_in(auth, *texts))
    with pytest.raises(ValueError, match="10 texts"):
        await keys.rotate(record.id, 3600)
    last, _ = await keys.rotate(record.id, 0)
    assert await lets_in(auth, *texts, last) == [False] * 10 + [True]
    await keys.rotate(record.id, 3600)


# ---- the audit log ------------------------------------------------------------------------------


async def test_each_change_has_its_line_and_none_says_a_key(keys, tenants, audit, redis):
    key, record = await keys.create("acme", "laptop", by=ANN)
    await keys.change(record.id, "key.change", lambda one: {"name": "desk"}, by=ANN)
    new, _ = await keys.rotate(record.id, 0, by=ANN)
    await keys.revoke(record.id, by=ANN)
    await keys.revoke(record.id, by=ANN)  # which changes nothing
    await tenants.add("acme", by=ANN)
    await tenants.add("acme", by=ANN)
    lines = await audit.read(100)
    assert [line.action for line in reversed(lines)] == [
        "key.create",
        "key.change",
        "key.rotate",
        "key.revoke",
        "tenant.create",
    ]
    assert {(line.who, line.source) for line in lines} == {("ann", "10.0.0.1")}
    changed = lines[3]
    assert (changed.what, changed.before, changed.after) == (
        record.id,
        {"name": "laptop"},
        {"name": "desk"},
    )
    assert all(abs(line.at - record.created) < 60 for line in lines)
    written = str(await redis.dump(audit._stream))
    for secret in (key, new, key_hash(key), key_hash(new)):
        assert secret.removeprefix("psk-") not in written


async def test_the_log_is_read_in_pages_and_of_one_thing(keys, audit):
    made = [(await keys.create("acme"))[1].id for _ in range(5)]
    first = await audit.read(3)
    rest = await audit.read(3, before=first[-1].id)
    assert [line.what for line in (*first, *rest)] == made[::-1]
    assert [line.what for line in await audit.read(3, what=made[1])] == [made[1]]
    assert await audit.read(3, what="key_x") == []
    for n in range(3):
        await keys.change(made[1], "key.change", lambda _, n=n: {"name": str(n)})
        await keys.change(made[2], "key.change", lambda _, n=n: {"name": str(n)})
    latest = await audit.read(2, what=made[1])
    older = await audit.read(9, latest[-1].id, made[1])
    assert [line.after["name"] for line in (*latest, *older)] == ["2", "1", "0", ""]
    assert {line.what for line in (*latest, *older)} == {made[1]}


async def test_who_asks_about_one_thing_has_the_rest_of_the_log_not_read(keys, audit, redis):
    asked = (await keys.create("acme"))[1].id
    for _ in range(30):
        await keys.create("rival")
    stats = "cmdstat_xrange", "cmdstat_xrevrange"
    await redis.config_resetstat()
    assert [line.what for line in await audit.read(9, what=asked)] == [asked]
    calls = await redis.info("commandstats")
    assert [calls[one]["calls"] for one in stats] == [1, 1]
    assert await redis.xlen(audit._about(asked)) == 1


def lines_id(at: int) -> str:
    return f"{at * 1000}-0"


async def test_a_line_goes_by_its_age_alone(redis, namespace):
    kept = AuditLog(redis, namespace, kept_s=3600)
    keys = KeyStore(redis, namespace, kept)
    seconds, _ = await redis.time()
    names = ("who", "source", "action", "what", "before", "after")
    for age in (7200, 3700, 3500):
        line = {**dict.fromkeys(names, "null"), "what": str(age)}
        await redis.xadd(kept._stream, line, id=lines_id(seconds - age))
    await redis.xadd(kept._about("3500"), {"of": "log"}, id=lines_id(seconds - 3500))
    await redis.xadd(kept._about("7200"), {"of": "log"}, id=lines_id(seconds - 7200))
    for _ in range(20):
        _, record = await keys.create("acme")
    lines = await kept.read(100)
    assert (len(lines), lines[-1].what) == (21, "3500")
    assert [line.what for line in await kept.read(9, what="3500")] == ["3500"]
    assert await kept.read(9, what="7200") == []
    assert 0 < await redis.ttl(kept._about(record.id)) <= 3600, "nothing is left of it then"


async def test_where_the_line_cannot_be_written_nothing_is_changed(keys, audit, redis):
    await redis.set(audit._stream, "no stream")
    with pytest.raises(Exception, match="WRONGTYPE"):
        await keys.create("acme")
    # A Lua function is not undone: so the line comes before the changes.
    assert await keys.list() == []


async def test_who_is_always_overtaken_is_told(keys, monkeypatch):
    _, record = await keys.create("acme")

    async def never(*_):
        raise Conflict

    monkeypatch.setattr(keys._audit, "change", never)
    with pytest.raises(Conflict):
        await keys.revoke(record.id)


# ---- what others write --------------------------------------------------------------------------


@pytest.mark.parametrize("odd", ['{"id": "key_1"}', '{"id": 7, "later": true}', "[]", "no JSON"])
async def test_a_record_that_cannot_be_read_lets_nobody_in(auth, keys, redis, namespace, odd):
    key, _ = await keys.create("acme")
    assert await lets_in(auth, key) == [True]
    await redis.hset(f"{namespace}:{{identity}}:keys", key_hash(key), odd)
    with pytest.raises(PenstockError, match="another version") as refused:
        await auth.identify(f"Bearer {key}")
    assert refused.value.reason == "invalid_api_key"
    _, other = await keys.create("acme")
    assert [one.id for one in await keys.list()] == [other.id], "and hides no other"


async def test_names_are_fit_for_terminals_and_lists_are_bounded(keys, tenants):
    for name in ("\x1b]0;x\x07", "a\nb", "\x9b31m", "\x7f"):
        with pytest.raises(ValidationError):
            await keys.create("acme", name)
        with pytest.raises(ValidationError):
            TenantRecord(name="acme", note=name)
    for fields in ({"models": ["m"] * 1001}, {"models": [""]}, {"scopes": ["inference"] * 50}):
        with pytest.raises(ValidationError):
            await keys.create("acme", **fields)
    await keys.create("acme", "[/bold] [red]é 漢")


async def test_what_a_rotation_allows_is_asked_of_the_record_as_it_is_then(keys, monkeypatch):
    """Another one gives the key more, between the first look and the change."""
    _, record = await keys.create(None, role=Role.READ_ONLY)
    asked, real = [], keys._audit.change

    async def overtaken(*args):
        if len(asked) == 1:
            monkeypatch.setattr(keys._audit, "change", real)
            await keys.change(record.id, "key.change", lambda _: {"role": Role.ADMIN})
        await real(*args)

    def allow(one):
        asked.append(one.role)
        if one.role == Role.ADMIN:
            raise PermissionError

    monkeypatch.setattr(keys._audit, "change", overtaken)
    with pytest.raises(PermissionError):
        await keys.rotate(record.id, 0, allow=allow)
    assert asked == [Role.READ_ONLY, Role.ADMIN]
