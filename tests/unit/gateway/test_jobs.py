"""Queues of durable jobs on a real Redis, and what a gateway does with what it claims."""

import asyncio
import json
import math
import tracemalloc
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import ANY

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.config import GatewaySettings, JobsSettings, Settings
from services.common.embedded_redis import EmbeddedRedis
from services.common.errors import PenstockError
from services.common.redis import Redis, connect
from services.gateway import metrics
from services.gateway.batches.answering import request_id
from services.gateway.batches.lines import Lines
from services.gateway.batches.record import BatchRecord
from services.gateway.batches.validation import Entry, read
from services.gateway.identity.standing import Grantee
from services.gateway.ids import BATCH, REQUEST
from services.gateway.jobs import jobs as jobs_module
from services.gateway.jobs.jobs import MAX_CLAIMS, Dead, Jobs, Later, backoff_s
from services.gateway.jobs.places import Places
from services.gateway.jobs.queue import SHAPE, Claimed, Queue, Queues
from services.gateway.jobs.window import WAITED_S, Window
from tests.support.waiting import until

A, B = Queue("k", "acme", "one"), Queue("k", "acme", "two")
RIVAL = Queue("k", "rival", "one")
_STEPS = ("add", "claim", "claim", "claim", "done", "later", "release", "lapse", "renew")


@dataclass
class Model:
    """What must hold: a job is nobody's, one gateway's, or done with."""

    free: set[str] = field(default_factory=set)
    held: dict[str, tuple[str, Claimed]] = field(default_factory=dict)  # by whom
    lapsed: set[str] = field(default_factory=set)  # of those held: another may have it
    claims: Counter[str] = field(default_factory=Counter)


async def play(url: str, steps: list[tuple[str, int]]) -> None:
    redis, namespace = connect(url), f"test-{uuid.uuid4().hex[:8]}"
    gateways = {name: Queues(redis, namespace, name, 60) for name in ("g1", "g2")}
    model, number = Model(), 0
    try:
        for step, choice in [*steps, *[("claim", n) for n in range(3)]]:
            name = f"g{choice % 2 + 1}"
            own = sorted(body for body, (who, _) in model.held.items() if who == name)
            body = own[choice % len(own)] if own else ""
            if step == "add":
                number += 1
                await gateways[name].add((A, B, RIVAL)[choice % 3], f"job {number}")
                model.free.add(f"job {number}")
            elif step == "claim":
                await _claim(gateways[name], name, model)
            elif body:
                await _tell(redis, namespace, gateways[name], step, body, model)
        waiting, running = await gateways["g1"].counts("k")
        assert waiting + running == len(model.free) + len(model.held)
        assert running >= len(model.held), "what was released is pending until another has it"
        while model.free or model.lapsed:  # nothing is lost
            assert await _claim(gateways["g1"], "g1", model)
        for _, job in model.held.values():
            await gateways["g2"].done(job)  # whoever says so
        assert await gateways["g1"].claim("k") is None
        left = [key async for key in redis.scan_iter(f"{namespace}:*todo*")]
        assert left == []
    finally:
        await redis.aclose()


async def _claim(queues: Queues, name: str, model: Model) -> bool:
    job = await queues.claim("k")
    if job is None:
        assert not model.free | model.lapsed
        return False
    assert job.body in model.free | model.lapsed, "no two have one"
    model.free.discard(job.body)
    model.lapsed.discard(job.body)
    model.claims[job.body] += 1
    assert job.claims == model.claims[job.body]
    model.held[job.body] = (name, job)
    return True


async def _tell(
    redis: Redis, namespace: str, queues: Queues, step: str, body: str, model: Model
) -> None:
    name, job = model.held[body]
    if step == "done":
        await queues.done(job)
        del model.held[body]
        model.lapsed.discard(body)
    elif step in ("later", "release"):
        await (queues.later(job, body, 0) if step == "later" else queues.release(job))
        del model.held[body]
        model.lapsed.discard(body)
        model.free.add(body)
        model.claims[body] = 0 if step == "later" else model.claims[body] - 1
    elif step == "renew":
        assert await queues.renew(job)
        model.lapsed.discard(body)
    else:
        todo = f"{namespace}:{{jobs}}:todo:k:{job.queue.tenant}:{job.queue.name}"
        await redis.xclaim(todo, "gateways", name, 0, [job.id], idle=10**7, justid=True)
        model.lapsed.add(body)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(_STEPS), st.integers(0, 11)), max_size=40))
def test_no_job_is_lost_or_two_gateways(
    redis_server: EmbeddedRedis, steps: list[tuple[str, int]]
) -> None:
    asyncio.run(play(redis_server.url, steps))


@pytest.fixture
async def queues(redis_url: str, namespace: str) -> AsyncIterator[Queues]:
    redis = connect(redis_url)
    yield Queues(redis, namespace, "g1", 60)
    await redis.aclose()


async def test_tenants_take_turns_and_in_each_its_queues(queues: Queues) -> None:
    for queue in (A, B):
        await queues.fill(queue, [f"{queue.name} {n}" for n in range(600)])
        await queues.fill(queue, [f"{queue.name} {n}" for n in range(600)])  # once more: the same
    assert await queues.claim("k") is None
    for queue in (A, B):
        await queues.open(queue)
    await queues.fill(RIVAL, ["rival 0", "rival 1"])
    await queues.open(RIVAL)
    claimed = [await queues.claim("k") for _ in range(6)]
    assert sorted(job.body for job in claimed if job) == [
        "one 0", "one 1", "rival 0", "rival 1", "two 0", "two 1"
    ]  # fmt: skip
    assert [job.queue.tenant for job in claimed[:4] if job].count("rival") == 2
    assert await queues.counts("k") == (1196, 6)
    assert await queues.size(A) == 600
    await queues.pause(A, 60)
    await queues.pause(B, 60)
    assert await queues.claim("k") is None
    assert await queues.close(A) == 2
    left = [body async for some in queues.rest(A) for body in some]
    assert len(left) == 600
    for n in range(1100):
        await queues.add(A, f"due {n}", delay_s=60)
    sizes = [len(some) async for some in queues.rest(A)]
    assert (sum(sizes), max(sizes)) == (1700, 500), "as many as one call takes"
    await queues.drop(A)
    assert not await queues.renew(next(job for job in claimed if job and job.queue == A))


RIVALS = 40


class TwoTenants:
    """A kind with four places, of which one tenant's jobs take long."""

    name = "k"

    def __init__(self) -> None:
        self.places = Places(4)
        self.ran: Counter[str] = Counter()
        self.slow = 0
        self.most_slow = 0
        self.gate = asyncio.Event()

    async def run(self, job: Claimed) -> None:
        self.ran[job.queue.tenant] += 1
        if job.queue.tenant == "acme":
            self.slow += 1
            if self.ran["rival"] < RIVALS:
                self.most_slow = max(self.most_slow, self.slow)
            await self.gate.wait()
            self.slow -= 1

    async def give_up(self, job: Claimed, why: str) -> None:
        raise AssertionError(why)


async def test_one_tenants_long_jobs_leave_the_others_their_part_of_the_places(
    redis: Redis, namespace: str
) -> None:
    kind, jobs = TwoTenants(), Jobs(redis, namespace, "g1", JobsSettings(lease_s=60))
    for queue, count in ((A, 10), (B, 10), (RIVAL, RIVALS)):
        for n in range(count):
            await jobs.queues.add(queue, f"{queue.name} {n}")
    jobs.start([kind], lambda: False)
    try:
        await until(lambda: kind.ran["rival"] == RIVALS, 20, "all of the other's are done")
        assert kind.most_slow == 2, "half of four"
        jobs.look("k")
        await until(lambda: kind.slow == 4, 10, "who is alone has all places")
        await jobs.queues.add(RIVAL, "one more")
        kind.gate.set()
        await until(lambda: (kind.ran["acme"], kind.ran["rival"]) == (20, RIVALS + 1), 10)
    finally:
        await jobs.stop()
    assert jobs._has == {"k": {}}


async def test_the_tenant_with_the_fewest_is_served_first(queues: Queues) -> None:
    for queue in (A, RIVAL, Queue("k", "third", "one")):
        for n in range(3):
            await queues.add(queue, f"{queue.tenant} {n}")

    async def whose(**has: int) -> str:
        job = await queues.claim("k", has)
        assert job is not None
        return job.queue.tenant

    assert await whose(acme=2, rival=1, third=3) == "rival"
    assert await whose(acme=2, rival=2, third=1) == "third"
    assert await whose(acme=2, rival=2, third=2) == "acme", "the one that was not for longest"
    assert await whose(acme=5, rival=9) == "third"
    assert await whose(acme=5, rival=9, third=10) == "acme"
    left = [await whose(acme=1, rival=9, third=0) for _ in range(4)]
    assert left == ["third", "acme", "rival", "rival"], "none of them is forgotten"


async def test_a_job_of_a_later_version_is_left_to_it(
    redis: Redis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "_LEFT_S", 0.05)
    monkeypatch.setattr(jobs_module, "_LOOK_EVERY_S", 0.05)
    kind, jobs = Scripted(), Jobs(redis, namespace, "g1", JobsSettings(lease_s=60))
    newer = Queues(redis, namespace, "g2", 60)
    newer.shape = SHAPE + 1
    await newer.add(A, "new")
    await newer.add(A, "newest", delay_s=3600)
    await jobs.queues.add(A, "fine")
    jobs.start([kind], lambda: False)
    before = metrics.jobs_ended.labels("k", "left")._value.get()
    try:
        await until(lambda: metrics.jobs_ended.labels("k", "left")._value.get() > before + 1, 10)
        assert kind.ran == {"fine": 1}
        assert await jobs.queues.counts("k") in ((2, 0), (1, 1))
        assert [some async for some in jobs.queues.rest(A)] in ([[]], [[], []])
    finally:
        await jobs.stop()
    job: Claimed | None = None

    async def claimed() -> bool:
        nonlocal job
        job = await newer.claim("k")
        return job is not None

    await until(claimed, 10)
    assert job is not None
    assert (job.body, job.shape, job.claims) == ("new", SHAPE + 1, 1)
    assert job.left >= 2
    await newer.later(job, "newer", 0)
    assert await newer.claim("k") == job._replace(id=ANY, body="newer", left=0)


async def test_a_version_without_a_blob_store_takes_no_job_that_may_need_one(
    queues: Queues,
) -> None:
    """Its shape was 1. It would look for files in Redis alone, and say that they are gone."""
    await queues.add(A, "x")
    job = await queues.claim("k")
    assert job is not None
    assert job.shape > 1


async def test_a_job_that_no_version_comes_for_is_told_of(
    redis: Redis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_LEFT_S", 0.01), ("_LOOK_EVERY_S", 0.01), ("_MOST_LEFT", 2)):
        monkeypatch.setattr(jobs_module, name, value)
    kind, jobs = Scripted(), Jobs(redis, namespace, "g1", JobsSettings(lease_s=60))
    newer = Queues(redis, namespace, "g2", 60)
    newer.shape = SHAPE + 1
    await newer.add(A, "new")
    await jobs.queues.add(A, "odd record")
    jobs.start([kind], lambda: False)
    try:

        async def all_dead() -> bool:
            return len(await jobs.queues.dead(10)) == 2

        await until(all_dead, 20)
        dead = await jobs.queues.dead(10)
        assert {one.body for one in dead} == {"new", "odd record"}
        assert all("later version" in one.why for one in dead)
        why = {one.body: one.why.rpartition(": ")[2] for one in dead}
        assert why == {"new": f"its shape is {SHAPE + 1}", "odd record": ANY}
        assert "odd record" not in why["odd record"], "the fault, not what is stored"
        assert kind.ran == {"odd record": 3}
        assert await jobs.queues.counts("k") == (0, 0)
    finally:
        await jobs.stop()


async def test_what_was_stored_before_shapes_had_numbers_is_read(
    redis: Redis, queues: Queues
) -> None:
    await queues.open(A)
    await queues.add(B, "with a number")
    await redis.zadd(queues._key("later", *A), {'{"do":"end"}': 0})
    bodies = [job.body for _ in range(2) if (job := await queues.claim("k"))]
    assert sorted(bodies) == ["with a number", '{"do":"end"}']


class Scripted:
    """A kind that does with each job as its name says."""

    name = "k"

    def __init__(self) -> None:
        self.places = Places(2)
        self.ran: Counter[str] = Counter()
        self.given_up: dict[str, str] = {}
        self.gate = asyncio.Event()

    async def run(self, job: Claimed) -> None:
        self.ran[job.body] += 1
        match job.body:
            case "dead":
                raise Dead("of old age")
            case "later" if self.ran["later"] == 1:
                raise Later("later", 0.01)
            case "bug":
                raise ValueError
            case "away" if self.ran["away"] < 3:
                raise ConnectionError
            case "slow":
                await self.gate.wait()
            case "unreadable":
                raise Dead("it cannot be read")
            case "odd record":
                BatchRecord.model_validate_json("{}")

    async def give_up(self, job: Claimed, why: str) -> None:
        self.given_up[job.body] = why
        if job.body == "unreadable":
            raise ValueError


async def test_what_becomes_of_jobs(
    redis: Redis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = Scripted()
    jobs = Jobs(redis, namespace, "g1", JobsSettings(lease_s=0.5))
    for body in ("fine", "dead", "later", "bug", "away", "unreadable"):
        await jobs.queues.add(A, body)
    jobs.start([kind], lambda: False)
    try:

        async def all_over() -> bool:
            return await jobs.queues.counts("k") == (0, 0)

        await until(all_over, 20, "all have ended")
        unreadable = kind.ran.pop("unreadable")
        assert unreadable == MAX_CLAIMS, "and then it was given up without being looked at"
        assert kind.ran == {"fine": 1, "dead": 1, "later": 2, "bug": MAX_CLAIMS, "away": 3}
        assert kind.given_up.keys() == {"dead", "bug", "unreadable"}
        hopeless, *dead = await jobs.queues.dead(10)
        assert hopeless.body == "unreadable", "nobody could be told, and it ended all the same"
        assert [one.body for one in dead] == ["bug", "dead"]
        assert dead[1].why == kind.given_up["dead"] == "of old age"
        assert await jobs.queues.dead(10, dead[0].id) == dead[1:]

        await jobs.queues.add(A, "slow")
        await until(lambda: kind.ran["slow"] == 1, 10)
        renewed = []
        renew = jobs.queues.renew
        jobs.queues.renew = lambda job: renewed.append(job) or renew(job)
        await until(lambda: len(renewed) > 6, 20)  # for longer than its lease
        assert kind.ran["slow"] == 1
        await jobs.queues.drop(A)  # it is no more
        await until(lambda: not jobs._own, 10)
    finally:
        await jobs.stop()


async def test_what_is_under_way_at_the_end_is_anothers_at_once(
    redis: Redis, namespace: str
) -> None:
    first, second = Scripted(), Scripted()
    jobs = Jobs(redis, namespace, "g1", JobsSettings(lease_s=60))
    await jobs.queues.add(A, "slow")
    jobs.start([first], lambda: False)
    await until(lambda: first.ran["slow"] == 1, 10)
    await jobs.drain(0.01)
    await jobs.stop()
    other = Jobs(redis, namespace, "g2", JobsSettings(lease_s=60))
    second.gate.set()
    other.start([second], lambda: False)
    await until(lambda: second.ran["slow"] == 1 and not other._own, 10)
    await other.stop()
    assert await other.queues.counts("k") == (0, 0)


async def test_a_job_that_was_promised_is_done_once_what_it_is_for_is_noted(
    redis: Redis, namespace: str
) -> None:
    jobs = Jobs(redis, namespace, "g1", JobsSettings())
    queues = jobs.queues
    async with jobs.promised(A, "noted"):
        assert await queues.claim("k") is None
        assert await queues.size(A) == 1, "whatever becomes of this gateway"
    claimed = await queues.claim("k")
    assert claimed is not None
    assert claimed.body == "noted"
    with pytest.raises(ConnectionError):
        async with jobs.promised(A, "perhaps"):
            raise ConnectionError
    assert await queues.claim("k") is None
    assert await queues.size(A) == 2
    await queues.withdraw(A, "perhaps")
    assert await queues.size(A) == 1


def test_a_tenants_own_limit_tells_nothing_of_the_room_for_others() -> None:
    lines = Lines(cast(Any, SimpleNamespace(settings=Settings())))
    for _ in range(60):
        lines.places.went("b", 0.0, None)
    before = lines.places.size
    batch, entry = cast(Any, None), Entry(0, 0, 9, "a")
    for reason, after in (("rate_limit_exceeded", before), ("too_many_requests", before // 2)):
        error = PenstockError(
            grpc.StatusCode.RESOURCE_EXHAUSTED, "no room", stage="worker", reason=reason
        )
        with pytest.raises(Later) as later:
            lines._failed(batch, entry, error)
        assert later.value.pauses
        assert lines.places.size == after


async def test_a_window_grows_while_lines_come_as_fast_and_halves_when_there_is_no_place() -> None:
    window = Window(16)
    await window.take()
    blocked = asyncio.create_task(window.take())
    await asyncio.sleep(0)
    assert not blocked.done()
    for _ in range(60):
        window.went("b", 0.0, None)
    assert window.size == 16
    await blocked
    assert window.taken == 2
    window.went("b", WAITED_S, None)
    assert window.size == 8
    window.push_back()
    assert window.size == 8, "what was under way tells the same"
    for _ in range(60):
        window.went("b", 0.0, 0.01)
    assert window.size == 16


def test_a_window_is_as_large_as_pays() -> None:
    """Where so many at once take as long as one, and each more makes all of them slower."""
    for carries in (1, 4, 40):
        window = Window(200)
        for _ in range(2000):
            window.went("b", 0.0, 0.01 * max(1.0, window.size / carries))
        assert carries <= window.size <= carries + 3 * math.sqrt(carries) + 3
        for _ in range(200):  # somebody else came: all are slower, whatever the window
            window.went("b", 0.0, 0.08 * max(1.0, window.size / carries))
        few = window.size
        assert few <= max(2, carries)
        for _ in range(200):  # of another batch, whose lines are slower by nature
            window.went("c", 0.0, 0.8 * max(1.0, window.size / carries))
        assert window.size <= 2 * few + 2


def test_a_line_that_is_computed_again_is_the_same_request_and_one_that_failed_another() -> None:
    who = Grantee(tenant="acme", user="key_1", at=0)
    batch = BatchRecord(
        id=BATCH.new(), endpoint="/u", input_file_id="", completion_window="1h", created_at=0,
        expires_at=0, who=who, output_file_id="", error_file_id="",
    )  # fmt: skip
    entries = [Entry(0, 0, 9, "a"), Entry(1, 9, 9, "b"), Entry(0, 0, 9, "a", 1)]
    entries.append(Entry(0, 0, 9, "a", 1, 1))
    ids = [request_id(batch, entry) for entry in entries]
    assert ids == [request_id(batch, entry) for entry in entries]
    assert len(set(ids)) == 4
    assert all(map(REQUEST.fits, ids))


def test_backoff_doubles_and_has_an_end() -> None:
    for tries, most in ((1, 1.0), (2, 2.0), (5, 16.0), (50, 60.0)):
        assert most / 2 <= backoff_s(1.0, tries) <= most


@given(st.binary(max_size=80), st.integers(0, 3))
def test_whatever_a_file_is_it_is_read_or_its_line_is_told(noise: bytes, at: int) -> None:
    good = '{"custom_id": "ö%d", "method": "POST", "url": "/u", "body": {"n": %d}}'
    lines = [good % (n, n) for n in range(3)]
    lines.insert(at, noise.decode(errors="replace"))
    content = "\n".join(lines).encode()
    entries, faults = read(content, "/u", 10, GatewaySettings())
    if faults:
        assert all(fault.line is not None for fault in faults)
        return
    for entry in entries:
        piece = content[entry.at : entry.at + entry.size].decode()
        assert entry.custom_id in piece
        assert Entry.of(entry.body()) == entry


def test_a_name_that_a_line_has_twice_is_told() -> None:
    good = '{"custom_id": "%s", "method": "POST", "url": "/u", "body": {"n": 1%s}}'
    content = "\n".join([good % ("a", ""), good % ("b", ', "n": 2')]).encode()
    _, (fault,) = read(content, "/u", 10, GatewaySettings())
    assert (fault.code, fault.param, fault.line) == ("invalid_json_line", "n", 2)
    assert fault.message == "This line has 'n' twice in one object."


def test_a_lines_values_are_counted_before_it_is_parsed_and_blank_lines_are_none() -> None:
    """Of some megabytes each took a second, in which nothing else ran, and half a gigabyte."""
    limits = GatewaySettings(max_prompt_tokens=50)
    good = '{"custom_id": "%s", "method": "POST", "url": "/u", "body": {"n": [%s]}}'
    many = good % ("b", ",".join("0" * 100))
    content = "\n".join(["", good % ("a", "0, 0"), " \r", many, " \t" + good % ("c", "1")]).encode()
    entries, faults = read(content, "/u", 10, limits)
    ((code, line),) = [(fault.code, fault.line) for fault in faults]
    assert (code, line) == ("body_too_large", 4)
    assert [entry.custom_id for entry in entries] == ["a", "", "c"]
    assert json.loads(content[entries[2].at :][: entries[2].size])["body"] == {"n": [1]}
    blank = b"  \n" * 500_000
    tracemalloc.start()
    _, (empty,) = read(blank, "/u", 10, limits)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert empty.code == "empty_file"
