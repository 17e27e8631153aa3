"""One request's claim to a slot, as its router keeps it."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from services.common.errors import PenstockError

LANE_NAMES = {1: "high", 2: "normal", 3: "low"}


@dataclass(eq=False)
class Ticket:
    """A claim, from the request's arrival to its end.

    `cost` is what the present stint in a slot is expected to use. A recalled request has another
    stint later, and each is charged and settled by itself.
    """

    id: str  # unique among all requests of all routers
    model: str
    tenant: str
    lane: int  # 1 high, 2 normal, 3 low
    cost: float  # tokens
    weight: float  # the tenant's share, > 0
    # Tokens used up to now, and those still expected; None: as `cost` says.
    progress: Callable[[], tuple[float, float]] | None = None
    resumed: bool = False  # it held a slot at a router that was lost, and has it still
    entered_s: float = field(default_factory=time.monotonic)
    before: int = 0  # requests that waited already when it came
    queued: bool = False  # it was not admitted at once
    order: str = "redis"  # or "local": which granted it; "ahead" of it; "before": it was resumed
    left: bool = False
    recalls: int = 0  # how often its slot went to another
    paid: float = 0.0  # tokens used in earlier stints
    granted: "asyncio.Future[None]" = field(default_factory=lambda: _future())
    recalled: "asyncio.Future[None]" = field(default_factory=lambda: _future())  # it lost its slot

    @property
    def work(self) -> float:
        return self.cost / self.weight

    @property
    def missed(self) -> float:
        """Work that the expected cost missed up to now; less than 0: too much was charged."""
        return 0.0 if self.progress is None else (self._used - self.cost) / self.weight

    @property
    def left_over(self) -> float:
        """Tokens that another stint would be expected to use."""
        return 0.0 if self.progress is None else self.progress()[1]

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.entered_s

    @property
    def waits(self) -> bool:
        return not self.granted.done()

    @property
    def holds(self) -> bool:
        """Whether it has its slot."""
        return self.granted.done() and not self.granted.cancelled() and not self.granted.exception()

    def wait_again(self, left_over: float) -> None:
        """Its slot was given back; `left_over` is what its next stint was entered with."""
        self.paid += self._used
        self.cost = left_over
        self.recalls += 1
        self.granted = _future()
        self.recalled.set_result(None)

    def heard(self) -> None:
        """Its holder knows that it lost its slot, and waits for another."""
        self.recalled = _future()

    @property
    def _used(self) -> float:
        """Tokens, in this stint."""
        return self.cost if self.progress is None else self.progress()[0] - self.paid


def _future() -> "asyncio.Future[None]":
    return asyncio.get_running_loop().create_future()


def not_served(model: str) -> PenstockError:
    return PenstockError(
        grpc.StatusCode.NOT_FOUND,
        f"the model {model!r} does not exist",
        stage="router",
        param="model",
        reason="model_not_found",
    )
