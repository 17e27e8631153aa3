"""How many HTTP connections are open, and whose: each peer's address has its share.

Many callers may have one address, as behind a proxy. So where its share is taken, one of its
connections that asks nothing now gives way to a new one: who keeps them open keeps nobody out.

One task looks at all of them, so an open connection costs no timer.
"""

import asyncio
from collections import OrderedDict
from itertools import islice
from typing import Protocol

from services.common.config import GatewaySettings
from services.common.fairness.shares import Shares
from services.gateway import metrics
from services.gateway.intake import refused

_LOOK_EVERY_S = 1.0
_LOOKED_AT = 16  # connections of a peer, the oldest first, for one that gives way


class Admitted(Protocol):
    """What has a place at the door."""

    @property
    def idle(self) -> bool:
        """Whether no answer is due on it: no request of it is whole, and all answers have left."""

    def look(self, now: float) -> None:
        """Ends it if its time is up."""

    def give_way(self) -> None:
        """Ends it, soon; its place is another's already."""

    def abort(self) -> None: ...


class Door:
    """All connections of one HTTP server, shared between the peers' addresses."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self._places = Shares(settings.max_connections)
        self._open: dict[str, OrderedDict[Admitted, None]] = {}  # by peer, the oldest first

    @property
    def connections(self) -> int:
        """That are open."""
        return self._places.taken

    def admit(self, connection: Admitted, peer: str) -> None:
        """Raises RESOURCE_EXHAUSTED ("too_many_connections")."""
        if not self._places.take(peer):
            self._make_room(peer)
            if not self._places.take(peer):
                raise refused("too_many_connections", "Too many connections from your address.")
        self._open.setdefault(peer, OrderedDict())[connection] = None

    def leave(self, connection: Admitted, peer: str) -> None:
        of_peer = self._open.get(peer)
        if of_peer is not None and connection in of_peer:
            del of_peer[connection]
            self._places.give_back(peer)
            if not of_peer:
                del self._open[peer]

    def _make_room(self, peer: str) -> None:
        """Ends the oldest of the peer's connections that is idle; those that are not are looked at
        again after all others."""
        of_peer = self._open.get(peer, OrderedDict())
        for one in list(islice(of_peer, _LOOKED_AT)):
            if one.idle:
                metrics.refused.labels("gave_way").inc()
                self.leave(one, peer)
                return one.give_way()
            of_peer.move_to_end(one)

    async def watch(self) -> None:
        """Ends the connections whose time is up."""
        bounds = (self.settings.head_timeout_s, self.settings.write_timeout_s)
        while True:
            await asyncio.sleep(min(_LOOK_EVERY_S, *(bound / 4 for bound in bounds)))
            now = asyncio.get_running_loop().time()
            for connection in self._all():
                connection.look(now)

    def close(self) -> None:
        """Ends what is left, at once."""
        for connection in self._all():
            connection.abort()

    def _all(self) -> list[Admitted]:
        return [one for of_peer in self._open.values() for one in of_peer]
