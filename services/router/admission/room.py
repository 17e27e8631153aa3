"""When there is so much room that a request need not wait for its slot to be entered in the order.

Where nobody waits and slots are free, the order has nothing to decide: whoever comes gets one. What
a router was last told of a model says so, up to what the other routers have let in since. So each
goes ahead with a part of what was free, all of them together with half; its slots are entered
meanwhile, before whatever else it asks of the order, and are charged like any other. What a router
has asked for itself, and was not told of yet, counts as granted.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

_TRUSTED_S = 1.0  # what was told; each request that leaves brings news


class _Told(NamedTuple):
    held: int  # slots, over all routers
    waiting: int  # requests
    at_s: float  # monotonic


class Room:
    def __init__(self, capacity: Callable[[str], int], routers: Callable[[], int]) -> None:
        """As Admission has them."""
        self._capacity = capacity
        self._routers = routers
        self._told: dict[str, _Told] = {}  # by model
        self._ahead: Counter[str] = Counter()  # slots of it that the order has not confirmed
        self._asked: Counter[str] = Counter()  # requests that have asked it, and were not answered

    def hear(self, model: str, held: int, waiting: int) -> None:
        """What the order says now."""
        self._told[model] = _Told(held, waiting, time.monotonic())

    def take(self, model: str) -> bool:
        """Whether one may go ahead; then `entered` must follow."""
        if not self.is_wide(model):
            return False
        self._ahead[model] += 1
        return True

    def is_wide(self, model: str) -> bool:
        """Whether nobody waits, and one more could go ahead."""
        told = self._told.get(model)
        if told is None or told.waiting or time.monotonic() - told.at_s > _TRUSTED_S:
            return False
        free = self._capacity(model) - told.held - self._asked[model]
        return 2 * max(1, self._routers()) * (self._ahead[model] + 1) <= free

    def entered(self, model: str) -> None:
        """The order knows of it, or cannot be told."""
        self._ahead[model] -= 1

    @contextmanager
    def asking(self, model: str) -> Iterator[None]:
        """While the order is asked for a slot: what it said last does not tell of that one."""
        self._asked[model] += 1
        try:
            yield
        finally:
            self._asked[model] -= 1

    def forget(self) -> None:
        """Nothing is known any more."""
        self._told.clear()
