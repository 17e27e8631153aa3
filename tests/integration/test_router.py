"""The router as its callers see it: real links and Redis, fake workers (tests/support)."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from protos import common_pb2, router_pb2, router_pb2_grpc, worker_pb2
from services.common.block_hash import block_hashes, tenant_salt
from services.common.config import RouterSettings, Settings
from services.common.embedded_redis import EmbeddedRedis
from services.common.errors import PenstockError, invalid, unavailable
from services.common.link import End, LinkClient, LinkState
from services.common.redis import Redis, connect
from services.common.served_models import Checkpoint, entry, forget
from services.common.service import Host
from services.router import breaker, metrics, pipeline
from services.router.quarantine import PROOF_TOKENS
from services.router.server import RouterService
from tests.support.fake_worker import (
    BLOCK_SIZE,
    CHECKPOINT,
    MODEL,
    FakeWorker,
    Transfers,
    continuation,
)
from tests.support.transport import TRANSPORT
from tests.support.waiting import leaving_no_task, until

PROMPT = list(range(100, 300))


@dataclass
class Answered:
    """One request as its client sees it."""

    request: Any
    deltas: list[worker_pb2.TokenDelta] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [id for delta in self.deltas for id in delta.token_ids]

    async def end(self) -> End:
        async with asyncio.timeout(60):
            return await self.request.ended()

    async def whole(self) -> "Answered":
        end = await self.end()
        assert end.status.code == 0, end.status
        self.decisions = {d.subject: d for d in end.record.decisions}
        self.record = end.record
        return self

    @property
    def usage(self) -> common_pb2.Usage:
        assert self.deltas[-1].finish
        return self.deltas[-1].usage


class Stack:
    """Routers and fake workers in this process."""

    def __init__(self, redis: Redis, redis_url: str, namespace: str) -> None:
        self.redis, self.redis_url, self.namespace = redis, redis_url, namespace
        self.transfers = Transfers()
        self.workers: dict[str, FakeWorker] = {}
        self.hosts: list[Host] = []
        self.links: list[LinkClient] = []

    async def worker(self, id: str, role: str = "both", **options: Any) -> FakeWorker:
        made = FakeWorker(self.redis, self.namespace, id, role, transfers=self.transfers, **options)
        self.workers[id] = await made.start()
        return made

    async def router(self, **options: Any) -> LinkClient:
        """A started router that sees all workers, and a link to it."""
        settings = Settings(
            redis_url=self.redis_url,
            namespace=self.namespace,
            lease_s=5.0,
            router=RouterSettings(**{"worker_patience_s": 60.0, **options}),
        )
        host = Host(RouterService, settings)
        self.hosts.append(host)
        replica = await host.start()
        link = LinkClient(
            replica.address,
            "/penstock.v1.Router/Link",
            transport=TRANSPORT,
            peer_id="tokenizer-1",
        )
        self.links.append(link)
        await link.start()
        await link.wait_ready(60)

        async def sees_all() -> bool:
            seen = {w.id for w in (await self.status()).workers if w.state == "ready"}
            return seen == set(self.workers)

        await until(sees_all)
        return link

    async def status(self, host: int = -1) -> router_pb2.RouterStatus:
        replica = self.hosts[host].replica
        assert replica is not None
        async with TRANSPORT.dial(replica.address, "router") as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            return await stub.GetStatus(router_pb2.RouterStatusRequest(), timeout=10)

    async def close(self) -> None:
        for link in self.links:
            await link.close()
        for host in self.hosts:
            await host.stop(grace_s=0)
        for worker in self.workers.values():
            await worker.stop()


def ask(
    link: LinkClient,
    prompt: list[int] = PROMPT,
    max_tokens: int = 20,
    *,
    tenant: str = "acme",
    priority: int = common_pb2.PRIORITY_NORMAL,
    model: str = MODEL,
    generated: int = 0,
    checkpoint: str = CHECKPOINT,
    timeout_s: float = 60.0,
) -> Answered:
    """`generated`: how many of the prompt's last tokens another router gave."""
    request = router_pb2.GenerateRequest(
        caller=common_pb2.Caller(request_id="r", tenant=tenant, priority=priority, weight=1),
        model=model,
        prompt_token_ids=prompt,
        sampling=common_pb2.Sampling(top_p=1, seed=7, max_tokens=max_tokens),
        generated_prefix=generated,
        checkpoint=checkpoint,
    )
    deltas: list[worker_pb2.TokenDelta] = []
    opened = link.open(
        request.SerializeToString(),
        deadline=time.monotonic() + timeout_s,
        on_item=lambda payload: deltas.append(worker_pb2.TokenDelta.FromString(payload)),
    )
    return Answered(opened, deltas)


def undisturbed(prompt: list[int] = PROMPT, max_tokens: int = 20) -> list[int]:
    return continuation(prompt, max_tokens, seed=7)


@asynccontextmanager
async def stack_on(redis_url: str, namespace: str) -> AsyncIterator[Stack]:
    """Of which no task is left."""
    async with leaving_no_task():
        redis = connect(redis_url)
        made = Stack(redis, redis_url, namespace)
        try:
            yield made
        finally:
            await made.close()
            await redis.aclose()


@pytest.fixture
async def stack(redis_url: str, namespace: str) -> AsyncIterator[Stack]:
    async with stack_on(redis_url, namespace) as made:
        yield made


async def test_one_worker(stack):
    await stack.worker("w1")
    link = await stack.router()
    answer = await ask(link).whole()
    assert answer.tokens == undisturbed()
    assert answer.deltas[-1].finish == common_pb2.FINISH_LENGTH
    assert answer.usage == common_pb2.Usage(
        prompt_tokens=200, cached_tokens=0, completion_tokens=20
    )
    assert answer.decisions["admission"].choice == "at once"
    assert answer.decisions["admission"].reasons["cost_tokens"] == "220"
    assert answer.decisions["placement"].choice == "w1"
    assert "cost" in answer.decisions["placement"].reasons["w1"]
    names = {span.name for span in answer.record.spans}
    assert {"router", "admit", "place", "run"} <= names
    again = await ask(link).whole()
    assert again.tokens == undisturbed()
    assert again.usage.cached_tokens == 192
    assert again.decisions["split"].reasons["uncached_tokens"] == "8"


async def test_an_answer_is_settled_by_its_length(stack):
    """Tenants of equal expectations: the one whose answers are long has fewer of them."""
    worker = await stack.worker("w1", max_running=1)
    link = await stack.router()
    worker.gate.clear()
    order: list[str] = []

    async def finish(tenant: str, answer: Answered) -> None:
        await answer.whole()
        order.append(tenant)

    async def queued(count: int) -> bool:
        return (await stack.status()).queued == count

    running = ask(link)
    await until(lambda: worker.running == 1)
    tasks = []
    for count, (tenant, tokens) in enumerate([("long", 500), ("short", 128)] * 3):
        tasks.append(asyncio.create_task(finish(tenant, ask(link, [1], tokens, tenant=tenant))))
        await until(lambda count=count: queued(count + 1))
    worker.gate.set()
    await running.whole()
    await asyncio.gather(*tasks)
    assert order == ["long", "short", "short", "short", "long", "long"]


@pytest.mark.parametrize("split", ["never", "always"])
async def test_an_answer_that_a_lost_router_began_goes_on(stack, split):
    """What it asks of workers, its usage and its price are of the request as a whole."""
    prefill = await stack.worker("p", "prefill")
    decode = await stack.worker("d", "decode", max_running=1)
    link = await stack.router(split=split)
    whole = undisturbed()
    decode.hold_after = 2
    holds_the_slot = ask(link, [1] * 40)
    await until(lambda: len(holds_the_slot.tokens) == 2)
    decode.hold_after = None
    waits = ask(link, [2] * 40)

    answer = ask(link, PROMPT + whole[:5], max_tokens=15, generated=5)
    await answer.whole()
    assert answer.tokens == whole[5:]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (200, 20)
    works = [w for w in prefill.requests + decode.requests if len(w.prompt_token_ids) == 205]
    assert {(w.generated_prefix, w.sampling.max_tokens) for w in works} == {(5, 15)}
    admitted = answer.decisions["admission"]
    assert (admitted.choice, admitted.reasons["cost_tokens"]) == ("went on", "0")
    assert waits.deltas == [], "it did not wait its turn: it had had it"
    holds_the_slot.request.cancel()
    assert (await waits.whole()).tokens == undisturbed([2] * 40)


async def test_a_failover_of_an_answer_gone_on_with(stack):
    first, second = await stack.worker("w1"), await stack.worker("w2")
    link = await stack.router()
    first.hold_after = second.hold_after = 3
    answer = ask(link, PROMPT + undisturbed()[:5], max_tokens=15, generated=5)
    await until(lambda: len(answer.tokens) == 3)
    lost, other = (first, second) if first.running else (second, first)
    other.hold_after = None
    await lost.kill()
    await answer.whole()
    assert answer.tokens == undisturbed()[5:]
    (work,) = other.requests
    assert (work.generated_prefix, work.sampling.max_tokens) == (8, 12)
    assert answer.usage.completion_tokens == 20


async def test_a_prefix_that_leaves_no_prompt_is_refused(stack):
    await stack.worker("w1")
    link = await stack.router()
    end = await ask(link, PROMPT, generated=len(PROMPT)).end()
    assert (end.status.code, end.status.param) == (3, "generated_prefix")


async def test_an_open_answer_is_charged_as_expected(stack):
    worker = await stack.worker("w1")
    worker.fail_with = invalid("the rest does not matter", "", stage="worker")
    link = await stack.router()
    end = await ask(link, max_tokens=100_000).end()
    told = next(d for d in end.record.decisions if d.subject == "admission")
    assert told.reasons["cost_tokens"] == "328"


async def test_split_gives_the_same_tokens_in_order(stack):
    prefill = await stack.worker("p", "prefill")
    decode = await stack.worker("d", "decode")
    link = await stack.router(split="always")
    prefill.delay_first.clear()  # the decode worker's tokens arrive before the first one
    answer = ask(link)
    await until(lambda: decode.running == 0 and decode.requests)
    assert answer.tokens == []
    prefill.delay_first.set()
    await answer.whole()
    assert answer.tokens == undisturbed()
    assert answer.usage == common_pb2.Usage(
        prompt_tokens=200, cached_tokens=0, completion_tokens=20
    )
    assert answer.decisions["placement"].choice == "p > d"
    assert answer.decisions["split"].choice == "split"
    assert prefill.requests[0].push_to.address == decode.replica.address
    assert prefill.requests[0].transfer_id == decode.requests[0].transfer_id
    again = await ask(link).whole()
    assert again.usage.cached_tokens == 192


async def test_a_prompt_that_waits_for_its_reservation_counts(stack):
    """Its worker's engine has not heard of it, so the worker's news do not show it."""
    prefills = [await stack.worker(f"p{n}", "prefill") for n in range(2)]
    await stack.worker("d", "decode")
    link = await stack.router(split="always")
    for worker in prefills:
        worker.gate.clear()
    answers = []
    for n in range(4):
        answers.append(ask(link, [n] * 64))
        await until(lambda n=n: sum(w.running for w in prefills) == n + 1)
        for _ in range(3):  # the last of them is of a block, to see that all have come
            for worker in prefills:
                worker.tell()
        for w, worker in enumerate(prefills):
            worker.tell(stored=[bytes([n, w]) * 8])
        index = stack.hosts[0].service._workers.index
        await until(lambda n=n, index=index: len(index) == 2 * (n + 1))
    assert [w.running for w in prefills] == [2, 2]
    for worker in prefills:
        worker.gate.set()
    for n, answer in enumerate(answers):
        assert (await answer.whole()).tokens == undisturbed([n] * 64)
    assert all(w.unseen == [] for w in stack.hosts[0].service._workers.all())


async def test_split_by_uncached_tokens(stack):
    await stack.worker("p", "prefill")
    await stack.worker("d", "decode")
    link = await stack.router(split_min_tokens=100)
    short = await ask(link, PROMPT[:50]).whole()
    assert short.decisions["split"].choice == "unsplit"
    assert "fewer than 100" in short.decisions["split"].reasons["why"]
    assert short.decisions["placement"].choice == "d"
    stack.workers["d"].load.queued_prefill_tokens = 5000
    stack.workers["d"].tell()
    long = await ask(link).whole()
    assert long.decisions["split"].choice == "split"
    assert long.tokens == undisturbed()


async def test_first_token_ends_a_split_request(stack):
    await stack.worker("p", "prefill")
    decode = await stack.worker("d", "decode")
    link = await stack.router(split="always")
    answer = await ask(link, max_tokens=1).whole()
    assert answer.tokens == undisturbed(max_tokens=1)
    await until(lambda: decode.running == 0)
    assert (await stack.status()).admitted == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_one_role_alone_serves_unsplit(stack, role):
    await stack.worker("w", role)
    link = await stack.router(split="always")
    answer = await ask(link).whole()
    assert answer.tokens == undisturbed()
    assert "degraded" in answer.decisions["split"].reasons["why"]


@pytest.mark.parametrize("how", ["kill", "fail"])
async def test_failover_continues_the_same_answer(stack, how):
    workers = [await stack.worker("w1"), await stack.worker("w2")]
    for worker in workers:
        worker.hold_after = 7
    link = await stack.router(max_failovers=1)
    answer = ask(link)
    await until(lambda: len(answer.tokens) == 7)
    first = next(w for w in workers if w.requests)
    other = next(w for w in workers if w is not first)
    other.hold_after = None
    await (first.kill() if how == "kill" else first.links.drain(0))
    await answer.whole()
    assert answer.tokens == undisturbed()
    assert answer.usage == common_pb2.Usage(
        prompt_tokens=200, cached_tokens=0, completion_tokens=20
    )
    assert other.requests[0].generated_prefix == 7
    assert other.requests[0].sampling.max_tokens == 13
    assert other.requests[0].sampling.seed == 7
    told = answer.decisions["failover"]
    assert told.choice == other.id
    assert (told.reasons["lost"], told.reasons["tokens_so_far"]) == (first.id, "7")


async def test_stalled_worker_is_left(stack):
    first = await stack.worker("w1")
    link = await stack.router(stall_timeout_s=1.0)
    first.hold_after = 3
    answer = ask(link)
    await until(lambda: len(answer.tokens) == 3)
    second = await stack.worker("w2")
    first.stalled = True
    await answer.whole()
    assert answer.tokens == undisturbed()
    assert answer.decisions["failover"].reasons["cause"] == "peer_stalled"
    assert second.requests[0].generated_prefix == 3


async def test_split_survives_the_loss_of_either_worker(stack):
    prefill = await stack.worker("p", "prefill")
    first = await stack.worker("d1", "decode")
    link = await stack.router(split="always")
    first.hold_after = 5
    answer = ask(link)
    await until(lambda: len(answer.tokens) == 5)
    await stack.worker("d2", "decode")
    await until(lambda: len(stack.hosts[0].service._workers.ready(MODEL, CHECKPOINT)) == 3)
    await first.kill()
    del stack.workers["d1"]
    await answer.whole()
    assert answer.tokens == undisturbed()
    assert answer.decisions["placement"].choice == "p > d2"
    assert answer.usage.completion_tokens == 20

    prefill.gate.clear()
    answer = ask(link)
    await until(lambda: prefill.running == 1)
    await prefill.kill()
    await answer.whole()
    assert answer.tokens == undisturbed()
    assert answer.decisions["placement"].choice == "d2"
    await until(lambda: stack.workers["d2"].running == 0)
    await first.stop()


async def test_a_failed_hand_over_goes_on_unsplit(stack):
    prefill = await stack.worker("p", "prefill")
    await stack.worker("d", "decode")
    prefill.fail_transfer = True
    link = await stack.router(split="always")
    answer = await ask(link).whole()
    assert answer.tokens == undisturbed()
    assert answer.decisions["failover"].reasons["cause"] == "kv_transfer"
    assert answer.decisions["placement"].choice == "d"


async def test_a_requests_own_fault_is_not_retried(stack):
    worker = await stack.worker("w1")
    worker.fail_with = invalid("too long", "messages", stage="worker")
    link = await stack.router()
    end = await ask(link).end()
    assert end.status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert (end.status.param, end.status.stage) == ("messages", "worker")
    assert len(worker.requests) == 1


async def test_a_fault_of_the_router_is_no_success(stack, monkeypatch):
    await stack.worker("w1")
    link = await stack.router()

    def fail(*args: Any) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(pipeline, "place", fail)
    internal = metrics.ended.labels("internal")
    before = internal._value.get()
    end = await ask(link).end()
    assert (end.status.code, end.status.stage) == (grpc.StatusCode.INTERNAL.value[0], "router")
    assert end.status.reason == "internal"
    assert {d.subject for d in end.record.decisions} == {"admission"}
    assert internal._value.get() == before + 1
    assert (await stack.status()).admitted == 0


async def test_failovers_are_bounded(stack):
    worker = await stack.worker("w1")
    worker.fail_with = unavailable("no room", stage="worker", reason="broken_off")
    link = await stack.router(max_failovers=1)
    end = await ask(link).end()
    assert end.status.code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert end.status.reason == "broken_off"
    assert len(worker.requests) == 2
    assert (await stack.status()).admitted == 0


async def test_the_only_worker_comes_back(stack):
    first = await stack.worker("w1")
    first.hold_after = 3
    link = await stack.router()
    answer = ask(link)
    await until(lambda: len(answer.tokens) == 3)
    await first.kill()
    await stack.worker("w2")
    await answer.whole()
    assert answer.tokens == undisturbed()


async def test_unknown_model_and_no_worker(stack):
    link = await stack.router(worker_patience_s=0.2)
    end = await ask(link, model="nobody").end()
    assert (end.status.code, end.status.param) == (5, "model")
    worker = await stack.worker("w1")
    await until(lambda: stack.hosts[0].service._workers.ready(MODEL, CHECKPOINT))
    await worker.kill()
    await until(lambda: not stack.hosts[0].service._workers.ready(MODEL, CHECKPOINT))
    end = await ask(link).end()
    assert (end.status.code, end.status.reason) == (14, "no_worker")


async def test_a_model_without_a_worker_is_known_for_as_long_as_it_is_listed(stack):
    """Its requests wait for one; of one that has left they are told so."""
    link = await stack.router(worker_patience_s=0.1)
    listed = entry(stack.redis, stack.hosts[0].settings, Checkpoint("later", "d", "t", "/later"))
    await listed.start()
    end = await ask(link, model="later").end()
    assert (end.status.code, end.status.reason) == (14, "no_worker")
    await listed.stop()
    await forget(stack.redis, stack.hosts[0].settings, "later".__eq__)

    async def unknown() -> bool:
        return (await ask(link, model="later").end()).status.reason == "model_not_found"

    await until(unknown)


async def test_bad_requests_are_refused(stack):
    await stack.worker("w1")
    link = await stack.router()
    end = await ask(link, []).end()
    assert (end.status.code, end.status.param) == (3, "prompt_token_ids")
    end = await ask(link, max_tokens=0).end()
    assert (end.status.code, end.status.param) == (3, "sampling.max_tokens")
    end = await ask(link, tenant="").end()
    assert (end.status.code, end.status.param) == (3, "caller.tenant")


async def test_queue_full_and_cancel(stack):
    worker = await stack.worker("w1", max_running=1)
    worker.gate.clear()
    link = await stack.router(queue_limit=2)
    running = ask(link)
    await until(lambda: worker.running == 1)
    waiting = [ask(link), ask(link)]

    async def queued(count: int) -> bool:
        return (await stack.status()).queued == count

    await until(lambda: queued(2))
    end = await ask(link).end()
    assert (end.status.code, end.status.reason) == (8, "queue_full")
    assert end.status.retry_after_ms >= 1000
    told = next(d for d in end.record.decisions if d.subject == "admission")
    assert (told.choice, told.reasons["waiting_before"]) == ("refused", "2")
    waiting[0].request.cancel()
    await until(lambda: queued(1))
    running.request.cancel()
    await until(lambda: worker.cancelled == 1)
    worker.gate.set()
    await waiting[1].whole()
    assert waiting[1].tokens == undisturbed()
    assert waiting[1].decisions["admission"].choice == "queued"
    status = await stack.status()
    assert (status.queued, status.admitted, status.capacity) == (0, 0, 1)
    assert len(worker.requests) == 2


async def test_waiting_ends_in_time(stack):
    worker = await stack.worker("w1", max_running=1)
    worker.gate.clear()
    link = await stack.router(queue_timeout_s=0.5)
    held = ask(link)
    await until(lambda: worker.running == 1)
    end = await ask(link).end()
    assert (end.status.code, end.status.reason) == (8, "queue_timeout")
    end = await ask(link, timeout_s=0.2).end()
    assert end.status.reason == "deadline"
    worker.gate.set()
    await held.whole()
    assert (await stack.status()).queued == 0


@pytest.mark.parametrize("split", ["never", "always"])
async def test_a_flood_gives_way_and_goes_on(stack, split):
    """One tenant's chats hold all slots; another's four tokens come at once all the same, and the
    chat that gave its slot continues as if nothing had been."""
    worker = await stack.worker("d", "decode" if split == "always" else "both", max_running=2)
    if split == "always":
        await stack.worker("p", "prefill")
    link = await stack.router(split=split)
    worker.hold_after = 7
    flood = [ask(link, [n] * 64, tenant="flood") for n in range(3)]
    await until(lambda: [len(a.tokens) for a in flood].count(7) == 2)
    calm = await ask(link, max_tokens=4, tenant="calm").whole()
    assert calm.tokens == undisturbed(max_tokens=4)
    assert worker.cancelled == 1
    worker.hold_after = None  # for those that begin from now on
    ended = [asyncio.create_task(answer.whole()) for answer in flood]
    await until(lambda: sum(task.done() for task in ended) == 2)
    told = [task.result().decisions for task in ended if task.done()]
    recalls = [decisions["recall"] for decisions in told if "recall" in decisions]
    assert len(recalls) == 1
    assert (recalls[0].reasons["number"], recalls[0].reasons["tokens_so_far"]) == ("1", "7")
    assert all("failover" not in decisions for decisions in told)
    for n, (answer, task) in enumerate(zip(flood, ended, strict=True)):
        if task.done():
            assert answer.tokens == undisturbed([n] * 64)
            assert answer.usage.completion_tokens == 20
    went_on = [work for work in worker.requests if work.generated_prefix == 7]
    assert len(went_on) == 1
    assert went_on[0].sampling.max_tokens == 13
    next(a for a, task in zip(flood, ended, strict=True) if not task.done()).request.cancel()
    await asyncio.wait(ended)

    async def empty() -> bool:
        status = await stack.status()
        return (status.admitted, status.queued) == (0, 0)

    await until(empty)


async def test_two_routers_share_one_order(stack):
    worker = await stack.worker("w1", max_running=1)
    worker.gate.clear()
    links = [await stack.router(), await stack.router()]
    running = ask(links[0])
    await until(lambda: worker.running == 1)
    order = []

    async def finish(name: str, answer: Answered) -> None:
        await answer.whole()
        order.append(name)

    async def queued(count: int) -> bool:
        return (await stack.status()).queued == count

    tasks = []
    plan = [("a1", 0, "a"), ("a2", 1, "a"), ("b1", 1, "b"), ("a3", 0, "a"), ("b2", 0, "b")]
    for count, (name, router, tenant) in enumerate(plan, 1):
        answer = ask(links[router], tenant=tenant)
        tasks.append(asyncio.create_task(finish(name, answer)))
        await until(lambda count=count: queued(count))
    urgent = ask(links[1], tenant="a", priority=common_pb2.PRIORITY_HIGH)
    tasks.append(asyncio.create_task(finish("urgent", urgent)))
    await until(lambda: queued(6))
    worker.gate.set()
    await running.whole()
    await asyncio.gather(*tasks)
    # "acme" ran first; then the high lane, then the tenants by turns ("a" has been charged once).
    assert order == ["urgent", "b1", "a1", "b2", "a2", "a3"]


async def test_prefix_decides_until_the_worker_is_busy(stack):
    workers = [await stack.worker(f"w{i}") for i in range(3)]
    link = await stack.router()
    hashes = block_hashes(PROMPT, BLOCK_SIZE, tenant_salt("acme"))
    workers[1].tell(stored=hashes)
    await until(lambda: len(stack.hosts[0].service._workers.index) == len(hashes))
    answer = await ask(link).whole()
    assert answer.decisions["placement"].choice == "w1"
    assert answer.usage.cached_tokens == 192
    other = await ask(link, tenant="other").whole()
    assert other.usage.cached_tokens == 0
    workers[1].load.queued_prefill_tokens = 4000
    workers[1].tell()
    busy = await ask(link).whole()
    assert busy.decisions["placement"].choice != "w1"


async def test_a_burst_does_not_pile_up(stack):
    workers = [await stack.worker(f"w{i}") for i in range(4)]
    link = await stack.router()
    for worker in workers:
        worker.gate.clear()
    answers = [ask(link, [n] * 64) for n in range(16)]
    await until(lambda: sum(w.running for w in workers) == 16)
    assert [w.running for w in workers] == [4, 4, 4, 4]
    for worker in workers:
        worker.gate.set()
    for n, answer in enumerate(answers):
        assert (await answer.whole()).tokens == undisturbed([n] * 64)


async def test_cancel_reaches_the_workers(stack):
    prefill = await stack.worker("p", "prefill")
    decode = await stack.worker("d", "decode")
    prefill.gate.clear()
    link = await stack.router(split="always")
    answer = ask(link)
    await until(lambda: prefill.running == 1 and decode.running == 1)
    answer.request.cancel()
    await until(lambda: prefill.cancelled == 1 and decode.cancelled == 1)

    async def empty() -> bool:
        return (await stack.status()).admitted == 0

    await until(empty)


async def test_redis_dies_and_comes_back_mid_stream(namespace):
    with EmbeddedRedis() as server:
        async with stack_on(server.url, namespace) as stack:
            worker = await stack.worker("w1", max_running=2)
            worker.hold_after = 5
            link = await stack.router()
            running = [ask(link), ask(link)]
            await until(lambda: all(len(a.tokens) == 5 for a in running))
            waiting = ask(link)

            async def queued() -> bool:
                return (await stack.status()).queued == 1

            await until(queued)
            server.stop()
            during = ask(link)
            await until(lambda: stack.hosts[0].service._admission.away)
            assert not during.deltas
            running[0].request.cancel()
            await until(lambda: len(waiting.tokens) == 5)  # granted without Redis
            server.start()
            await until(lambda: not stack.hosts[0].service._admission.away)

            async def same_again() -> bool:
                status = await stack.status()
                return (status.admitted, status.queued) == (2, 1)

            await until(same_again)
            running[1].request.cancel()
            waiting.request.cancel()
            worker.hold_after = None
            await during.whole()
            assert during.tokens == undisturbed()
            assert during.decisions["admission"].reasons["order"] == "redis"


async def test_a_router_that_is_drained_ends_what_it_began(stack):
    """New requests are refused meanwhile, as ones to bring elsewhere."""
    worker = await stack.worker("w1")
    worker.gate.clear()
    link = await stack.router()
    answer = ask(link)
    await until(lambda: worker.running == 1)
    stopping = asyncio.create_task(stack.hosts[0].stop(grace_s=60))
    await until(lambda: link.state is LinkState.DRAINING)
    assert not stopping.done()
    worker.gate.set()
    await answer.whole()
    assert answer.tokens == undisturbed()
    await asyncio.wait_for(stopping, 10)


async def test_long_prompts_are_matched_too(stack):
    worker = await stack.worker("w1")
    link = await stack.router()
    prompt = list(range(5000))
    worker.tell(stored=block_hashes(prompt, BLOCK_SIZE, tenant_salt("acme")))
    await until(lambda: len(stack.hosts[0].service._workers.index) == 5000 // BLOCK_SIZE)
    answer = await ask(link, prompt, 2).whole()
    assert answer.usage.cached_tokens == 4992
    assert answer.decisions["split"].reasons["uncached_tokens"] == "8"


async def test_a_poison_request_ends_two_engines_and_no_other_request(stack):
    """All run together on the first worker; the second is alone until it has died of it too."""
    poison = 7777
    first = await stack.worker("w1", max_running=32)
    first.hold_after = 5
    link = await stack.router()
    prompts = [[n] * 40 for n in range(10)]
    innocent = [ask(link, prompt) for prompt in prompts]
    await until(lambda: all(len(a.tokens) == 5 for a in innocent))
    second = await stack.worker("w2", max_running=32)
    await until(lambda: len(stack.hosts[0].service._workers.ready(MODEL, CHECKPOINT)) == 2)
    first.poison = second.poison = poison
    first.gate.clear()
    second.load.queued_prefill_tokens = 100_000  # so that the poison goes to the first
    second.tell()
    await until(lambda: _of(stack, "w2").load.queued_prefill_tokens == 100_000)
    bad = ask(link, [poison] * 40)
    await until(second.engine_ended.is_set)
    third = await stack.worker("w3", max_running=32)
    third.poison = poison
    end = await bad.end()
    assert end.status.reason == "request_quarantined"
    assert end.status.stage == "worker"
    for prompt, answer in zip(prompts, innocent, strict=True):
        assert (await answer.whole()).tokens == undisturbed(prompt)
    assert not third.engine_ended.is_set()
    assert {w.alone_tokens for w in first.requests} == {0}
    assert PROOF_TOKENS in {w.alone_tokens for w in second.requests}

    again = await ask(link, [poison] * 40).end()
    assert again.status.reason == "request_quarantined"
    assert all(w.prompt_token_ids[0] != poison for w in third.requests)
    assert (await stack.status()).admitted == 0
    told = metrics.quarantined.labels("refused")._value.get()
    assert told >= 1


async def test_the_poison_of_one_router_convicts_nobody_of_another(stack, monkeypatch):
    """Each router's suspect believes itself alone on the worker that is left."""
    poison = 7777
    first = await stack.worker("w1", max_running=32)
    second = await stack.worker("w2", max_running=32)
    second.load.queued_prefill_tokens = 100_000  # so that all go to the first
    first.gate.clear()
    second.gate.clear()
    links = [await stack.router(), await stack.router()]
    prompts = [[n] * 40 for n in range(3)]
    innocent = [ask(links[0], prompt) for prompt in prompts]
    await until(lambda: first.running == len(prompts))
    first.poison = second.poison = poison
    other = stack.hosts[1].service._workers
    quarantine = stack.hosts[1].service._router.quarantine
    monkeypatch.setattr(quarantine, "free", lambda worker: second.running > 0)
    bad = ask(links[1], [poison] * 40)
    await until(lambda: second.running >= 1)  # one of the innocent came first
    other.poke()
    await until(lambda: second.running == 2 or second.engine_ended.is_set())
    third = await stack.worker("w3", max_running=32)
    second.gate.set()
    assert (await bad.end()).status.reason == "request_quarantined"
    for prompt, answer in zip(prompts, innocent, strict=True):
        assert (await answer.whole()).tokens == undisturbed(prompt)
    assert not third.engine_ended.is_set()


def _of(stack: Stack, id: str) -> Any:
    return next(w for w in stack.hosts[0].service._workers.all() if w.id == id)


async def test_a_dead_engine_is_the_cause_however_the_hand_over_tells_it(stack):
    """The decode worker hears only of a broken push, and may be first to say so."""
    prefill = await stack.worker("p", "prefill")
    decode = await stack.worker("d", "decode")
    link = await stack.router(split="always")
    prefill.gate.clear()
    answer = ask(link)
    await until(lambda: prefill.running == 1 and decode.running == 1)
    decode.break_push()
    await until(lambda: decode.running == 0)
    prefill.end_engine()
    await answer.whole()
    assert answer.tokens == undisturbed()
    told = answer.decisions["failover"].reasons
    assert (told["lost"], told["cause"], told["engines_ended"]) == ("p", "engine_died", "1")
    assert answer.decisions["placement"].choice == "d"


async def test_a_decode_worker_that_gives_no_token_after_the_hand_over_is_left(stack):
    prefill = await stack.worker("p", "prefill")
    decode = await stack.worker("d", "decode")
    decode.loses_commits = True
    link = await stack.router(split="always", stall_timeout_s=1.0)
    answer = await ask(link).whole()
    assert answer.tokens == undisturbed()
    told = answer.decisions["failover"].reasons
    assert (told["cause"], told["tokens_so_far"]) == ("kv_transfer", "1")
    assert len(prefill.requests) == 1
    assert _of(stack, "d").breaker.failed_share > 0
    assert _of(stack, "p").breaker.failed_share == 0  # its part was confirmed


async def test_a_worker_that_fails_its_requests_is_left_alone(stack, monkeypatch):
    monkeypatch.setattr(breaker, "PROBE_S", 600.0)
    bad, good = await stack.worker("bad"), await stack.worker("good")
    bad.fail_with = PenstockError(grpc.StatusCode.INTERNAL, "a bug", stage="worker")
    good.load.queued_prefill_tokens = 50_000  # the bad one looks the better choice
    good.tell()
    link = await stack.router()
    await until(lambda: _of(stack, "good").load.queued_prefill_tokens == 50_000)
    ends = [await ask(link).end() for _ in range(3)]
    assert [end.status.code for end in ends] == [grpc.StatusCode.INTERNAL.value[0]] * 3
    assert len(bad.requests) == 3
    answer = await ask(link).whole()
    assert answer.decisions["placement"].choice == "good"
    assert answer.decisions["breaker"].reasons["bad"].startswith("open, 3 of its last 3")
    seen = {w.id: w.breaker for w in (await stack.status()).workers}
    assert seen == {"bad": "open", "good": "closed"}

    worker = _of(stack, "bad")

    worker.breaker._since -= 600  # its pause is over
    assert (await ask(link).end()).status.code == 0, "a probe costs its client nothing"
    assert len(bad.requests) == 4
    bad.fail_with = None
    worker.breaker._since -= 600
    assert (await ask(link).whole()).decisions["placement"].choice == "bad"
    assert worker.breaker.state.value == "closed"


async def test_requests_own_faults_leave_the_breaker_closed(stack):
    bad, _ = await stack.worker("bad"), await stack.worker("good")
    bad.fail_with = invalid("too long", "messages", stage="worker")
    link = await stack.router()
    for _ in range(8):
        await ask(link).end()
    assert _of(stack, "bad").breaker.failed_share == 0


async def test_a_worker_that_refused_is_left_alone_for_a_moment(stack, monkeypatch):
    monkeypatch.setattr(breaker, "PROBE_S", 600.0)
    bad, good = await stack.worker("bad"), await stack.worker("good")
    refusal = PenstockError(
        grpc.StatusCode.RESOURCE_EXHAUSTED, "full", stage="worker", reason="too_many_requests"
    )
    bad.fail_with = refusal
    good.load.queued_prefill_tokens = 50_000
    good.tell()
    link = await stack.router()
    await until(lambda: _of(stack, "good").load.queued_prefill_tokens == 50_000)
    for _ in range(3):
        assert (await ask(link).whole()).tokens == undisturbed()
    assert len(bad.requests) == 1


async def test_an_only_worker_that_failed_is_tried_again_soon(stack, monkeypatch):
    monkeypatch.setattr(breaker, "PROBE_S", 0.05)
    worker = await stack.worker("w1")
    worker.fail_with = unavailable("no room", stage="worker", reason="broken_off")
    link = await stack.router()
    answer = ask(link)
    await until(lambda: len(worker.requests) >= 2)
    _of(stack, "w1").breaker._pause_s = 600.0  # where there are others
    worker.fail_with = None
    assert (await answer.whole()).tokens == undisturbed()


async def test_cached_tokens_are_those_of_the_first_placement(stack):
    """After a failover the new worker's cache holds nothing of the prompt, or all of it."""
    first = await stack.worker("w1")
    first.hold_after = 3
    hashes = block_hashes(PROMPT, BLOCK_SIZE, tenant_salt("acme"))
    first.tell(stored=hashes[:4])
    link = await stack.router()
    await until(lambda: len(stack.hosts[0].service._workers.index) == 4)
    answer = ask(link)
    await until(lambda: len(answer.tokens) == 3)
    assert answer.deltas[0].usage.cached_tokens == 64
    second = await stack.worker("w2")
    second.tell(stored=hashes)
    await until(lambda: len(stack.hosts[0].service._workers.index) == len(hashes))
    await first.kill()
    await answer.whole()
    assert answer.tokens == undisturbed()
    assert answer.usage.cached_tokens == 64


async def test_an_answer_is_whole_once_its_last_token_came(stack):
    """Whatever becomes of the link before the request's end arrives."""
    worker = await stack.worker("w1")
    worker.hold_end = True
    link = await stack.router()
    answer = await ask(link).whole()
    assert answer.tokens == undisturbed()
    assert "failover" not in answer.decisions
    assert len(worker.requests) == 1
    assert (await stack.status()).admitted == 0
