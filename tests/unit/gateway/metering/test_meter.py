"""A gateway's end of metering, on a real Redis: side by side, killed, and without Redis."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from protos.common_pb2 import Usage
from services.common.config import MeteringSettings, Settings
from services.common.embedded_redis import EmbeddedRedis
from services.common.errors import PenstockError
from services.common.redis import connect
from services.common.telemetry.metrics import BoundedNames
from services.gateway import metrics
from services.gateway.identity.limits import Bound, Limit
from services.gateway.identity.principal import Principal
from services.gateway.metering import upkeep
from services.gateway.metering.ledger import Entry, Ledger
from services.gateway.metering.meter import Meter, Metered
from services.gateway.metering.run import RELEASED, Held, Run, Used, Verdict
from services.gateway.metering.spool import Spool
from tests.support import gateway_parts
from tests.support.waiting import until, within

PRICES = {"m": {"prompt": 1, "output": 1}}


class End:
    """One gateway's meter, with connections of its own."""

    def __init__(self, url: str, namespace: str, **options: Any) -> None:
        own = MeteringSettings(**{"lease_s": 3600, "prices": PRICES, **options})
        self.settings = Settings(redis_url=url, namespace=namespace, metering=own)
        self.redis = connect(url)
        self.meter = Meter.of(self.redis, self.settings, BoundedNames(9))
        self.meter.start()

    async def admit(self, id: str, who: Principal, tokens: int = 0) -> Metered:
        return await self.meter.admit(who, id, "/v1", "m", (tokens, 0))

    async def ledger(self) -> list[Entry]:
        return [one async for one in Ledger(self.redis, self.settings.namespace).entries()]

    async def entries(self, count: int) -> list[Entry]:
        async def there() -> bool:
            return len(await self.ledger()) >= count

        await until(there, 10, f"{count} entries are in the ledger")
        return await self.ledger()

    async def close(self) -> None:
        await self.meter.stop()
        await self.redis.aclose()


@pytest.fixture
async def make(namespace: str) -> AsyncIterator[Callable[..., End]]:
    made: list[End] = []

    def end(url: str, **options: Any) -> End:
        made.append(End(url, namespace, **options))
        return made[-1]

    yield end
    for one in made:
        await one.close()


@pytest.fixture
def own_redis(tmp_path: Path):
    """One to stop and to start again, which keeps what it has."""
    with EmbeddedRedis(tmp_path) as server:
        yield server


def who(*limits: Limit) -> Principal:
    return Principal("a", "key_1", limits=tuple(Bound("tenant:a", limit) for limit in limits))


def limit(of: str, most: float, per: str | None = None, **more: Any) -> Limit:
    return Limit(name=f"{of}-{per or 'now'}".lower(), of=of, most=most, per=per, **more)  # type: ignore[arg-type]


async def is_back(end: End) -> None:
    await until(lambda: not end.meter._shared.away, 20, "Redis was asked again")


def using(metered: Metered, prompt: int, completion: int = 0) -> None:
    metered.usage = lambda: Usage(prompt_tokens=prompt, completion_tokens=completion)


@pytest.mark.parametrize(
    ("rule", "each", "fit"),
    [
        (limit("requests", 7, "hour"), 0, 7),
        (limit("tokens", 1000, "hour"), 130, 7),
        (limit("concurrent", 7), 0, 7),
        (limit("cost", 0.001, "month"), 130, 7),
    ],
)
async def test_a_limit_holds_over_four_gateways(make, redis_url, rule, each, fit):
    """All at once, of four clients: exactly as many as fit, and as many again once those ended."""
    ends = [make(redis_url) for _ in range(4)]

    async def ask(number: int) -> Metered | PenstockError:
        try:
            return await ends[number % 4].admit(f"r{number}", who(rule), each)
        except PenstockError as error:
            return error

    ended = await asyncio.gather(*map(ask, range(80)))
    running = [one for one in ended if isinstance(one, Metered)]
    assert len(running) == fit
    assert {e.reason for e in ended if not isinstance(e, Metered)} <= {
        "rate_limit_exceeded", "insufficient_quota"
    }  # fmt: skip
    for one in running:
        ends[0].meter.end(one)  # which used nothing
    await ends[0].entries(fit)
    again = await asyncio.gather(*map(ask, range(100, 180)))
    free = 0 if rule.of == "requests" else fit
    assert sum(isinstance(one, Metered) for one in again) == free


async def test_what_was_used_counts_and_not_what_was_held(make, redis_url):
    end = make(redis_url)
    rule = limit("tokens", 1000, "day")
    first = await end.admit("r1", who(rule), 900)
    assert first.rooms[0].left == 100
    using(first, 300)
    await end.meter.settle(first)
    assert [(e.prompt, e.nanos, e.status) for e in await end.ledger()] == [(300, 300_000, "ok")]
    assert (await end.admit("r2", who(rule), 500)).rooms[0].left == 200


async def test_an_end_is_told_once_however_often(make, redis_url):
    end = make(redis_url)
    one = await end.admit("r1", who(limit("tokens", 1000, "day")), 10)
    using(one, 10)
    await end.meter.settle(one)
    await end.meter.settle(one)
    assert end.meter.end(one, RuntimeError()) is None
    assert len(await end.ledger()) == 1


@pytest.mark.parametrize(("shown", "charged"), [(False, 0), (True, 10)])
async def test_a_fault_of_ours_is_charged_for_what_was_seen_of_an_answer(
    make, redis_url, shown, charged
):
    end, rule = make(redis_url), limit("tokens", 1000, "day")
    one = await end.admit("r1", who(rule), 10)
    using(one, 10)
    one.shown = lambda: shown
    end.meter.end(one, RuntimeError("a bug"))
    (entry,) = await end.entries(1)
    assert (entry.status, entry.prompt) == ("failed", charged)
    assert (await end.admit("r2", who(rule))).rooms[0].left == 1000 - charged


# ---- a gateway that is killed -------------------------------------------------------------------

_GATEWAY = """
import asyncio, os, sys
from tests.unit.gateway.metering.test_meter import End, limit, using, who

async def main(url, namespace, point):
    end = End(url, namespace, lease_s=1.0)
    if point == "before":
        return print("there", flush=True)
    one = await end.admit("r1", who(limit("tokens", 1000, "day"), limit("concurrent", 1)), 900)
    using(one, 0)
    if point in ("told", "settled"):
        using(one, 250)
        await end.meter._upkeep._tell([one])
    if point == "settled":
        using(one, 300)
        await end.meter.settle(one)
    end.meter._upkeep._task.cancel()  # from here on it is silent
    print("there", flush=True)
    await asyncio.sleep(3600)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("point", "charged", "status"),
    [("before", None, ""), ("reserved", 0, "lost"), ("told", 250, "lost"), ("settled", 300, "ok")],
)
async def test_a_killed_gateways_requests_are_settled_by_another(
    make, redis_url, namespace, point, charged, status
):
    """What it held comes back, and it is charged what was known: exactly once."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _GATEWAY, redis_url, namespace, point, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await within(30, process.stdout.readline()) == b"there\n"
    if process.returncode is None and point != "before":
        process.send_signal(signal.SIGKILL)
    await process.wait()
    end = make(redis_url, lease_s=1.0)
    rules = limit("tokens", 1000, "day"), limit("concurrent", 1)
    if charged is not None:
        await end.entries(1)
    after = await end.admit("r2", who(*rules), 10)
    assert after.rooms[0].left == 1000 - 10 - (charged or 0)
    entries = [(e.id, e.status, e.prompt, e.nanos) for e in await end.ledger()]
    told = [("r1", status, charged, charged * 1000)] if charged is not None else []
    assert entries == told


async def test_who_is_settled_by_a_request_at_the_door_is_counted_as_lost_too(make, redis_url):
    """Where many come, nobody else finds one."""
    lost, left = make(redis_url, lease_s=1), make(redis_url)
    await left.meter.stop()  # its upkeep
    rule = limit("requests", 1000, "day")
    await lost.admit("r1", who(rule))
    await lost.meter._upkeep.stop()
    before = metrics.lapsed._value.get()
    number = 0

    async def found() -> bool:
        nonlocal number
        number += 1
        await left.admit(f"next{number}", who(rule))
        return metrics.lapsed._value.get() > before

    await until(found, 10, "its lease is over")
    assert [entry.status for entry in await left.entries(1)] == ["lost"]


async def test_a_gateway_that_was_thought_lost_corrects_what_was_charged(make, redis_url):
    """It was silent for longer than its lease, and goes on."""
    silent = make(redis_url, lease_s=1.0)
    silent.meter._upkeep._task.cancel()
    one = await silent.admit("r1", who(limit("tokens", 1000, "day")), 900)
    using(one, 40)
    await silent.meter._upkeep._tell([one])
    other = make(redis_url, lease_s=1.0)
    await other.entries(1)
    using(one, 100)
    await silent.meter._upkeep._tell([one])  # too late: it is over
    await silent.meter.settle(one)
    entries = [(e.status, e.prompt, e.nanos) for e in await other.ledger()]
    assert entries == [("lost", 40, 40_000), ("correction", 60, 60_000)]
    assert (await other.admit("r2", who(limit("tokens", 1000, "day")))).rooms[0].left == 900


async def test_who_ends_while_others_are_told_of_is_told_of_no_more():
    """It was handed over: what is held for it is another gateway's by then."""

    class Shared(gateway_parts.SharedMeter):
        async def hold_all(self, runs):
            told.extend(run.id for run in runs)
            if not meter._upkeep._settling:
                meter.hand_over(running[-1])
                meter.end(running[-2])

        async def hold(self, run):
            assert run is running[-1].run

    told, meter = [], gateway_parts.meter(Shared())
    day = who(limit("tokens", 1000, "day"))
    count = upkeep._TOLD + 3
    running = [await meter.admit(day, f"r{n}", "/v1", "m", (1, 0)) for n in range(count)]
    await meter._upkeep._tell(running)
    assert told == [one.run.id for one in running[:-2]]


async def test_who_wakes_after_another_has_ended_its_request_takes_nothing_back(make, redis_url):
    """A run was taken over from it: what it tells is older."""
    frozen, other = make(redis_url), make(redis_url)
    day = who(limit("tokens", 1000, "day"))
    one = await frozen.admit("r1", day, 900)
    using(one, 40, 10)
    taken_over = await other.admit("r1", day, 900)
    using(taken_over, 40, 60)
    await other.meter.settle(taken_over)
    await frozen.meter.settle(one)
    entries = [(e.status, e.prompt, e.output) for e in await other.ledger()]
    assert entries == [("ok", 40, 60)]
    assert (await other.admit("r2", day)).rooms[0].left == 900


# ---- without Redis ------------------------------------------------------------------------------


async def test_without_redis_each_rule_is_open_or_closed_and_nothing_is_lost(make, own_redis):
    end = make(own_redis.url, lease_s=1.0)
    open_, closed = limit("requests", 3, "day"), limit("cost", 1, "day", without_redis="closed")
    before = await end.admit("r0", who(open_, closed), 10)
    own_redis.stop()
    using(before, 10)
    await within(10, end.meter.settle(before))  # it is not waited for
    for number in range(1, 6):
        let_through = await within(10, end.admit(f"r{number}", who(open_), 10))
        using(let_through, 10)
        end.meter.end(let_through)
    with pytest.raises(PenstockError) as refused:
        await within(10, end.admit("r9", who(open_, closed), 10))
    assert refused.value.reason == "limits_unavailable"
    own_redis.start()
    entries = await end.entries(6)
    assert {e.id: e.prompt for e in entries} == {f"r{number}": 10 for number in range(6)}
    assert {e.status for e in entries} == {"ok"}  # and of what was refused nothing
    await is_back(end)
    with pytest.raises(PenstockError, match="requests-day"):
        await end.admit("r10", who(open_))  # all of them count
    assert metrics.unsettled._value.get() == 0


async def test_a_gateway_that_starts_without_redis_knows_it(make, own_redis, monkeypatch):
    """Before anybody comes, who would have to find it out."""
    own_redis.stop()
    end = make(own_redis.url)
    await until(lambda: end.meter._shared.away, 20, "it has asked")
    open_, closed = limit("requests", 3, "day"), limit("cost", 1, "day", without_redis="closed")
    with monkeypatch.context() as patch:
        patch.setattr(end.meter._shared, "reserve", None)  # nobody asks
        let_through = await end.admit("r1", who(open_), 10)
        with pytest.raises(PenstockError, match="limits cannot be checked"):
            await end.admit("r2", who(open_, closed))
    using(let_through, 10)
    own_redis.start()
    await is_back(end)
    await end.meter.settle(let_through)
    assert [e.id for e in await end.entries(1)] == ["r1"]
    assert (await end.admit("r3", who(open_))).rooms[0].left == 1


async def test_a_reservation_that_cannot_be_read_is_reported(make, redis_url, namespace, caplog):
    end, lost = make(redis_url, lease_s=1.0), metrics.unledgered._value.get()
    await end.redis.hset(f"{namespace}:{{meter}}:open", "odd", "no such thing")
    await end.redis.zadd(f"{namespace}:{{meter}}:due", {"odd": 1})
    await until(lambda: "odd" in caplog.text, 20, "it is said")
    assert metrics.unledgered._value.get() == lost + 1


async def test_a_gateway_that_is_too_busy_to_ask_lets_nobody_past(make, redis_url):
    """That its loop did not turn says nothing of Redis: the answer is there, and is read."""
    end = make(redis_url, redis_patience_s=0.2)
    rule = limit("requests", 1, "day")
    assert await end.admit("r0", who(rule))
    asking = asyncio.create_task(end.admit("r1", who(rule)))
    for _ in range(2):
        await asyncio.sleep(0)  # it has been sent
    time.sleep(0.5)  # noqa: ASYNC251 - the loop is held up
    with pytest.raises(PenstockError, match="requests-day"):
        await asking
    assert not end.meter._shared.away


@pytest.fixture
def hanging(own_redis: EmbeddedRedis) -> Iterator[EmbeddedRedis]:
    """It is to be stopped by its process, as a host that stops answering."""
    yield own_redis
    os.kill(own_redis.pid, signal.SIGCONT)


async def test_who_was_refused_while_redis_hung_holds_nothing_once_it_goes_on(make, hanging):
    """It reads then what it was asked."""
    end = make(hanging.url, redis_patience_s=0.3)
    one = limit("concurrent", 1, without_redis="closed")
    await end.meter._shared.sweep(1)  # there is a connection
    os.kill(hanging.pid, signal.SIGSTOP)
    with pytest.raises(PenstockError) as refused:
        await end.admit("r1", who(one))
    assert refused.value.reason == "limits_unavailable"
    os.kill(hanging.pid, signal.SIGCONT)
    await is_back(end)
    assert await end.admit("r2", who(one))
    assert await end.ledger() == []


async def test_a_redis_that_hangs_costs_one_patience_and_no_task_for_each(make, hanging):
    end = make(hanging.url, lease_s=2.0, redis_patience_s=0.3)
    few = limit("concurrent", 2)
    running = await end.admit("r0", who(few))
    os.kill(hanging.pid, signal.SIGSTOP)
    began = time.monotonic()
    first = await asyncio.gather(*(end.admit(f"a{n}", who(few)) for n in range(50)))
    assert 0.2 < time.monotonic() - began < 5, "all of them together have waited"
    before, began = len(asyncio.all_tasks()), time.monotonic()
    for number in range(500):
        one = await end.admit(f"b{number}", who(few))
        using(one, 10)
        end.meter.end(one)
        assert await end.admit(f"c{number}", who())
    assert len(asyncio.all_tasks()) <= before + 3
    assert time.monotonic() - began < 5, "nobody waits any more"
    for one in first[10:]:
        end.meter.end(one)
    await asyncio.sleep(2.1)  # longer than their leases
    os.kill(hanging.pid, signal.SIGCONT)
    await is_back(end)
    with pytest.raises(PenstockError, match="concurrent-now"):
        await end.admit("after", who(few))
    (places,) = await end.redis.keys(f"{end.settings.namespace}:{{meter}}:n:*")
    assert await end.redis.zcard(places) == 11, (
        "what runs on has its places again, under its own ids"
    )
    end.meter.end(running)
    entries = await end.entries(541)
    assert len(entries) == len({e.id for e in entries}) == 541
    assert {e.prompt for e in entries if e.id.startswith("b")} == {10}


async def test_what_does_not_fit_the_spool_is_counted_as_lost(make, own_redis, caplog):
    end = make(own_redis.url, lease_s=1.0, unsettled=3)
    own_redis.stop()
    lost, cost = metrics.unledgered._value.get(), metrics.unledgered_cost._value.get()
    for number in range(5):
        one = await end.admit(f"r{number}", who())
        using(one, 1000)
        end.meter.end(one)

    def all_wait() -> bool:
        return metrics.unledgered._value.get() == lost + 2

    await until(all_wait, 20, "the oldest are given up")
    assert metrics.unledgered_cost._value.get() == pytest.approx(cost + 0.002)
    own_redis.start()
    assert {e.id for e in await end.entries(3)} == {"r2", "r3", "r4"}

    def named() -> list[str]:  # in one line of the log, or two
        lines = [r.getMessage() for r in caplog.records if "missing in the ledger" in r.message]
        return sorted(id for line in lines for id in line.rpartition(": ")[2].split(", "))

    await until(lambda: len(named()) == 2, 20, "the log names them")
    assert named() == ["r0", "r1"]


@pytest.mark.parametrize("reserved", [False, True])
async def test_who_is_gone_at_the_door_holds_nothing(make, redis_url, monkeypatch, reserved):
    end = make(redis_url)
    rule = limit("concurrent", 1)
    reserve, asked = end.meter._shared.reserve, asyncio.Event()

    async def answered_late(run: Run) -> Verdict:
        if reserved:
            assert (await reserve(run)).blocked_by is None
        asked.set()
        await asyncio.sleep(60)
        raise AssertionError("nobody went away")

    with monkeypatch.context() as patch:
        patch.setattr(end.meter._shared, "reserve", answered_late)
        asking = asyncio.create_task(end.admit("r1", who(rule)))
        await within(10, asked.wait())
        asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert asking.cancelled()
    await asyncio.gather(*end.meter._upkeep._settling)
    assert await end.admit("r2", who(rule))
    assert await end.ledger() == []


async def test_a_call_that_comes_after_its_release_holds_nothing(make, redis_url):
    end = make(redis_url)
    rule = limit("concurrent", 1)
    late = (await end.admit("r0", who())).run
    late.id, late.bounds = "late", who(rule).limits
    await end.meter._shared.release(late)
    await end.meter._shared.reserve(late)
    assert await end.admit("r2", who(rule))


async def test_refusals_of_an_outage_charge_nothing_and_push_no_charge_out(make, own_redis):
    """A flood of them, more than wait for Redis: some that it may have been asked, and most not."""
    end = make(own_redis.url, lease_s=1.0, unsettled=3)
    rules = limit("requests", 100, "day", without_redis="closed"), limit("concurrent", 9)
    charged = [await end.admit(f"r{n}", who(*rules), 10) for n in range(3)]
    own_redis.stop()
    lost = metrics.unledgered._value.get()
    for one in charged:
        using(one, 10)
        await end.meter.settle(one)
    for number in range(40):
        if number < 5:
            end.meter._shared.away = False  # it is asked once more
        with pytest.raises(PenstockError) as refused:
            await within(10, end.admit(f"x{number}", who(*rules), 10))
        assert refused.value.reason == "limits_unavailable"
    own_redis.start()
    assert {e.id for e in await end.entries(3)} == {"r0", "r1", "r2"}
    assert metrics.unledgered._value.get() == lost
    await is_back(end)
    after = await end.admit("after", who(*rules))
    assert [room.left for room in after.rooms] == [96, 8]
    assert len(await end.ledger()) == 3


def test_the_spool_keeps_what_costs():
    spool = Spool(3)
    runs = {
        id: Run(id, {}, (), Held(0, 0), Used(prompt=used), status)
        for id, used, status in (
            ("free", 0, "refused"), ("a", 5, "ok"), ("held", 0, RELEASED), ("b", 5, "ok"),
            ("c", 5, "ok"), ("d", 5, "ok"), ("e", 0, "ok"),
        )
    }  # fmt: skip
    gone = [lost.id for run in runs.values() if (lost := spool.put(run)) is not None]
    assert gone == ["held", "free", "a", "e"]
    assert [run.id for run in spool.some(2)] == ["b", "c"]
    spool.take_out(runs["b"])
    assert [run.id for run in spool] == ["c", "d"]


async def test_what_is_being_settled_when_a_gateway_ends_is_not_lost(make, redis_url, monkeypatch):
    """Redis takes it only after the patience with those under way is over."""
    monkeypatch.setattr(upkeep, "_LAST_S", 0.2)
    end = make(redis_url)
    settle, slow = end.meter._shared.settle, asyncio.Event()

    async def late(run: Run) -> None:
        if not slow.is_set():
            await slow.wait()
        await settle(run)

    monkeypatch.setattr(end.meter._shared, "settle", late)
    one = await end.admit("r1", who(), 10)
    using(one, 10)
    written = end.meter.end(one)
    assert written is not None
    written.add_done_callback(lambda _: slow.set())  # it was given up, and Redis is well again
    await end.meter.stop()
    assert [e.id for e in await end.ledger()] == ["r1"]


async def test_the_ledger_is_cut_by_age_and_by_length(make, redis_url):
    end = make(redis_url)
    ledger = Ledger(end.redis, end.settings.namespace)
    for number in range(250):
        end.meter.end(await end.admit(f"r{number}", who()))
    entries = await end.entries(250)
    assert await ledger.trim(3600, 1000) == 0
    assert len(await end.ledger()) == 250
    assert 100 <= await ledger.trim(3600, 50) <= 200  # by whole nodes of a hundred
    kept = await end.ledger()
    assert kept == entries[-len(kept) :]
    assert await ledger.remove(kept[9].entry) == 10
    assert await end.ledger() == kept[10:]
    since = [e.id async for e in ledger.entries(kept[-1].time_s)]
    assert kept[-1].id in since
    assert [e async for e in ledger.entries(0, kept[10].time_s)] == []


async def test_an_entry_takes_as_much_memory_as_is_said(make, redis_url):
    """PENSTOCK_METERING__LEDGER_ENTRIES: some 170 bytes each."""
    end = make(redis_url)
    for number in range(300):
        one = await end.admit(f"req_{number:030x}", who())
        using(one, 1000)
        end.meter.end(one)
    await end.entries(300)
    size = await end.redis.memory_usage(f"{end.settings.namespace}:{{meter}}:ledger")
    assert 75 <= size / 300 <= 225


async def test_keys_expire_and_share_one_slot(make, redis_url):
    end = make(redis_url)
    rules = limit("tokens", 1000, "minute"), limit("cost", 1, "day"), limit("concurrent", 5)
    await end.admit("r1", who(*rules), 10)
    done = await end.admit("r2", who(*rules), 10)
    await end.meter.settle(done)
    root = f"{end.settings.namespace}:{{meter}}:"
    keys = {key: await end.redis.ttl(key) async for key in end.redis.scan_iter(f"{root}*")}
    forever = {key.removeprefix(root) for key, ttl in keys.items() if ttl < 0}
    assert forever == {"open", "due", "ledger"}  # which end with the requests, and are cut
    assert len(keys) == 3 + 3 + 1
