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
from services.common.transport import host_port

_LOOK_EVERY_S = 0.2
_CONNECTED_S = 1.0
_PATIENCE_S = 10.0  # from a gateway's first listening to its being registered
_SETTINGS = {
    "http": "PENSTOCK_GATEWAY__PORT",
    "grpc": "PENSTOCK_GATEWAY__PORT",
    "admin": "PENSTOCK_IDENTITY__ADMIN_PORT",
}
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class Neighbours:
    def __init__(self, redis: Redis, settings: Settings, id: str) -> None:
        """`id`: this gateway's own."""
        self._redis = redis
        self._settings = settings
        self._id = id
        self._host_id = host_id(settings.peer_host)

    async def admit(self, ports: dict[str, int]) -> None:
        """Returns when all who listen on these ports ("http", "grpc", "admin"; 0: a free one) are
        gateways of this namespace. Raises RuntimeError when somebody else does."""
        deadline = time.monotonic() + _PATIENCE_S
        while taken := await self._taken(ports):
            if time.monotonic() > deadline:
                host, setting = _host(self._settings, taken), _SETTINGS[taken]
                raise RuntimeError(
                    f"port {ports[taken]} on {host}: in use, and by no gateway of the namespace "
                    f"{self._settings.namespace!r}; set {setting}"
                )
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _taken(self, ports: dict[str, int]) -> str:
        """The first door at which somebody listens of whom the registry does not know; "": none."""
        used = {}
        for name, port in ports.items():
            host = _host(self._settings, name)
            if port and await _listens(_ANY.get(host, host), port):
                used[name] = port
        known = await self._known("gateway", DRAINING) if used else []
        own = [door for one in known for door in one.items()]
        doors = _doors(self._settings, used)
        return next((name for name, at in doors.items() if (name, at) not in own), "")

    async def comes(self, ports: dict[str, int], within_s: float) -> bool:
        """Whether another serves behind these ports, or does so in time."""
        deadline = time.monotonic() + within_s
        doors = _doors(self._settings, ports)
        while not any(doors.items() <= one.items() for one in await self._known("gateway")):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            await asyncio.sleep(min(_LOOK_EVERY_S, left))
        return True

    async def _known(self, *services: str) -> list[dict[str, str]]:
        """The doors of the others on this host. By fresh looks: a view that stands for some time
        has those that left for a while."""
        found: list[dict[str, str]] = []
        for service in services:
            view = Directory(self._redis, self._settings.namespace, service, self._settings.lease_s)
            await view.refresh()
            found += [_told(other) for other in view.replicas.values() if self._is_beside(other)]
        return found

    def _is_beside(self, other: Replica) -> bool:
        here = other.host_id == self._host_id and other.service == "gateway"
        return here and other.id != self._id


def address(settings: Settings, door: str = "http") -> str:
    """At which a gateway with these settings is reached."""
    host = _host(settings, door)
    return settings.peer_host if host in _ANY else host


def _doors(settings: Settings, ports: dict[str, int]) -> dict[str, str]:
    """As `_told` of one with these settings and ports: the same ports of another address of this
    host are another door."""
    return {name: host_port(address(settings, name), port) for name, port in ports.items()}


def _host(settings: Settings, door: str) -> str:
    return settings.identity.admin_host if door == "admin" else settings.gateway.host


def _told(gateway: Replica) -> dict[str, str]:
    http, admin = (urlsplit(gateway.facts.get(name, "")).netloc for name in ("url", "admin"))
    return {"http": http, "grpc": gateway.facts.get("grpc", ""), "admin": admin}


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
