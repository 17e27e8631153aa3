"""When a link's requests are due: one timer for all of them. One for each would be 700 bytes of a
stream at each end of each of its links."""

import asyncio
from collections.abc import Callable
from heapq import heapify, heappop, heappush

_SPARE = 64  # entries of requests that have ended, beside as many as there are of others


class Deadlines:
    """Each is met once, or dropped."""

    def __init__(self, late: Callable[[int], None]) -> None:
        """`late` is told each id whose time is up."""
        self._late = late
        self._due: dict[int, float] = {}  # by id, seconds of the loop's clock
        self._order: list[tuple[float, int]] = []  # a heap: these, and some that no longer hold
        self._timer: asyncio.TimerHandle | None = None

    def put(self, id: int, when: float) -> None:
        """In place of what held for it."""
        self._due[id] = when
        heappush(self._order, (when, id))
        if self._order[0] == (when, id):
            self._wait()

    def drop(self, id: int) -> None:
        """Of one that has none it does nothing."""
        self._due.pop(id, None)
        if not self._due:
            self._order.clear()
            self._wait()
        elif len(self._order) > 2 * len(self._due) + _SPARE:
            self._order = [(when, id) for id, when in self._due.items()]
            heapify(self._order)

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._order:
            self._timer = asyncio.get_running_loop().call_at(self._order[0][0], self._look)

    def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        try:
            while self._order and self._order[0][0] <= now:
                when, id = heappop(self._order)
                if self._due.get(id) == when:
                    del self._due[id]
                    self._late(id)
        finally:
            self._wait()
