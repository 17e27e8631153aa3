"""What the end of a leg says, why a split failed, and where a request goes that finds no sound
worker."""

import asyncio
import math
import time
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from protos import common_pb2, router_pb2, worker_pb2
from services.common.errors import PenstockError, unavailable
from services.common.link import End
from services.common.packed_ids import pack
from services.router import legs
from services.router.breaker import Breaker, State
from services.router.leg import HAND_OVER, Way, WorkerLostError
from services.router.leg import Leg as RealLeg
from services.router.pipeline import _some_workers

WORKER: Any = None


class Leg:
    def __init__(self, failure: WorkerLostError | PenstockError | None) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended.set_result(None)
        self._failure = failure
        self.blamed = 0
        self.deltas = 0
        self.worker: Any = WORKER

    def failure(self) -> WorkerLostError | PenstockError | None:
        return self._failure

    async def settle(self) -> None: ...

    def blame(self) -> None:
        self.blamed += 1


def lost(reason: str) -> WorkerLostError:
    return WorkerLostError(WORKER, unavailable("lost", stage="worker", reason=reason))


@pytest.mark.parametrize(
    ("own", "others", "cause", "blamed"),
    [
        (HAND_OVER, HAND_OVER, HAND_OVER, 1),  # either may be at fault
        (HAND_OVER, None, HAND_OVER, 1),
        (HAND_OVER, "engine_died", "engine_died", 0),
        ("peer_lost", "engine_died", "peer_lost", 0),
    ],
)
async def test_of_two_ends_the_one_that_died_is_why(
    own: str, others: str | None, cause: str, blamed: int
) -> None:
    leg, other = Leg(lost(own)), Leg(lost(others) if others else None)
    why = await legs._cause(lost(own), cast(Any, leg), cast(Any, other))
    assert isinstance(why, WorkerLostError)
    assert why.cause == cause
    assert (leg.blamed, other.blamed) == (blamed, blamed)


@pytest.mark.parametrize("suspected", [False, True])
async def test_after_the_patience_any_ready_worker_is_better_than_none(suspected: bool) -> None:
    """Though none is sound, or each has a suspect: an error helps nobody."""
    ready = [object()]
    workers = SimpleNamespace(
        ready=lambda *_: ready,
        sound=lambda *_: ready if suspected else [],
        next_try_s=lambda *_: math.inf,
        replaced=not_replaced,
        models=lambda: {"m"},
    )
    settings = SimpleNamespace(router=SimpleNamespace(worker_patience_s=0.0))
    router: Any = SimpleNamespace(workers=workers, settings=settings)
    case: Any = SimpleNamespace(may_run_on=lambda worker: not suspected)
    request = SimpleNamespace(model="m", checkpoint="c")
    answer: Any = SimpleNamespace(request=request, begun=False)
    assert await _some_workers(router, answer, case) == ready
    ready.clear()
    with pytest.raises(PenstockError, match="no worker"):
        await _some_workers(router, answer, case)


async def not_replaced(*_: object) -> bool:
    return False


@pytest.mark.parametrize(
    ("code", "reason", "state", "share"),
    [
        (grpc.StatusCode.OK, "", State.CLOSED, 0.0),
        (grpc.StatusCode.UNAVAILABLE, "draining", State.CLOSED, 0.0),  # an orderly end
        (grpc.StatusCode.UNAVAILABLE, "peer_lost", State.OPEN, 1.0),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "too_many_requests", State.OPEN, 1.0),
        (grpc.StatusCode.UNAVAILABLE, HAND_OVER, State.CLOSED, 1.0),
        (grpc.StatusCode.INTERNAL, "internal", State.CLOSED, 1.0),
        (grpc.StatusCode.INVALID_ARGUMENT, "", State.CLOSED, 0.0),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "deadline", State.CLOSED, 0.0),
    ],
)
async def test_what_a_legs_end_says_about_its_worker(
    code: grpc.StatusCode, reason: str, state: State, share: float
) -> None:
    worker, end, way = scripted()
    async with RealLeg(worker, worker_pb2.WorkRequest(), 0, way) as leg:
        end.set_result(End(status=common_pb2.Status(code=code.value[0], reason=reason)))
        await asyncio.wait([leg.ended])
    assert (worker.breaker.state, worker.breaker.failed_share) == (state, share)


async def test_a_worker_whose_link_refuses_at_once_is_left_alone_as_any_that_refuses() -> None:
    """The end is there before anybody waits for it, or has said what becomes of the leg."""
    worker, end, way = scripted()
    code = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    end.set_result(End(status=common_pb2.Status(code=code, reason="link_congested")))
    answer: Any = SimpleNamespace(
        request=router_pb2.GenerateRequest(prompt_token_ids=pack([1])),
        before=0,
        tokens=[],
        tokens_left=1,
        finished=False,
        done=asyncio.get_running_loop().create_future(),
    )
    plan: Any = SimpleNamespace(decode=worker, prefill=None, cached_tokens=0, uncached_tokens=1)
    with pytest.raises(WorkerLostError):
        await legs.run(plan, answer, way)
    assert worker.breaker.state is State.OPEN


def scripted() -> "tuple[Any, asyncio.Future[End], Way]":
    """A worker, the end of its one request, and a way."""
    loop = asyncio.get_running_loop()
    end: asyncio.Future[End] = loop.create_future()
    request = SimpleNamespace(outcome=end, stop=lambda: None, cancel=lambda: None)
    worker = SimpleNamespace(
        breaker=Breaker(),
        link=SimpleNamespace(open=lambda *_, **__: request),
        sent=lambda *_: None,
        answered=lambda _: None,
        peers_failed_share=lambda: 0.0,
    )
    recalled: asyncio.Future[None] = loop.create_future()
    return worker, end, Way(time.monotonic() + 60, "", common_pb2.Record(), 30.0, recalled)


@pytest.mark.parametrize("told", [True, False], ids=["decodes", "first token missing"])
async def test_the_prefill_worker_may_be_lost_once_its_token_is_out(told: bool) -> None:
    """Before that the pair has failed, though the decode worker has begun: nobody else knows the
    first token."""
    first, then = Leg(lost("engine_died")), Leg(None)
    then.ended, then.deltas = asyncio.get_running_loop().create_future(), 1
    then.worker = SimpleNamespace(link=SimpleNamespace(vitals=SimpleNamespace(steps=0)))
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    recalled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    class Answer:
        finished = property(lambda self: done.done())

    answer = Answer()
    answer.done = done  # type: ignore[attr-defined]
    early = [] if told else [object()]
    way = Way(time.monotonic() + 60, "", common_pb2.Record(), 30.0, recalled)
    both = asyncio.create_task(
        legs._both(cast(Any, first), cast(Any, then), cast(Any, answer), early, way)
    )
    if told:
        for _ in range(5):
            await asyncio.sleep(0)
        assert not both.done()
        done.set_result(None)
        await asyncio.wait_for(both, 5)
    else:
        with pytest.raises(WorkerLostError) as raised:
            await asyncio.wait_for(both, 5)
        assert raised.value.cause == "engine_died"
