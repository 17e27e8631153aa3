"""How often a peer may show what lets nobody in."""

import time
from collections import OrderedDict
from ipaddress import IPv6Address, ip_address

from services.common.errors import PenstockError
from services.gateway.intake import refused

_WINDOW_S = 60.0
_PEERS = 10_000  # that are remembered


class Failures:
    """So many in a minute; then its requests are refused unseen until that is over. An IPv6 peer is
    its network of 64 bits, of which it has all addresses."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._of_peers: OrderedDict[str, list[float]] = OrderedDict()  # when each was

    def check(self, peer: str) -> None:
        """Raises RESOURCE_EXHAUSTED ("too_many_failures")."""
        recent = self._recent(_network(peer))
        if len(recent) >= self._most:
            error: PenstockError = refused(
                "too_many_failures", "Too many failures from your address; wait."
            )
            error.retry_after_s = max(1.0, recent[0] + _WINDOW_S - time.monotonic())
            raise error

    def note(self, peer: str) -> None:
        network = _network(peer)
        self._of_peers[network] = [*self._recent(network), time.monotonic()]
        self._of_peers.move_to_end(network)
        if len(self._of_peers) > _PEERS:
            self._of_peers.popitem(last=False)

    def _recent(self, network: str) -> list[float]:
        since = time.monotonic() - _WINDOW_S
        return [at for at in self._of_peers.get(network, []) if at > since]


def _network(peer: str) -> str:
    try:
        address = ip_address(peer)
    except ValueError:
        return peer
    if not isinstance(address, IPv6Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(int(address) >> 64)
