"""The router as its callers see it: real links and Redis, fake workers (tests/support)."""

import asyncio

import pytest

from protos import common_pb2
from services.common.block_hash import block_hashes, tenant_salt
from services.common.errors import invalid
from services.common.link import LinkState
from services.common.served_models import Checkpoint, entry, forget
from tests.support.block_counts import known
from tests.support.fake_worker import (
    BLOCK_SIZE,
    CHECKPOINT,
    MODEL,
)
from tests.support.prompts import prompt_of
from tests.support.router_stack import PROMPT, Answered, ask, undisturbed
from tests.support.waiting import until


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
    works = [w for w in prefill.requests + decode.requests if len(prompt_of(w)) == 205]
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
        await until(lambda n=n, index=index: known(index) == 2 * (n + 1))
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
    await forget(stack.redis, stack.hosts[0].settings, lambda one: one.model == "later")

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


async def test_cached_tokens_are_those_of_the_first_placement(stack):
    """After a failover the new worker's cache holds nothing of the prompt, or all of it."""
    first = await stack.worker("w1")
    first.hold_after = 3
    hashes = block_hashes(PROMPT, BLOCK_SIZE, tenant_salt("acme"))
    first.tell(stored=hashes[:4])
    link = await stack.router()
    await until(lambda: known(stack.hosts[0].service._workers.index) == 4)
    answer = ask(link)
    await until(lambda: len(answer.tokens) == 3)
    assert answer.deltas[0].usage.cached_tokens == 64
    second = await stack.worker("w2")
    second.tell(stored=hashes)
    await until(lambda: known(stack.hosts[0].service._workers.index) == len(hashes))
    await first.kill()
    await answer.whole()
    assert answer.tokens == undisturbed()
    assert answer.usage.cached_tokens == 64


async def test_requests_with_an_adapter_go_where_it_is(stack):
    """And to its own prefix, wherever that of others lies."""
    plain, first, second = [await stack.worker(f"w{i}") for i in range(3)]
    first.tell_adapters("pirate")
    link = await stack.router()
    salt = tenant_salt("acme")
    plain.tell(stored=block_hashes(PROMPT, BLOCK_SIZE, salt))
    for _ in range(3):
        assert (await ask(link, checkpoint="pirate").whole()).tokens == undisturbed()
    assert len(first.requests) == 3
    assert {work.checkpoint for work in first.requests} == {"pirate"}
    own = block_hashes(PROMPT, BLOCK_SIZE, salt, "pirate")
    first.tell(evicted=own)
    second.tell_adapters("pirate", "lawyer")
    second.tell(stored=own)
    seen = stack.hosts[0].service._workers
    await until(
        lambda: {w.id: len(w.holder.blocks) for w in seen.all()} == {"w0": 12, "w1": 0, "w2": 12}
    )
    answer = await ask(link, checkpoint="pirate").whole()
    assert answer.decisions["placement"].choice == "w2"
    assert answer.decisions["split"].reasons["uncached_tokens"] == "8"
    assert (await ask(link).whole()).decisions["placement"].choice == "w0"


async def test_a_dropped_adapters_requests_are_tokenized_anew(stack):
    worker = await stack.worker("w")
    worker.tell_adapters("pirate")
    link = await stack.router()
    assert (await ask(link, checkpoint="pirate").whole()).tokens == undisturbed()
    worker.tell_adapters()
    (seen,) = stack.hosts[0].service._workers.all()
    await until(lambda: not seen.adapters)
    end = await ask(link, checkpoint="pirate").request.ended()
    assert (end.status.reason, end.status.stage) == ("checkpoint_replaced", "router")


async def test_who_loses_an_adapters_worker_goes_on_with_another_that_has_it(stack):
    workers = [await stack.worker(f"w{i}") for i in range(3)]
    for worker in workers[:2]:
        worker.tell_adapters("pirate")
        worker.hold_after = 3
    link = await stack.router()
    answer = ask(link, checkpoint="pirate")
    await until(lambda: len(answer.tokens) == 3)
    lost, other = workers[:2] if workers[0].running else workers[1::-1]
    other.hold_after = None
    await lost.kill()
    assert (await answer.whole()).tokens == undisturbed()
    assert [len(worker.requests) for worker in (other, workers[2])] == [1, 0]


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
