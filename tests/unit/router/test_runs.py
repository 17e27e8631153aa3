"""A placed request on its workers, step by step: what they are asked, what is passed on and when,
and that nothing of it is left behind."""

import asyncio
import time
from typing import Any, cast

import grpc
import pytest

from protos import common_pb2
from protos.common_pb2 import FINISH_LENGTH, FINISH_PREFILL_DONE, FINISH_STOP
from protos.router_pb2 import GenerateRequest
from protos.worker_pb2 import WorkRequest
from services.common.errors import PenstockError
from services.common.packed_ids import pack
from services.router import leg, legs
from services.router.answer import Answer
from services.router.breaker import State
from services.router.leg import Way, WorkerLostError
from services.router.placement import Plan
from services.router.workers import Worker
from tests.support.prompts import prompt_of
from tests.support.scripted_workers import CHECKPOINT, Call, Opened, Pool
from tests.support.waiting import until

PROMPT = list(range(40))
OK = grpc.StatusCode.OK
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
INTERNAL = grpc.StatusCode.INTERNAL


class Run:
    """A request that runs on `prefill` and `decode` (or there alone)."""

    def __init__(
        self,
        decode: Worker,
        prefill: Worker | None = None,
        *,
        max_tokens: int = 5,
        so_far: int = 0,
        generated: int = 0,
        progress_s: float = 30.0,
        alone_tokens: int = 0,
        pooling: common_pb2.Pooling | None = None,
    ) -> None:
        caller = common_pb2.Caller(request_id="r", tenant="acme", priority=2, weight=1)
        request = GenerateRequest(
            caller=caller,
            model="m",
            checkpoint=CHECKPOINT,
            prompt_token_ids=pack(PROMPT),
            sampling=common_pb2.Sampling(max_tokens=max_tokens, seed=7),
            generated_prefix=generated,
            pooling=pooling,
        )
        self.call = Call()
        self.answer = Answer(request, cast(Any, self.call))
        self.answer.tokens.extend(range(900, 900 + so_far))  # by a worker that was lost
        self.recalled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        deadline = time.monotonic() + 60
        self.way = Way(deadline, "00-trace", common_pb2.Record(), progress_s, self.recalled)
        self.way.alone_tokens = alone_tokens
        plan = Plan(decode, prefill, 16, 24, 0.1, 0.01, 1.0)
        self.task = asyncio.create_task(legs.run(plan, self.answer, self.way))

    async def over(self) -> None:
        async with asyncio.timeout(5):
            await self.task

    @property
    def spans(self) -> list[str]:
        return [span.name for span in self.way.record.spans]


@pytest.fixture
async def pool() -> Pool:
    return Pool()


async def only(pool: Pool, id: str) -> Opened:
    await until(lambda: bool(pool.opened[id]))
    (request,) = pool.opened[id]
    return request


def nothing_left(*workers: Worker) -> bool:
    return all(not w.unseen for w in workers)


# ---- on one worker ------------------------------------------------------------------------------


async def test_what_an_unsplit_worker_is_asked(pool: Pool) -> None:
    """The rest of the request: all tokens so far are prompt, those of another router too."""
    worker = pool.worker("w")
    run = Run(worker, so_far=2, generated=3, alone_tokens=4)
    request = await only(pool, "w")
    assert request.work == WorkRequest(
        caller=run.answer.request.caller,
        model="m",
        checkpoint=CHECKPOINT,
        prompt_token_ids=pack([*PROMPT, 900, 901]),
        generated_prefix=5,
        sampling=common_pb2.Sampling(max_tokens=3, seed=7),
        mode=WorkRequest.UNSPLIT,
        alone_tokens=4,
    )
    assert (request.deadline, request.traceparent) == (run.way.deadline, "00-trace")
    assert [sent.prefill_tokens for sent in worker.unseen] == [24]
    assert run.answer.request.sampling.max_tokens == 5, "the request itself stays as it is"
    assert prompt_of(run.answer.request) == PROMPT
    run.task.cancel()
    await asyncio.wait([run.task])
    assert pool.log == ["stop w"]
    assert nothing_left(worker)
    assert (worker.breaker.state, worker.breaker.failed_share) == (State.CLOSED, 0)


async def test_an_answer_on_one_worker(pool: Pool) -> None:
    worker = pool.worker("w")
    run = Run(worker, max_tokens=3)
    request = await only(pool, "w")
    request.give(1, cached=32)
    assert nothing_left(worker), "its load shows the request from now on"
    assert run.call.deltas[0].usage.cached_tokens == 32
    request.give(2)
    request.give(3, finish=FINISH_LENGTH)
    request.end()
    await run.over()
    assert run.call.tokens == [1, 2, 3]
    assert run.call.deltas[-1].usage.completion_tokens == 3
    assert pool.log == []
    assert run.spans == ["on w"]
    assert worker.breaker.describe() == "closed, 0 of its last 1 requests failed"


async def test_numbers_are_an_answer_in_one_delta(pool: Pool) -> None:
    """Begun anew after a loss: of it nothing was given out."""
    wanted = common_pb2.Pooling(kind=common_pb2.Pooling.MEAN, dimensions=3)
    run = Run(pool.worker("w"), max_tokens=1, pooling=wanted)
    request = await only(pool, "w")
    assert (request.work.pooling, request.work.generated_prefix) == (wanted, 0)
    request.give(finish=FINISH_STOP, pooled=b"abcd")
    request.end()
    await run.over()
    assert run.answer.finished
    (delta,) = run.call.deltas
    assert delta.pooled == b"abcd"
    assert (delta.usage.prompt_tokens, delta.usage.completion_tokens) == (len(PROMPT), 0)


async def test_cached_tokens_are_the_plans_until_the_worker_says_so(pool: Pool) -> None:
    run = Run(pool.worker("w"))
    request = await only(pool, "w")
    request.give(1)
    assert run.call.deltas[0].usage.cached_tokens == 16
    run.task.cancel()


async def test_a_later_workers_cache_says_nothing_of_the_answer(pool: Pool) -> None:
    run = Run(pool.worker("w"), so_far=2)
    run.answer.cached_tokens = 8
    request = await only(pool, "w")
    request.give(1, cached=32)
    request.give(2, 3, finish=FINISH_LENGTH)
    request.end()
    await run.over()
    assert run.call.deltas[-1].usage.cached_tokens == 8


async def test_what_stands_still_after_its_last_token_is_stopped(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leg, "SETTLE_S", 0.01)
    worker = pool.worker("w")
    run = Run(worker, max_tokens=1)
    request = await only(pool, "w")
    request.ends_when_stopped = False
    request.give(1, finish=FINISH_LENGTH)
    await run.over()
    assert pool.log == ["stop w", "cancel w"]
    assert worker.breaker.state is State.CLOSED


async def test_a_recalled_request_leaves_its_worker_and_goes_on_later(pool: Pool) -> None:
    worker = pool.worker("w")
    run = Run(worker)
    request = await only(pool, "w")
    request.give(1)
    run.recalled.set_result(None)
    await run.over()
    assert pool.log == ["stop w"]
    assert run.spans == ["on w"]
    assert (run.answer.tokens, run.answer.finished) == ([1], False)
    assert (worker.breaker.state, worker.breaker.failed_share) == (State.CLOSED, 0)
    request.give(2)
    assert run.call.tokens == [1], "what comes late belongs to nobody"


@pytest.mark.parametrize(
    ("code", "reason", "cause"),
    [
        (OK, "", "broken_off"),  # an end without a last token
        (UNAVAILABLE, "engine_died", "engine_died"),
        (UNAVAILABLE, "", "unavailable"),
        (grpc.StatusCode.CANCELLED, "", "cancelled"),  # not by this side
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "too_many_requests", "too_many_requests"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "link_congested", "link_congested"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "kv_exhausted", None),
        (INTERNAL, "", None),
        (grpc.StatusCode.INVALID_ARGUMENT, "too_long", None),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "deadline", None),
    ],
)
async def test_which_ends_go_on_elsewhere(
    pool: Pool, code: grpc.StatusCode, reason: str, cause: str | None
) -> None:
    """`cause` None: it is the request's end, as the worker told it."""
    worker = pool.worker("w")
    run = Run(worker)
    (await only(pool, "w")).end(code, reason)
    with pytest.raises(WorkerLostError if cause else PenstockError) as raised:
        await run.over()
    if isinstance(raised.value, WorkerLostError):
        assert (raised.value.cause, raised.value.worker) == (cause, worker)
        assert raised.value.error.stage == "worker"
    else:
        assert cast(PenstockError, raised.value).code is code
        assert cast(PenstockError, raised.value).stage == "worker"
    assert nothing_left(worker)


@pytest.mark.parametrize(("probe", "goes_on"), [(True, True), (False, False)])
@pytest.mark.parametrize("code", [INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS])
async def test_a_probe_does_not_pay_for_its_worker(
    pool: Pool, code: grpc.StatusCode, probe: bool, goes_on: bool
) -> None:
    worker = pool.worker("w")
    if probe:
        worker.breaker.began().lost()
    run = Run(worker)
    (await only(pool, "w")).end(code)
    with pytest.raises(WorkerLostError if goes_on else PenstockError):
        await run.over()
    assert worker.breaker.failed_share == 1


# ---- on two -------------------------------------------------------------------------------------


async def split(pool: Pool, **options: Any) -> tuple[Run, Opened, Opened]:
    prefill, decode = pool.worker("p", "prefill"), pool.worker("d", "decode", host="far")
    run = Run(decode, prefill, **options)
    return run, await only(pool, "p"), await only(pool, "d")


async def test_what_the_two_workers_are_asked(pool: Pool) -> None:
    run, first, then = await split(pool, so_far=1)
    workers = {w.id: w for w in pool.workers.all()}
    assert (first.work.mode, then.work.mode) == (WorkRequest.PREFILL, WorkRequest.DECODE)
    assert first.work.transfer_id == then.work.transfer_id != ""
    target = first.work.push_to
    assert (target.address, target.host_id) == (workers["d"].replica.address, "far")
    assert not then.work.HasField("push_to")
    for work in (first.work, then.work):
        assert prompt_of(work) == [*PROMPT, 900]
        assert (work.generated_prefix, work.sampling.max_tokens) == (1, 4)
    (queued,), (reserved,) = workers["p"].unseen, workers["d"].unseen
    assert (queued.prefill_tokens, reserved.prefill_tokens) == (24, 0)
    assert queued.news_left > 1000 > reserved.news_left, "it waits for its reservation"
    run.task.cancel()
    await asyncio.wait([run.task])
    assert sorted(pool.log) == ["stop d", "stop p"]
    assert nothing_left(*workers.values())


@pytest.mark.parametrize("so_far", [0, 2])
async def test_the_first_token_leaves_before_those_after_it(pool: Pool, so_far: int) -> None:
    """Also when tokens of a worker that was lost had left before."""
    run, first, then = await split(pool, so_far=so_far)
    then.give(2)
    then.give(3)
    assert run.call.tokens == []
    first.give(1)
    assert run.call.tokens == [1, 2, 3]
    if not so_far:
        assert run.call.deltas[0].usage.cached_tokens == 16, "as planned, until it is told"
    first.give(finish=FINISH_PREFILL_DONE, cached=8)
    assert run.call.tokens == [1, 2, 3]
    first.end()
    if so_far == 0:
        then.give(4)
        then.give(5, finish=FINISH_LENGTH)
    else:
        then.give(4, finish=FINISH_STOP)
    then.end()
    await run.over()
    assert run.call.tokens == [1, 2, 3, 4, 5][: 5 - so_far // 2]
    assert [d.finish for d in run.call.deltas[:-1]] == [0] * (len(run.call.deltas) - 1)
    usage = run.call.deltas[-1].usage
    assert usage.cached_tokens == (0 if so_far else 8)
    assert sorted(run.spans) == ["on d", "on p"]


async def test_a_prefill_worker_lost_behind_its_token_ends_nothing(pool: Pool) -> None:
    """Though the decode worker's token came first and had to wait for it."""
    run = Run(pool.worker("d", "decode"), pool.worker("p", "prefill"), max_tokens=3)
    first, then = await only(pool, "p"), await only(pool, "d")
    then.give(2)
    first.give(1)
    first.end(UNAVAILABLE, "peer_lost")
    for _ in range(5):
        await asyncio.sleep(0)
    then.give(3, finish=FINISH_LENGTH)
    then.end()
    await run.over()
    assert run.call.tokens == [1, 2, 3]


async def test_a_split_that_went_well_is_both_workers_success(pool: Pool) -> None:
    """Neither is stopped: each has a moment to end by itself, and to say what it did."""
    decode, prefill = pool.worker("d", "decode"), pool.worker("p", "prefill")
    run = Run(decode, prefill, max_tokens=2)
    first, then = await only(pool, "p"), await only(pool, "d")
    first.give(1)
    first.give(finish=FINISH_PREFILL_DONE)
    first.end()
    then.give(2, finish=FINISH_LENGTH)
    for _ in range(5):
        await asyncio.sleep(0)
    assert pool.log == []
    then.end()
    await run.over()
    assert [list(delta.token_ids) for delta in run.call.deltas] == [[1], [2]], "and nothing empty"
    assert sorted(run.spans) == ["on d", "on p"]
    for worker in (decode, prefill):
        assert worker.breaker.describe() == "closed, 0 of its last 1 requests failed"


async def test_a_first_token_that_comes_with_the_hand_overs_end_is_one_of_many(pool: Pool) -> None:
    run, first, then = await split(pool)
    first.give(1, finish=FINISH_PREFILL_DONE, cached=8, logprob=-0.5)
    assert (run.call.tokens, run.call.deltas[0].finish) == ([1], 0)
    assert [one.logprob for one in run.call.deltas[0].logprobs] == [-0.5]
    assert run.call.deltas[0].usage.cached_tokens == 8
    assert not run.answer.finished
    then.give(2, finish=FINISH_STOP)
    await run.over()
    assert run.call.tokens == [1, 2]


async def test_a_first_token_that_is_the_last_needs_no_decoding(pool: Pool) -> None:
    run, first, _ = await split(pool)
    first.give(1, finish=FINISH_STOP)
    first.end()
    await run.over()
    assert pool.log == ["stop d"]
    assert (run.call.tokens, run.answer.finished) == ([1], True)


async def test_an_answer_ends_with_its_last_token_though_the_prefill_goes_on(pool: Pool) -> None:
    run, first, then = await split(pool, max_tokens=2)
    first.give(1)
    then.give(2, finish=FINISH_LENGTH)
    then.end()
    await run.over()
    assert pool.log == ["stop p"]
    assert sorted(run.spans) == ["on d", "on p"]


@pytest.mark.parametrize("of", ["p", "d"])
@pytest.mark.parametrize(
    ("code", "reason", "cause"),
    [(UNAVAILABLE, "engine_died", "engine_died"), (INTERNAL, "", None)],
)
async def test_the_failure_of_one_end_stops_the_other(
    pool: Pool, of: str, code: grpc.StatusCode, reason: str, cause: str | None
) -> None:
    run, first, then = await split(pool)
    (first if of == "p" else then).end(code, reason)
    with pytest.raises(WorkerLostError if cause else PenstockError) as raised:
        await run.over()
    if isinstance(raised.value, WorkerLostError):
        assert (raised.value.cause, raised.value.worker.id) == (cause, of)
    assert pool.log == ["stop d" if of == "p" else "stop p"]
    assert nothing_left(*pool.workers.all())


async def test_why_a_hand_over_broke_is_waited_for(pool: Pool) -> None:
    """The decode worker hears of it first, and only that it broke."""
    run, first, then = await split(pool)
    then.end(UNAVAILABLE, "kv_transfer")
    for _ in range(5):
        await asyncio.sleep(0)
    first.end(UNAVAILABLE, "engine_died")
    with pytest.raises(WorkerLostError) as raised:
        await run.over()
    assert (raised.value.cause, raised.value.worker.id) == ("engine_died", "p")


async def test_both_ends_are_stopped_before_either_is_waited_for(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leg, "SETTLE_S", 0.01)
    run, first, then = await split(pool)
    first.ends_when_stopped = then.ends_when_stopped = False
    run.recalled.set_result(None)
    await run.over()
    order = list(dict.fromkeys(pool.log))
    assert {*order[:2]} == {"stop p", "stop d"}
    assert {*order[2:]} == {"cancel p", "cancel d"}
    assert [w.breaker.state for w in pool.workers.all()] == [State.CLOSED] * 2


async def test_two_ends_without_a_last_token_are_broken_off(pool: Pool) -> None:
    run, first, then = await split(pool)
    first.give(1)
    first.end()
    then.give(2)
    then.end()
    with pytest.raises(WorkerLostError) as raised:
        await run.over()
    assert (raised.value.cause, raised.value.worker.id) == ("broken_off", "d")
    assert run.call.tokens == [1, 2]


async def test_a_recall_in_the_middle_of_a_hand_over(pool: Pool) -> None:
    run, first, _ = await split(pool)
    first.give(1)
    run.recalled.set_result(None)
    await run.over()
    assert sorted(pool.log) == ["stop d", "stop p"]
    assert (run.answer.tokens, run.answer.finished) == ([1], False)


async def test_a_worker_that_steps_and_gives_no_token_is_left_and_blamed(pool: Pool) -> None:
    """From the hand-over on, and only if it takes two steps: a still one is its link's to judge."""
    run, first, _ = await split(pool, progress_s=0.02)
    decode = next(w for w in pool.workers.all() if w.id == "d")
    cast(Any, decode.link).vitals.steps = 50  # before the hand-over
    done, _ = await asyncio.wait([run.task], timeout=0.06)
    assert not done, "the prompt may take as long as it likes"
    first.give(1)
    first.end()
    done, _ = await asyncio.wait([run.task], timeout=0.06)
    assert not done, "it has not stepped"
    cast(Any, decode.link).vitals.steps = 51
    done, _ = await asyncio.wait([run.task], timeout=0.06)
    assert not done, "that step may have begun before"
    cast(Any, decode.link).vitals.steps = 52
    with pytest.raises(WorkerLostError) as raised:
        await run.over()
    assert (raised.value.cause, raised.value.worker.id) == ("kv_transfer", "d")
    shares = {w.id: w.breaker.failed_share for w in pool.workers.all()}
    assert shares == {"p": 0, "d": 1}
    assert pool.log == ["stop d"]


async def test_tokens_after_the_hand_over_may_be_as_slow_as_they_are(pool: Pool) -> None:
    run, first, then = await split(pool, progress_s=0.02, max_tokens=3)
    decode = next(w for w in pool.workers.all() if w.id == "d")
    first.give(1)
    then.give(2)
    first.end()
    cast(Any, decode.link).vitals.steps = 99
    done, _ = await asyncio.wait([run.task], timeout=0.06)
    assert not done
    then.give(3, finish=FINISH_LENGTH)
    await run.over()
