"""Why a split failed, and whom a request without a sound worker goes to."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.common.errors import PenstockError, unavailable
from services.router import legs
from services.router.leg import HAND_OVER, WorkerLostError
from services.router.pipeline import _some_workers

WORKER: Any = None


class Leg:
    def __init__(self, failure: WorkerLostError | PenstockError | None) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended.set_result(None)
        self._failure = failure
        self.blamed = 0

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
        ready=lambda model: ready, sound=lambda model: ready if suspected else []
    )
    settings = SimpleNamespace(router=SimpleNamespace(worker_patience_s=0.0))
    router: Any = SimpleNamespace(workers=workers, settings=settings)
    case: Any = SimpleNamespace(may_run_on=lambda worker: not suspected)
    assert await _some_workers(router, "m", case) == ready
    ready.clear()
    with pytest.raises(PenstockError, match="no worker"):
        await _some_workers(router, "m", case)
