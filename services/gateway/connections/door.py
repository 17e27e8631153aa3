"""How many HTTP connections are open, and whose: each peer's address has its share.

One task looks at all of them, so an open connection costs no timer.
"""

import asyncio
from typing import Protocol

from services.common.config import GatewaySettings
from services.common.shares import Shares
from services.gateway.intake import refused

_LOOK_EVERY_S = 1.0


class Admitted(Protocol):
    """What has a place at the door."""

    def look(self, now: float) -> None:
        """Ends it if its time is up."""

    def abort(self) -> None: ...


class Door:
    """All connections of one HTTP server, shared between the peers' addresses."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self._places = Shares(settings.max_connections)
        self._open: set[Admitted] = set()

    @property
    def connections(self) -> int:
        """That are open."""
        return len(self._open)

    def admit(self, connection: Admitted, peer: str) -> None:
        """Raises RESOURCE_EXHAUSTED ("too_many_connections")."""
        if not self._places.take(peer):
            raise refused("too_many_connections", "Too many connections from your address.")
        self._open.add(connection)

    def leave(self, connection: Admitted, peer: str) -> None:
        if connection in self._open:
            self._open.remove(connection)
            self._places.give_back(peer)

    async def watch(self) -> None:
        """Ends the connections whose time is up."""
        bounds = (self.settings.head_timeout_s, self.settings.write_timeout_s)
        while True:
            await asyncio.sleep(min(_LOOK_EVERY_S, *(bound / 4 for bound in bounds)))
            now = asyncio.get_running_loop().time()
            for connection in list(self._open):
                connection.look(now)

    def close(self) -> None:
        """Ends what is left, at once."""
        for connection in list(self._open):
            connection.abort()
