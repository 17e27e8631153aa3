"""The other gateways behind the same ports of this host.

Gateways of one namespace share their ports on a host (SO_REUSEPORT): the kernel deals out the
connections among those that listen. The registry tells them from others of this user, with whom
nothing is shared: another Penstock's gateways would get this one's requests.
"""

import asyncio
import time
from urllib.parse import urlsplit

from services.common.config import Settings
from services.common.discovery import DRAINING, Directory, Replica, host_id
from services.common.redis import Redis

_LOOK_EVERY_S = 0.2
_CONNECTED_S = 1.0
_PATIENCE_S = 10.0  # from a gateway's first listening to its being registered
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class Neighbours:
    def __init__(self, redis: Redis, settings: Settings, id: str) -> None:
        """`id`: this gateway's own."""
        self._redis = redis
        self._settings = settings
        self._id = id
        self._host_id = host_id(settings.peer_host)

    async def admit(self, ports: dict[str, int]) -> None:
        """Returns when all who listen on these ports ("http", "grpc"; 0: a free one) are gateways
        of this namespace. Raises RuntimeError when somebody else does."""
        host = self._settings.gateway.host
        deadline = time.monotonic() + _PATIENCE_S
        while taken := await self._taken(_ANY.get(host, host), ports):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"port {taken} on {host}: in use, and by no gateway of the namespace "
                    f"{self._settings.namespace!r}; set PENSTOCK_GATEWAY__PORT"
                )
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _taken(self, host: str, ports: dict[str, int]) -> int:
        """The first port on which somebody listens of whom the registry does not know; 0: none."""
        used = {name: port for name, port in ports.items() if port and await _listens(host, port)}
        known = await self._known("gateway", DRAINING) if used else []
        own = [(name, port) for one in known for name, port in one.items()]
        return next((port for name, port in used.items() if (name, port) not in own), 0)

    async def comes(self, ports: dict[str, int], within_s: float) -> bool:
        """Whether another serves behind these ports, or does so in time."""
        deadline = time.monotonic() + within_s
        while ports not in await self._known("gateway"):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            await asyncio.sleep(min(_LOOK_EVERY_S, left))
        return True

    async def _known(self, *services: str) -> list[dict[str, int]]:
        """The ports of the others on this host. By fresh looks: a view that stands for some time
        has those that left for a while."""
        found: list[dict[str, int]] = []
        for service in services:
            view = Directory(self._redis, self._settings.namespace, service, self._settings.lease_s)
            await view.refresh()
            found += [_ports(other) for other in view.replicas.values() if self._is_beside(other)]
        return found

    def _is_beside(self, other: Replica) -> bool:
        here = other.host_id == self._host_id and other.service == "gateway"
        return here and other.id != self._id


def _ports(gateway: Replica) -> dict[str, int]:
    http, grpc = gateway.facts.get("url", ""), gateway.facts.get("grpc", "")
    return {"http": urlsplit(http).port or 0, "grpc": urlsplit(f"//{grpc}").port or 0}


async def _listens(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(_CONNECTED_S):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:  # whoever it is, is busy
        return True
    except OSError:
        return False
    writer.close()
    return True
