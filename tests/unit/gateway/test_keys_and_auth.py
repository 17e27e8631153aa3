"""API keys on a real Redis, and who is let in."""

import asyncio
from types import SimpleNamespace

import grpc
import pytest
from pydantic import ValidationError

from protos import common_pb2
from services.common.config import GatewaySettings
from services.common.errors import PenstockError
from services.common.redis import Redis
from services.gateway import metrics
from services.gateway.identity.api_keys import KeyVerifier
from services.gateway.identity.auth import Authenticator
from services.gateway.identity.key_record import KEY_PATTERN, key_hash
from services.gateway.identity.keys import KeyStore
from services.gateway.identity.known import Known
from services.gateway.identity.news import Heard, channel
from services.gateway.identity.principal import Principal
from services.gateway.identity.tenants import TenantStore
from tests.support.gateway_parts import principal
from tests.support.waiting import until


@pytest.fixture
def store(redis: Redis, namespace: str) -> KeyStore:
    return KeyStore(redis, namespace)


class Away(KeyStore):
    """A store whose Redis can be taken away."""

    away = False
    asked = 0

    async def find(self, hashed: str):
        self.asked += 1
        if self.away:
            raise ConnectionError
        return await super().find(hashed)


async def test_only_the_hash_is_stored(store, redis, namespace):
    key, record = await store.create("acme", "laptop", priority="high", weight=2.5, models=["m"])
    assert KEY_PATTERN.fullmatch(key)
    assert await store.find(key_hash(key)) == record
    names = await redis.keys(f"{namespace}*")
    assert len(names) == 5, "records, ids, which are the tenant's; the audit log, and which of it"
    for name in names:
        assert key[4:] not in str(await redis.dump(name))


async def test_list_and_revoke(store):
    key, first = await store.create("acme")
    _, second = await store.create("rival")
    assert {record.id for record in await store.list()} == {first.id, second.id}
    assert await store.revoke(first.id)
    assert await store.revoke(first.id)
    assert not await store.revoke("key_unknown")
    found = await store.find(key_hash(key))
    assert found is not None
    assert found.revoked
    assert [bool(r.revoked) for r in await store.list() if r.id == second.id] == [False]


async def test_bad_fields_are_refused(store):
    for fields in (
        *({"tenant": tenant} for tenant in ("a b", "", "a" * 65, "a:b", "{a}", "a\n", "ä")),
        *({"tenant": "a", "weight": weight} for weight in (0, 1001, float("inf"), float("nan"))),
        {"tenant": "a", "name": "n" * 101},
        {"tenant": "a", "priority": "urgent"},
    ):
        with pytest.raises(ValidationError):
            await store.create(**fields)
    assert await store.list() == []
    fields = {"tenant": "A-z_0.9" + "a" * 57, "name": "n" * 100, "weight": 1000}
    _, record = await store.create(**fields)
    assert record.model_dump(include={*fields}) == fields


async def test_keys_are_listed_oldest_first(store, monkeypatch):
    clock = SimpleNamespace(now=2000.0)
    now = SimpleNamespace(time=lambda: clock.now)
    monkeypatch.setattr("services.gateway.identity.keys.time", now)
    made = []
    for clock.now in (3000.5, 1000.5, 2000.5, 2000.5):
        made.append((await store.create("acme"))[1])
    listed = await store.list()
    assert [record.created for record in listed] == [1000, 2000, 2000, 3000]
    assert listed[1:3] == sorted(made[2:], key=lambda record: record.id)
    assert await store.find_id(made[0].id) == made[0]


async def test_a_revocation_keeps_its_first_time_and_is_told_each_time(
    store, redis, namespace, monkeypatch
):
    clock = SimpleNamespace(now=1000.5)
    now = SimpleNamespace(time=lambda: clock.now)
    monkeypatch.setattr("services.gateway.identity.keys.time", now)
    key, record = await store.create("acme")
    _, other = await store.create("acme")
    async with redis.pubsub() as news:
        await news.subscribe(channel(namespace))
        for clock.now in (2000.5, 3000.5):
            assert await store.revoke(record.id)
        heard: list[str] = []
        while len(heard) < 2:
            message = await news.get_message(timeout=5)
            assert message is not None
            heard += [message["data"]] if message["type"] == "message" else []
    assert heard == [f"revoked {key_hash(key)}"] * 2
    revoked = record.model_copy(update={"revoked": 2000})
    assert await store.find_id(record.id) == await store.find(key_hash(key)) == revoked
    assert sorted(await store.list(), key=lambda r: r.id) == sorted(
        [revoked, other], key=lambda r: r.id
    )


async def test_an_id_that_nobody_has(store):
    assert await store.find_id("key_" + "0" * 12) is None
    assert not await store.revoke("key_" + "0" * 12)
    assert await store.find("0" * 64) is None
    assert await store.revoked_of([]) == set()
    assert await store.revoked_of(["0" * 64]) == set()


async def test_keys_of_another_namespace_are_no_keys(store, redis, namespace):
    key, record = await store.create("acme")
    other = KeyStore(redis, namespace + "-other")
    assert await other.find(key_hash(key)) is None
    assert not await other.revoke(record.id)
    assert await other.list() == []
    assert (await refusal(auth(other), f"Bearer {key}")).reason == "invalid_api_key"


def auth(store: KeyStore, cache_s: float = 30.0, stale_s: float = 600.0) -> Authenticator:
    tenants = TenantStore(store._redis, store.namespace)
    settings = GatewaySettings(key_cache_s=cache_s, key_stale_s=stale_s)
    return Authenticator([KeyVerifier(store, tenants)], store, settings)


async def refusal(authenticator: Authenticator, header: str | None) -> PenstockError:
    with pytest.raises(PenstockError) as refused:
        await authenticator.identify(header)
    return refused.value


@pytest.mark.parametrize(
    ("priority", "told"),
    [
        ("high", common_pb2.PRIORITY_HIGH),
        ("normal", common_pb2.PRIORITY_NORMAL),
        ("low", common_pb2.PRIORITY_LOW),
    ],
)
async def test_a_priority_is_told_as_it_was_granted(store, priority, told):
    key, _ = await store.create("acme", priority=priority)
    assert (await auth(store).identify(f"Bearer {key}")).caller("r").priority == told


async def test_a_crowd_with_a_key_not_known_yet_is_one_look(redis, namespace):
    store = Away(redis, namespace)
    key, record = await store.create("acme")
    authenticator = auth(store)
    crowd = [asyncio.create_task(authenticator.identify(f"Bearer {key}")) for _ in range(500)]
    await asyncio.sleep(0)
    crowd[0].cancel()  # who came first, and began the look, leaves
    came = await asyncio.gather(*crowd[1:])
    assert {one.user for one in came} == {record.id}
    assert store.asked == 1
    store.away = True
    crowd = [asyncio.create_task(refusal(auth(store), f"Bearer {key}")) for _ in range(3)]
    assert {error.reason for error in await asyncio.gather(*crowd)} == {"keys_unavailable"}


class Slow:
    """A verifier whose looks end when a test says so."""

    def __init__(self) -> None:
        self.looks: list[asyncio.Future[Principal]] = []

    def takes(self, shown: str) -> bool:
        return True

    async def verify(self, shown: str) -> Principal:
        self.looks.append(asyncio.get_running_loop().create_future())
        return await self.looks[-1]


async def looks(slow: Slow, count: int) -> None:
    await until(lambda: len(slow.looks) == count, 5)


async def test_news_behind_a_look_are_not_lost_on_who_waits_for_it(store):
    slow = Slow()
    authenticator = Authenticator([slow], store, GatewaySettings())
    first = asyncio.create_task(authenticator.identify("Bearer k"))
    await looks(slow, 1)
    slow.looks[0].set_result(principal("acme"))
    await asyncio.sleep(0)  # the look ends; who waits for it has not heard of it
    authenticator.told(f"key {key_hash('k')}")
    assert not first.done()
    await first
    second = asyncio.create_task(authenticator.identify("Bearer k"))
    await looks(slow, 2)
    slow.looks[1].set_result(principal("acme", frozenset({"m"})))
    assert (await second).models == {"m"}, "it stands for something else since"


@pytest.mark.parametrize("news", ["key {hash}", "tenant acme"])
async def test_who_comes_after_news_is_not_told_by_a_look_from_before(store, news):
    slow = Slow()
    authenticator = Authenticator([slow], store, GatewaySettings())
    first = asyncio.create_task(authenticator.identify("Bearer k"))
    for count in (1, 2):  # it looks twice at most
        await looks(slow, count)
        authenticator.told(news.format(hash=key_hash("k")))
        if count == 1:
            slow.looks[0].set_result(principal("acme"))
    second = asyncio.create_task(authenticator.identify("Bearer k"))
    await looks(slow, 3)
    slow.looks[2].set_result(principal("acme", frozenset({"m"})))
    assert (await second).models == {"m"}
    slow.looks[1].set_result(principal("acme"))
    assert (await first).models is None
    assert (await authenticator.identify("Bearer k")).models == {"m"}


async def test_without_more_a_key_is_ordinary(store):
    key, _ = await store.create("acme")
    identity = await auth(store).identify(f"Bearer {key}")
    caller = identity.caller("r")
    assert (caller.priority, caller.weight) == (common_pb2.PRIORITY_NORMAL, 1.0)
    identity.authorize("any model at all")


async def test_a_key_for_no_model_may_use_none(store):
    key, _ = await store.create("acme", models=[])
    identity = await auth(store).identify(f"Bearer {key}")
    with pytest.raises(PenstockError):
        identity.authorize("m")


async def test_an_identity_holds_what_the_key_grants(store):
    key, record = await store.create("acme", priority="low", weight=3, models=["m"])
    identity = await auth(store).identify(f"Bearer {key}")
    caller = identity.caller("req_1")
    assert (caller.tenant, caller.priority, caller.weight) == ("acme", 3, 3.0)
    assert identity.user == record.id
    identity.authorize("m")
    with pytest.raises(PenstockError) as refused:
        identity.authorize("other")
    assert refused.value.code == grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer x", "Basic psk-x", "psk-" + "a" * 43]
)
async def test_malformed_keys_never_reach_redis(redis, namespace, header):
    store = Away(redis, namespace)
    error = await refusal(auth(store), header)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAUTHENTICATED, "invalid_api_key")
    assert store.asked == 0


async def test_a_known_key_is_looked_up_again_only_after_its_time(redis, namespace):
    store = Away(redis, namespace)
    key, record = await store.create("acme")
    patient, strict = auth(store), auth(store, cache_s=0)
    for authenticator in (patient, strict):
        await authenticator.identify(f"Bearer {key}")
    assert store.asked == 2
    for _ in range(3):
        await patient.identify(f"Bearer {key}")
    assert store.asked == 2, "it is trusted for its time"
    await store.revoke(record.id)
    # Nobody told them: who asks finds out, who need not ask does not.
    assert (await refusal(strict, f"Bearer {key}")).reason == "invalid_api_key"
    assert (await patient.identify(f"Bearer {key}")).user == record.id
    assert store.asked == 3


async def test_a_revoked_key_is_not_looked_up_again(redis, namespace):
    store = Away(redis, namespace)
    key, record = await store.create("acme")
    await store.revoke(record.id)
    authenticator = auth(store)
    for _ in range(3):
        assert (await refusal(authenticator, f"Bearer {key}")).reason == "invalid_api_key"
    assert store.asked == 1
    assert not authenticator.knows_keys


async def test_while_redis_is_away_known_keys_hold_for_a_time(redis, namespace):
    store = Away(redis, namespace)
    key, _ = await store.create("acme")
    patient, strict = auth(store, cache_s=0), auth(store, cache_s=0, stale_s=0)
    for authenticator in (patient, strict):
        await authenticator.identify(f"Bearer {key}")
    assert patient.knows_keys
    assert not strict.knows_keys
    store.away = True
    assert (await patient.identify(f"Bearer {key}")).tenant == "acme"
    assert (await refusal(strict, f"Bearer {key}")).reason == "keys_unavailable"
    unknown = await refusal(patient, "Bearer psk-" + "a" * 43)
    assert (unknown.code, unknown.reason) == (grpc.StatusCode.UNAVAILABLE, "keys_unavailable")


async def test_while_redis_is_away_requests_do_not_all_wait_for_it(redis, namespace):
    store = Away(redis, namespace)
    store.away = True
    authenticator = auth(store)
    for _ in range(5):
        await refusal(authenticator, "Bearer psk-" + "a" * 43)
    assert store.asked == 1


async def test_the_times_of_a_known_key(redis, namespace, monkeypatch):
    """Trusted for 30 s, then looked up again; while Redis is away, until 600 s after that."""
    clock = SimpleNamespace(now=1000.0)
    monotonic = SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr("services.gateway.identity.auth.time", monotonic)
    store = Away(redis, namespace)
    key, _ = await store.create("acme")
    other, _ = await store.create("other")
    authenticator = auth(store, cache_s=30, stale_s=600)
    header = f"Bearer {key}"
    for clock.now, asked in ((1000.0, 1), (1029.9, 1), (1030.0, 2), (1059.9, 2)):
        assert (await authenticator.identify(header)).tenant == "acme"
        assert store.asked == asked
    store.away = True
    for clock.now, asked in ((1060.0, 3), (1060.9, 3), (1061.0, 4), (1629.9, 5)):
        assert (await authenticator.identify(header)).tenant == "acme"
        assert store.asked == asked
    assert authenticator.knows_keys
    clock.now = 1630.0
    assert not authenticator.knows_keys
    error = await refusal(authenticator, header)
    assert (error.code, error.stage) == (grpc.StatusCode.UNAVAILABLE, "gateway")
    store.away, clock.now = False, 1631.0
    assert (await authenticator.identify(f"Bearer {other}")).tenant == "other"
    assert (await authenticator.identify(header)).tenant == "acme"


async def test_a_key_revoked_while_redis_goes_away_under_its_look_up_is_refused(redis, namespace):
    """Told of it in time, though Redis gave no answer: 401, and not the stale identity."""
    store = Away(redis, namespace)
    key, _ = await store.create("acme")
    authenticator = auth(store, cache_s=0)
    known = await authenticator.identify(f"Bearer {key}")
    assert known.tenant == "acme"

    async def find(hashed: str) -> None:
        authenticator.told(f"revoked {hashed}")
        raise ConnectionError

    store.find = find
    assert (await refusal(authenticator, f"Bearer {key}")).reason == "invalid_api_key"


async def test_a_key_ends_at_its_time_known_or_not_and_while_redis_is_away(
    redis, namespace, monkeypatch
):
    clock = SimpleNamespace(now=1000.5)
    times = SimpleNamespace(time=lambda: clock.now, monotonic=lambda: clock.now)
    for module in ("auth", "keys", "stored_keys", "key_record", "principal"):
        monkeypatch.setattr(f"services.gateway.identity.{module}.time", times)
    store = Away(redis, namespace)
    key, record = await store.create("acme", expires_in_s=100)
    assert record.expires == 1100
    assert await store.find(key_hash(key)) == record
    header, authenticator = f"Bearer {key}", auth(store, cache_s=600)
    clock.now = 1099.9
    assert record.holds
    assert (await authenticator.identify(header)).tenant == "acme"
    clock.now = 1100.0
    assert not record.holds
    assert not authenticator.knows_keys
    for away in (False, True):
        store.away = away
        for asked in (authenticator, auth(store)) if not away else (authenticator,):
            error = await refusal(asked, header)
            assert (error.code, error.reason) == (
                grpc.StatusCode.UNAUTHENTICATED,
                "invalid_api_key",
            )
            assert "expired" in str(error)


async def test_the_keys_in_memory_are_bounded_and_the_oldest_goes(redis, namespace, monkeypatch):
    monkeypatch.setattr("services.gateway.identity.known._MOST", 2)
    monkeypatch.setattr("services.gateway.identity.auth._MOST_REVOKED", 2)
    store = Away(redis, namespace)
    keys = [(await store.create(f"tenant{n}"))[0] for n in range(3)]
    authenticator = auth(store)
    for n, asked in ((0, 1), (1, 2), (0, 2), (2, 3), (1, 3), (0, 4), (2, 4), (1, 5)):
        assert (await authenticator.identify(f"Bearer {keys[n]}")).tenant == f"tenant{n}"
        assert store.asked == asked, n
    for key in keys:
        authenticator.told(f"revoked {key_hash(key)}")
    assert list(authenticator._revoked) == [key_hash(key) for key in keys[1:]]


async def test_a_flood_of_wrong_keys_pushes_nobody_out(redis, namespace, monkeypatch):
    monkeypatch.setattr("services.gateway.identity.known._MOST", 2)
    store = Away(redis, namespace)
    key, _ = await store.create("acme")
    authenticator = auth(store)
    await authenticator.identify(f"Bearer {key}")
    for n in range(20):
        wrong = f"Bearer psk-{n:02}" + "a" * 41
        assert (await refusal(authenticator, wrong)).reason == "invalid_api_key"
    store.away = True
    assert (await authenticator.identify(f"Bearer {key}")).tenant == "acme"
    assert len(authenticator._known.hashes()) == 1
    assert len(authenticator._revoked) == 0


def test_one_caller_with_many_tokens_pushes_nobody_out_and_nothing_is_left(monkeypatch):
    monkeypatch.setattr("services.gateway.identity.known._MOST", 6)
    monkeypatch.setattr("services.gateway.identity.known._MOST_OF_ONE", 3)
    known = Known()
    known.keep("a", 0.0, Principal("acme", "oidc:a"))
    for n in range(9):
        known.keep(f"b{n}", 1.0 + n, Principal("acme", "oidc:b"))
    assert known.hashes() == ["a", "b6", "b7", "b8"]
    known.keep("b7", 20.0, Principal("acme", "oidc:b"))
    known.keep("b9", 21.0, Principal("acme", "oidc:b"))
    assert known.hashes() == ["a", "b8", "b7", "b9"]
    known.keep("b9", 22.0, Principal("other", "oidc:b"))  # whoever it was before
    for n in range(4):
        known.keep(f"c{n}", 23.0, Principal("other", f"oidc:{n}"))
    assert known.hashes() == ["b7", "b9", "c0", "c1", "c2", "c3"]
    known.forget_tenant("other")
    assert known.hashes() == ["b7"]
    known.forget("b7")
    known.forget("b7")
    known.forget_tenant("acme")
    assert (known.hashes(), known._of) == ([], {})


async def test_a_revocation_asks_once_however_often_the_key_was_rotated(store, monkeypatch):
    _, record = await store.create("acme")
    for _ in range(4):
        await store.rotate(record.id, 3600)
    asked: list[int] = []
    revoked_of = store.revoked_of

    async def counted(hashes):
        asked.append(len(hashes))
        return await revoked_of(hashes)

    monkeypatch.setattr(store, "revoked_of", counted)
    assert await store.revoke(record.id)
    assert asked == [5]


async def test_very_many_are_asked_for_some_at_a_time(store, monkeypatch):
    monkeypatch.setattr("services.gateway.identity.stored_keys._ASKED_AT_ONCE", 2)
    keys = [await store.create("acme") for _ in range(5)]
    for _, record in keys[1:4]:
        await store.revoke(record.id)
    hashes = [key_hash(key) for key, _ in keys]
    assert await store.revoked_of(hashes) == set(hashes[1:4])


async def test_a_key_that_was_deleted_is_wrong_and_forgotten(redis, namespace):
    store = Away(redis, namespace)
    key, _ = await store.create("acme")
    authenticator = auth(store, cache_s=0)
    await authenticator.identify(f"Bearer {key}")
    for name in await redis.keys(f"{namespace}*"):
        await redis.delete(name)
    assert (await refusal(authenticator, f"Bearer {key}")).reason == "invalid_api_key"
    store.away = True
    assert (await refusal(authenticator, f"Bearer {key}")).reason == "keys_unavailable"


async def test_a_recheck_forgets_the_revoked_and_only_those(redis, namespace):
    store = Away(redis, namespace)
    key, record = await store.create("acme")
    other, _ = await store.create("other")
    authenticator = auth(store)
    for one in (key, other):
        await authenticator.identify(f"bearer  {one} ")
    await store.revoke(record.id)
    await authenticator.recheck()
    assert (await refusal(authenticator, f"Bearer {key}")).stage == "gateway"
    assert (await authenticator.identify(f"Bearer {other}")).models is None
    assert store.asked == 3, "looked at anew, as news of it may have been missed"


async def test_a_key_looked_up_while_a_recheck_asks_is_looked_up_again(redis, namespace):
    """The recheck asks about the keys in use; this one is none yet, and its record may be old."""
    store = Away(redis, namespace)
    key, record = await store.create("acme")
    other, _ = await store.create("other")
    authenticator = auth(store)
    await authenticator.identify(f"Bearer {other}")
    found, revoked_of = store.find, store.revoked_of
    has_record, go_on = asyncio.Event(), asyncio.Event()

    async def slow_find(hashed: str):
        stored = await found(hashed)
        has_record.set()
        await go_on.wait()
        return stored

    async def asked(hashes):
        revoked = await revoked_of(hashes)
        go_on.set()
        await asyncio.wait([identified], timeout=0.05)  # it may come to its end meanwhile
        return revoked

    store.find, store.revoked_of = slow_find, asked
    identified = asyncio.create_task(authenticator.identify(f"Bearer {key}"))
    await has_record.wait()
    await KeyStore(redis, namespace).revoke(record.id)  # nobody hears of it
    await authenticator.recheck()
    with pytest.raises(PenstockError) as refused:
        await identified
    assert refused.value.reason == "invalid_api_key"


class Restless(Away):
    """News come under each look-up, and `change` under the first."""

    news = ""
    auth: Authenticator

    async def change_first(self) -> None: ...

    async def find(self, hashed: str):
        record = await super().find(hashed)
        if self.asked == 1:
            await self.change_first()
        for message in self.news.split(", "):
            self.auth.told(message)
        return record


@pytest.mark.parametrize(
    ("news", "looks"),
    [
        ("tenant rival, key 0123, revoked 0123, tenant acme2", 1),
        ("tenant acme", 2),
        ("key ITS", 2),
    ],
)
async def test_news_without_end_keep_nobody_out(redis, namespace, news, looks):
    """Others' cost no look-up; of his own a second one at most, and what that saw is not kept."""
    store = Restless(redis, namespace)
    key, _ = await store.create("acme")
    store.auth, store.news = auth(store), news.replace("ITS", key_hash(key))
    async with asyncio.timeout(10):
        for times in (1, 2, 3):
            assert (await store.auth.identify(f"Bearer {key}")).tenant == "acme"
            assert store.asked == (1 if looks == 1 else times * looks)


async def test_what_changes_under_a_look_up_is_seen_by_the_next(redis, namespace):
    store = Restless(redis, namespace)
    key, record = await store.create("acme", priority="high")
    store.auth, store.news = auth(store), f"key {key_hash(key)}"

    async def lower() -> None:
        await store.change(record.id, "key.change", lambda _: {"priority": "low"})

    store.change_first = lower
    assert (await store.auth.identify(f"Bearer {key}")).priority == "low"


def test_news_beyond_those_that_are_known_one_by_one_may_be_about_anybody(monkeypatch):
    monkeypatch.setattr("services.gateway.identity.news._MOST_HEARD", 2)
    heard = Heard()
    for about in ("a", "b", "a"):
        heard.note(about)
    assert [heard.since(n, "a") for n in (2, 3)] == [True, False]
    assert [heard.since(n, "b", "x") for n in (1, 2)] == [True, False]
    assert not heard.since(0, "x")
    heard.note("c")  # b, the second, is no more known by itself
    assert [heard.since(n, "x") for n in (1, 2)] == [True, False]
    heard.note_all()
    assert [heard.since(n, "x") for n in (4, 5)] == [True, False]


async def test_a_key_that_is_looked_up_anew_is_the_latest(redis, namespace, monkeypatch):
    monkeypatch.setattr("services.gateway.identity.known._MOST", 2)
    store = Away(redis, namespace)
    keys = [(await store.create(f"tenant{n}"))[0] for n in range(3)]
    authenticator = auth(store, cache_s=0)
    for n in (0, 1, 0, 2):
        await authenticator.identify(f"Bearer {keys[n]}")
    store.away = True
    assert (await authenticator.identify(f"Bearer {keys[0]}")).tenant == "tenant0"
    assert (await refusal(authenticator, f"Bearer {keys[1]}")).reason == "keys_unavailable"


async def test_failures_are_counted_by_their_cause(redis, namespace):
    store = Away(redis, namespace)
    key, record = await store.create("acme", models=["m"])
    authenticator = auth(store)

    async def counts(why: str, header: str | None) -> bool:
        before = metrics.auth_failures.labels(why)._value.get()
        await refusal(authenticator, header)
        return bool(metrics.auth_failures.labels(why)._value.get() == before + 1)

    identity = await authenticator.identify(f"Bearer {key}")
    with pytest.raises(PenstockError, match="may not use the model 'other'") as refused:
        identity.authorize("other")
    told = refused.value
    assert (told.stage, told.param, told.reason) == ("gateway", "model", "model_not_allowed")
    assert identity.caller("req_7").request_id == "req_7"
    await store.revoke(record.id)
    assert await counts("missing", None)
    assert await counts("malformed", f"Basic {key}")
    assert await counts("malformed", f"Bearer {key} x")
    assert await counts("wrong", "Bearer psk-" + "a" * 43)
    authenticator.told(f"revoked {key_hash(key)}")
    assert await counts("revoked", f"Bearer {key}")
    store.away = True
    assert await counts("keys_unavailable", "Bearer psk-" + "b" * 43)
