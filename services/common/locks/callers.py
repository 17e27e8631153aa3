"""Who may call what between services, where they show certificates (transport.py asks here)."""

import socket
from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import unquote

from services.common.discovery import SERVICES
from services.common.locks.certificates import dns_name

ITSELF = "itself"
"""As a caller: the identity of the service that is called, on the host that it is called on."""

CALLERS: dict[str, frozenset[str]] = {
    "/penstock.v1.Retrieval/": frozenset({"gateway"}),
    "/penstock.v1.Tokenizer/": frozenset({"gateway"}),
    "/penstock.v1.Router/Link": frozenset({"tokenizer"}),
    "/penstock.v1.Router/GetStatus": frozenset({"cli"}),
    "/penstock.v1.Worker/Link": frozenset({"router"}),
    "/penstock.v1.Worker/PushKv": frozenset({"worker"}),
    "/penstock.host.v1.Host/Drain": frozenset({"cli", ITSELF}),
    "/grpc.health.v1.Health/": frozenset({*SERVICES, "cli"}),
    "/grpc.reflection.v1alpha.ServerReflection/": frozenset({"cli"}),
}
"""Which identities may call a method, or the methods of a service; what is not here, nobody may."""

_ANY_PORT = 9


def allowed(method: str) -> frozenset[str]:
    return CALLERS.get(method) or CALLERS.get(method[: method.rindex("/") + 1], frozenset())


def may_call(callers: frozenset[str], itself: str, names: Iterable[bytes], peer: str) -> bool:
    """Whether one of `callers` calls. `itself`: the identity of the service that is called;
    `names`: the DNS names of the caller's certificate; `peer`: where gRPC says that it is."""
    shown = set(names)
    if any(dns_name(identity).encode() in shown for identity in callers):
        return True
    return ITSELF in callers and dns_name(itself).encode() in shown and is_here(peer)


def is_here(peer: str) -> bool:
    """Whether a connection came from this host (in a cluster: pod). Of an address of its own, the
    system answers from that same address; nothing is sent to find out."""
    family, _, rest = unquote(peer).partition(":")
    address = rest.rpartition(":")[0].strip("[]")
    try:
        ip = ip_address(address)
        if ip.is_loopback:
            return True
        kind = socket.AF_INET6 if family == "ipv6" else socket.AF_INET
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect((str(ip), _ANY_PORT))
            return ip_address(probe.getsockname()[0]) == ip
    except (ValueError, OSError):  # no address, or none that there is a way to
        return False
