"""How many lines of batches a gateway has under way: as many as find a place at once.

Additive increase, multiplicative decrease (D. Chiu, R. Jain, "Analysis of the increase and decrease
algorithms for congestion avoidance in computer networks", 1989): each line that was let in without
waiting makes room for a bit more, one that waited or was turned away halves it. Gateways need not
know of each other for that, nor of what else runs: who has to wait has found out.
"""

import asyncio
import time

WAITED_S = 0.05
"""A line that waited for so long found everything taken."""
_HALVED_EVERY_S = 0.5  # what was under way then tells the same


class Window:
    def __init__(self, most: int) -> None:
        self._most = most
        self._size = 1.0
        self._met = False  # the limit, ever: until then it doubles
        self._halved_at = float("-inf")
        self._taken = 0
        self._changed = asyncio.Event()

    @property
    def size(self) -> int:
        return int(self._size)

    @property
    def taken(self) -> int:
        return self._taken

    async def take(self) -> None:
        """Returns with a place, for `give_back`."""
        while self._taken >= self.size:
            self._changed.clear()
            await self._changed.wait()
        self._taken += 1

    def give_back(self) -> None:
        self._taken -= 1
        self._changed.set()

    def went(self, waited_s: float) -> None:
        """A line was let in after so long."""
        if waited_s >= WAITED_S:
            self.push_back()
            return
        grown = self._size + (1 / self._size if self._met else 1)
        self._size = min(self._most, grown)
        self._changed.set()

    def push_back(self) -> None:
        """There was no place for a line."""
        self._met = True
        now = time.monotonic()
        if now - self._halved_at >= _HALVED_EVERY_S:
            self._halved_at = now
            self._size = max(1.0, self._size / 2)
