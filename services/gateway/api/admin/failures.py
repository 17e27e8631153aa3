"""How often what lets nobody in is answered as such, and logged."""

import time
from collections import OrderedDict
from ipaddress import IPv6Address, ip_address

from services.common.errors import PenstockError
from services.gateway.intake import refused

_WINDOW_S = 60.0
_KNOWN = 10_000  # that are remembered


class Failures:
    """So many a minute of one peer, or of one who is known and may not; what it tries beyond is
    told to wait, and leaves no line in a log.

    Nobody is kept out by it: what is right is let in, whatever its address has shown before. Behind
    a proxy or a forwarded port all have one address. An IPv6 peer is its network of 64 bits, of
    which it has all addresses.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: OrderedDict[str, list[float]] = OrderedDict()  # when each was, `most` of them

    def note(self, whose: str) -> None:
        """One more. Raises RESOURCE_EXHAUSTED ("too_many_failures") where it is one too many."""
        whose, now = _network(whose), time.monotonic()
        recent = [at for at in self._of.get(whose, []) if at > now - _WINDOW_S]
        if len(recent) >= self._most:
            error: PenstockError = refused("too_many_failures", "Too many failures; wait.")
            error.retry_after_s = max(1.0, recent[0] + _WINDOW_S - now)
            raise error
        self._of[whose] = [*recent, now]
        self._of.move_to_end(whose)
        if len(self._of) > _KNOWN:
            self._of.popitem(last=False)


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
