"""Who waits at the router, who gives way, and where a request is placed."""

import asyncio

import pytest

from protos import common_pb2
from services.common.block_hash import block_hashes, tenant_salt
from tests.support.block_counts import known
from tests.support.fake_worker import (
    BLOCK_SIZE,
)
from tests.support.router_stack import PROMPT, Answered, ask, undisturbed
from tests.support.waiting import until


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


@pytest.mark.parametrize("tenant", ["acme", "calm"])
async def test_the_low_lane_stands_aside_and_goes_on(stack, tenant):
    """All slots hold lines of a batch. A chat begins at once, also one of their own tenant, and
    the line that gave its slot answers as if nothing had been."""
    worker = await stack.worker("w1", max_running=2)
    link = await stack.router(recall_after_s=60.0)  # as for tenants, that would take a minute
    worker.hold_after = 7
    low = common_pb2.PRIORITY_LOW
    lines = [ask(link, [n] * 64, priority=low) for n in range(2)]
    await until(lambda: [len(line.tokens) for line in lines] == [7, 7])
    worker.hold_after = None  # for those that begin from now on
    chat = await ask(link, max_tokens=4, tenant=tenant).whole()
    assert chat.tokens == undisturbed(max_tokens=4)
    ended = [asyncio.create_task(line.whole()) for line in lines]
    await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
    [n] = [n for n, task in enumerate(ended) if task.done()]
    assert lines[n].tokens == undisturbed([n] * 64)
    assert lines[n].usage.completion_tokens == 20
    told = ended[n].result().decisions["recall"]
    assert (told.reasons["number"], told.reasons["tokens_so_far"]) == ("1", "7")
    assert len(lines[1 - n].tokens) == 7, "one line for one chat"
    lines[1 - n].request.cancel()
    await asyncio.wait(ended)


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
    await until(lambda: known(stack.hosts[0].service._workers.index) == len(hashes))
    answer = await ask(link).whole()
    assert answer.decisions["placement"].choice == "w1"
    assert answer.usage.cached_tokens == 192
    other = await ask(link, tenant="other").whole()
    assert other.usage.cached_tokens == 0
    workers[1].load.queued_prefill_tokens = 4000
    workers[1].tell()
    seen = stack.hosts[0].service._workers
    await until(lambda: any(w.load.queued_prefill_tokens == 4000 for w in seen.all()))
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


async def test_long_prompts_are_matched_too(stack):
    worker = await stack.worker("w1")
    link = await stack.router()
    prompt = list(range(5000))
    worker.tell(stored=block_hashes(prompt, BLOCK_SIZE, tenant_salt("acme")))
    await until(lambda: known(stack.hosts[0].service._workers.index) == 5000 // BLOCK_SIZE)
    answer = await ask(link, prompt, 2).whole()
    assert answer.usage.cached_tokens == 4992
    assert answer.decisions["split"].reasons["uncached_tokens"] == "8"
