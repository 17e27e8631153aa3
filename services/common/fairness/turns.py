"""A few places that tenants share fairly: whoever has much to do does not hold up the others."""

import asyncio
from collections import deque
from contextlib import suppress


class Turns:
    """At most `places` are taken at a time. The next free one goes to the tenants in turn, and
    within a tenant to who has waited longest.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # whose turn is next, first

    @property
    def free(self) -> bool:
        """Whether a place can be taken at once."""
        return self._free > 0

    async def take(self, tenant: str) -> None:
        """Returns with a place, for `give_back`."""
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(tenant, turn)
            else:  # it got its place in the same moment
                self.give_back()
            raise

    def _forget(self, tenant: str, turn: "asyncio.Future[None]") -> None:
        """Of who left while waiting, or its tenant would lose a turn for it."""
        queue = self._waiting.get(tenant, deque())
        with suppress(ValueError):  # passed over already
            queue.remove(turn)
            if not queue:
                del self._waiting[tenant]

    def give_back(self) -> None:
        while self._waiting:
            tenant = next(iter(self._waiting))
            queue = self._waiting.pop(tenant)
            turn = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # behind the others
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
