import asyncio
import json
import subprocess
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY

from services.common import discovery
from services.common.discovery import (
    REPLICA_ID,
    SERVICES,
    Directory,
    Registration,
    Replica,
    host_id,
    machine_id,
    new_replica_id,
)
from services.common.embedded_redis import EmbeddedRedis
from services.common.redis import Redis, connect
from tests.support.waiting import until

LEASE_S = 0.6


def replica(id: str, address: str = "127.0.0.1:1") -> Replica:
    return Replica("worker", id, address, host_id("127.0.0.1"), pid=1, facts={"role": "both"})


async def test_a_replica_appears_renews_and_leaves(redis: Redis, namespace: str) -> None:
    changes: list[tuple[list[str], list[str]]] = []
    view = Directory(
        redis,
        namespace,
        "worker",
        LEASE_S,
        lambda added, removed: changes.append(([r.id for r in added], [r.id for r in removed])),
    )
    await view.start()
    registration = Registration(redis, namespace, replica("a"), LEASE_S)
    await registration.start()
    await until(lambda: "a" in view.replicas)
    assert view.replicas["a"] == replica("a")

    beyond_one_lease = asyncio.get_running_loop().time() + 2 * LEASE_S
    await until(lambda: asyncio.get_running_loop().time() > beyond_one_lease)
    assert "a" in view.replicas, "renewal keeps it"

    await registration.stop()
    await until(lambda: not view.replicas)
    assert changes == [(["a"], []), ([], ["a"])]
    await view.stop()


async def test_a_silent_replica_disappears_after_its_lease(redis: Redis, namespace: str) -> None:
    view = Directory(redis, namespace, "worker", LEASE_S)
    registration = Registration(redis, namespace, replica("a"), LEASE_S)
    await registration.start()
    await view.start()
    assert "a" in view.replicas
    assert registration._task is not None
    registration._task.cancel()  # as a kill would
    await until(lambda: not view.replicas, what="the lease ran out")
    await view.stop()


async def test_a_new_address_counts_as_removed_and_added(redis: Redis, namespace: str) -> None:
    changes: list[tuple[list[str], list[str]]] = []
    view = Directory(
        redis,
        namespace,
        "worker",
        LEASE_S,
        lambda added, removed: changes.append(
            ([r.address for r in added], [r.address for r in removed])
        ),
    )
    for address in ("127.0.0.1:1", "127.0.0.1:2"):
        registration = Registration(redis, namespace, replica("a", address), LEASE_S)
        await registration._once()
        await view.refresh()
    assert changes == [(["127.0.0.1:1"], []), (["127.0.0.1:2"], ["127.0.0.1:1"])]


def told() -> float | None:
    """What the metrics say of Redis."""
    return REGISTRY.get_sample_value("penstock_redis_reachable")


async def test_the_last_view_stands_while_redis_is_away(namespace: str) -> None:
    with EmbeddedRedis() as server:
        client = connect(server.url)
        registration = Registration(client, namespace, replica("a"), LEASE_S)
        view = Directory(client, namespace, "worker", LEASE_S)
        await registration.start()
        await view.start()
        server.stop()
        await until(lambda: not view.reachable)
        away_for_long = asyncio.get_running_loop().time() + 2 * LEASE_S
        await until(lambda: asyncio.get_running_loop().time() > away_for_long)
        assert "a" in view.replicas
        assert told() == 0

        server.start()  # empty: it kept nothing
        await until(lambda: view.reachable)
        await until(lambda: told() == 1)
        assert "a" in view.replicas, "it has a lease's time to come back"
        renewed = asyncio.get_running_loop().time() + 2 * LEASE_S
        await until(lambda: asyncio.get_running_loop().time() > renewed)
        assert "a" in view.replicas, "it registered again by itself"
        await registration.stop()
        await view.stop()
        await client.aclose()


async def test_the_last_view_stands_while_redis_is_full(namespace: str) -> None:
    """It refuses the renewals then, but not what only removes."""
    with EmbeddedRedis() as server:
        client = connect(server.url)
        registration = Registration(client, namespace, replica("a"), LEASE_S)
        view = Directory(client, namespace, "worker", LEASE_S)
        await registration.start()
        await view.start()
        await client.config_set("maxmemory", 1)
        full_for_long = asyncio.get_running_loop().time() + 3 * LEASE_S
        await until(lambda: asyncio.get_running_loop().time() > full_for_long)
        assert set(view.replicas) == {"a"}
        assert not view.reachable

        await client.config_set("maxmemory", 0)
        await until(lambda: view.reachable, what="there is room again")
        renewed = asyncio.get_running_loop().time() + 2 * LEASE_S
        await until(lambda: asyncio.get_running_loop().time() > renewed)
        assert set(view.replicas) == {"a"}
        await registration.stop()
        await until(lambda: not view.replicas)
        await view.stop()
        await client.aclose()


async def test_an_odd_record_or_answer_does_not_end_the_loops(redis: Redis, namespace: str) -> None:
    view = Directory(redis, namespace, "worker", LEASE_S)
    registration = Registration(redis, namespace, replica("a"), LEASE_S)
    await registration.start()
    leases, records = registration._keys
    newer = {**asdict(replica("newer")), "a_field_of_tomorrow": 1}
    odd = {"id": ["a", "list"], "facts": "none", "address": None}
    wrong = {key: json.dumps({**newer, key: value}) for key, value in odd.items()}
    junk = {"junk": "{", "bare": "5", **wrong}
    await redis.hset(records, mapping={"newer": json.dumps(newer), "ghost": "{}", **junk})
    # "ghost" holds no lease
    await redis.zadd(leases, dict.fromkeys(["newer", *junk], 9e15))
    await view.start()
    assert set(view.replicas) == {"a", "newer"}

    await redis.delete(leases)
    await redis.set(leases, "not a sorted set")  # every call is answered with an error now
    await until(lambda: not view.reachable)
    await redis.delete(leases)
    await until(lambda: view.reachable, what="the view is looked at again")
    await until(lambda: "a" in view.replicas, what="and the lease renewed")
    await registration.stop()
    await view.refresh()
    assert not await redis.exists(leases) or not await redis.zscore(leases, "a")
    await view.stop()


async def test_a_lease_of_patience_by_the_clock(
    redis: Redis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is no longer listed stays for a lease since it was listed last, and everybody for one
    since Redis is back."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(discovery, "time", SimpleNamespace(monotonic=lambda: clock.now))
    listed: list[str] | None = [json.dumps(asdict(replica(id))) for id in "ab"]

    async def look(keys: list[str]) -> list[str]:
        if listed is None:
            raise ConnectionError
        return listed

    changes: list[tuple[list[str], list[str]]] = []
    view = Directory(
        redis,
        namespace,
        "worker",
        6.0,
        lambda added, removed: changes.append(([r.id for r in added], [r.id for r in removed])),
    )
    monkeypatch.setattr(view, "_list", look)

    async def seen_at(now: float) -> str:
        clock.now = now
        await view.refresh()
        return "".join(sorted(view.replicas))

    assert not view.reachable
    assert await seen_at(1000.0) == "ab"
    listed = listed[:1]
    assert await seen_at(1005.9) == "ab"
    assert await seen_at(1006.0) == "a"
    assert "b" not in view._seen
    listed = None
    assert await seen_at(2000.0) == "a"
    assert not view.reachable
    listed = []  # Redis is back, and empty
    assert await seen_at(3000.0) == "a"
    assert view.reachable
    assert await seen_at(3005.9) == "a"
    assert await seen_at(3006.0) == ""
    assert changes == [(["a", "b"], []), ([], ["b"]), ([], ["a"])]


async def test_services_and_installs_are_apart(redis: Redis, namespace: str) -> None:
    for place in (namespace, f"{namespace}-other"):
        for id in ("a", "b"):
            await Registration(redis, place, replica(id, f"{place}:1"), 60.0)._once()
    here = Directory(redis, namespace, "worker", 60.0)
    await here.refresh()
    assert {r.address for r in here.replicas.values()} == {f"{namespace}:1"}
    routers = Directory(redis, namespace, "router", 60.0)
    await routers.refresh()
    assert routers.reachable
    assert not routers.replicas


async def test_who_died_together_is_forgotten_together(redis: Redis, namespace: str) -> None:
    registrations = [Registration(redis, namespace, replica(id), 0.05) for id in "abc"]
    for registration in registrations:
        await registration._once()
    await Registration(redis, namespace, replica("d"), 60.0)._once()
    leases, records = registrations[0]._keys
    view = Directory(redis, namespace, "worker", 0.05)

    async def alone() -> bool:
        await view.refresh()
        return set(view.replicas) == {"d"}

    await until(alone)
    assert await redis.hkeys(records) == await redis.zrange(leases, 0, -1) == ["d"]


async def test_new_facts_of_a_replica_are_a_change(redis: Redis, namespace: str) -> None:
    changes: list[tuple[int, int]] = []
    view = Directory(
        redis, namespace, "worker", 60.0, lambda a, r: changes.append((len(a), len(r)))
    )
    before, after = replica("a"), replace(replica("a"), facts={"role": "decode"})
    for told in (before, before, after):
        await Registration(redis, namespace, told, 60.0)._once()
        await view.refresh()
    assert changes == [(1, 0), (1, 1)]
    assert view.replicas["a"].facts == {"role": "decode"}


async def test_a_change_is_waited_for_from_now_on(redis: Redis, namespace: str) -> None:
    view = Directory(redis, namespace, "worker", LEASE_S)
    await Registration(redis, namespace, replica("a"), 60.0)._once()
    await view.refresh()
    waiting = asyncio.create_task(view.changed())
    await asyncio.sleep(0)
    await view.refresh()
    assert not waiting.done(), "that one came before"
    await Registration(redis, namespace, replica("b"), 60.0)._once()
    await view.refresh()
    await asyncio.wait_for(waiting, 10)


def test_ids_have_their_shape_and_processes_of_a_host_its_name() -> None:
    ids = {new_replica_id(service) for service in SERVICES for _ in range(8)}
    assert len(ids) == 8 * len(SERVICES)
    assert all(REPLICA_ID.fullmatch(id) for id in ids)
    script = "from services.common.discovery import host_id; print(host_id('127.0.0.2'))"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert other.stdout.strip() == host_id("127.0.0.2")
    assert host_id("127.0.0.2").startswith(machine_id())
    assert host_id("127.0.0.2") != host_id("127.0.0.1"), "two nodes, though of one machine"


async def test_all_views_of_a_process_look_in_one_round_trip(
    redis: Redis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one of them fails, and one was stopped."""
    views = [Directory(redis, namespace, service, LEASE_S) for service in SERVICES]
    for view in views:
        await view.start()
    sent: list[list[str]] = []
    line = views[0]._list
    send = line._send

    def note() -> None:
        sent.append([call.words[3] for call in line._unsent])
        send()

    def fail(added: list[Replica], removed: list[Replica]) -> None:
        raise ValueError("whoever watches is at fault")

    monkeypatch.setattr(line, "_send", note)
    await until(lambda: len(sent) >= 2)
    assert sent[-1] == sent[-2]
    assert len(sent[-1]) == len(SERVICES)

    await views[0].stop()
    views[1]._on_change = fail
    for service in SERVICES:
        own = replace(replica("a"), service=service)
        await Registration(redis, namespace, own, 60.0)._once()
    await until(lambda: all(view.replicas for view in views[1:]))
    seen = len(sent)
    await until(lambda: len(sent) >= seen + 2, what="the others are looked at again")
    assert {len(calls) for calls in sent[seen:]} == {len(SERVICES) - 1}
    assert not views[0].replicas
    for view in views:
        await view.stop()
    assert not pipe_tasks(), "nobody looks any more"


def pipe_tasks() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if "views" in task.get_name()]


async def test_a_view_that_was_stopped_tells_nobody(
    redis: Redis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although it looked just then."""
    told: list[int] = []
    view = Directory(redis, namespace, "worker", 60.0, lambda a, r: told.append(len(a)))
    asked, answer = asyncio.Event(), asyncio.Event()

    async def look(keys: list[str]) -> list[str]:
        asked.set()
        await answer.wait()
        return [json.dumps(asdict(replica("a")))]

    monkeypatch.setattr(view, "_list", look)
    looking = asyncio.create_task(view.refresh())
    await asked.wait()
    await view.stop()
    answer.set()
    await looking
    assert not told
    assert not view.replicas
