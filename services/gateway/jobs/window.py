"""How many lines of batches a gateway has under way: as many as what is idle carries.

Two things tell. A line that waited for a place, or was turned away, found none: the window halves
(D. Chiu, R. Jain, "Analysis of the increase and decrease algorithms for congestion avoidance in
computer networks", 1989). And lines that come slower than they could alone share what computes
them, with each other or with somebody who waits: the window goes to where they come as fast as
before, and the root of itself beyond, so that it finds out (TCP Vegas: L. Brakmo, L. Peterson, "TCP
Vegas: end to end congestion avoidance on a global Internet", 1995; as a gradient of the times in
Netflix' concurrency-limits). Gateways need not know of each other for that, nor of what else runs.
"""

import asyncio
import math
import time
from collections import OrderedDict

WAITED_S = 0.05
"""A line that waited for so long found everything taken."""
_HALVED_EVERY_S = 0.5  # what was under way then tells the same
_STEP = 0.2  # of the way to where the window ought to be, with each line
_BATCHES = 100  # whose best pace is known; lines of one are alike


class Window:
    def __init__(self, most: int) -> None:
        self._most = most
        self._size = 1.0
        self._best_s: OrderedDict[str, float] = OrderedDict()  # by batch, the latest last
        self._share = 1.0  # of the best pace, what lines have now; smoothed
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

    def went(self, batch: str, waited_s: float, pace_s: float | None) -> None:
        """A line of the batch was let in after so long, and then had a token each `pace_s`; None:
        it is not known."""
        if waited_s >= WAITED_S:
            self.push_back()
            return
        if pace_s:
            self._share += _STEP * (self._share_of(batch, pace_s) - self._share)
        wanted = self._size * self._share + math.sqrt(self._size)
        self._size += _STEP * (wanted - self._size)
        self._size = min(max(self._size, 1.0), self._most)
        self._changed.set()

    def push_back(self) -> None:
        """There was no place for a line."""
        now = time.monotonic()
        if now - self._halved_at >= _HALVED_EVERY_S:
            self._halved_at = now
            self._size = max(1.0, self._size / 2)

    def _share_of(self, batch: str, pace_s: float) -> float:
        best_s = self._best_s.pop(batch, pace_s * self._share)  # a new one's: as others have it
        self._best_s[batch] = best_s = min(best_s, pace_s)
        if len(self._best_s) > _BATCHES:
            self._best_s.popitem(last=False)
        return best_s / pace_s
