"""What the router does when workers are lost, stall or fail, and when Redis goes."""

import time
from typing import Any

import grpc
import pytest

from protos import common_pb2
from services.common.embedded_redis import EmbeddedRedis
from services.common.errors import PenstockError, invalid, unavailable
from services.router import breaker, metrics, pipeline
from services.router.quarantine import PROOF_TOKENS
from tests.support.fake_worker import (
    CHECKPOINT,
    MODEL,
)
from tests.support.prompts import prompt_of
from tests.support.router_stack import Stack, ask, stack_on, undisturbed
from tests.support.waiting import until


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
    assert all(prompt_of(w)[0] != poison for w in third.requests)
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


async def test_a_worker_that_may_be_tried_just_behind_a_look_is_not_waited_for_in_vain(
    stack, monkeypatch
):
    """The pause of the only worker ends right after the router found that it does not yet."""
    monkeypatch.setattr(breaker, "PROBE_S", 0.05)
    worker = await stack.worker("w1")
    worker.fail_with = unavailable("no room", stage="worker", reason="broken_off")
    link = await stack.router()
    workers, its_breaker = stack.hosts[0].service._workers, _of(stack, "w1").breaker
    looked = workers.sound

    def looked_before_the_end(model: str, checkpoint: str) -> Any:
        found = looked(model, checkpoint)
        if not found:
            worker.fail_with = None
            monkeypatch.setattr(its_breaker, "_clock", lambda: time.monotonic() + 1)
        return found

    monkeypatch.setattr(workers, "sound", looked_before_the_end)
    answer = ask(link)
    await until(lambda: bool(answer.tokens))
    assert (await answer.whole()).tokens == undisturbed()
