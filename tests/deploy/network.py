"""What a release's network policies let through: Kubernetes' rules for them, evaluated here."""

from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Any

from tests.deploy.manifests import NAMESPACE, Release, Thing, selects


@dataclass(frozen=True)
class End:
    """One end of a connection: a pod of some namespace, or an address outside."""

    labels: dict[str, str] | None = None
    namespace: str = NAMESPACE
    ip: str = ""


@dataclass(frozen=True)
class Network:
    policies: list[Thing]

    @classmethod
    def of(cls, release: Release) -> "Network":
        return cls([thing["spec"] for thing in release.of("NetworkPolicy")])

    def lets(self, source: End, target: End, port: int, protocol: str = "TCP") -> bool:
        """Whether a connection may leave its source and reach its target."""
        leaves = self.leaves(source, target, port, protocol)
        return leaves and self.takes(source, target, port, protocol)

    def leaves(self, source: End, target: End, port: int, protocol: str = "TCP") -> bool:
        """Whether the source's own policies would let it go."""
        return self._side("Egress", "to", source, target, port, protocol)

    def takes(self, source: End, target: End, port: int, protocol: str = "TCP") -> bool:
        """Whether the target's own policies would take it."""
        return self._side("Ingress", "from", target, source, port, protocol)

    def _side(
        self, direction: str, key: str, own: End, other: End, port: int, protocol: str
    ) -> bool:
        governing = [policy for policy in self._over(own) if direction in policy["policyTypes"]]
        rules = [rule for policy in governing for rule in policy.get(direction.lower(), None) or ()]
        return not governing or any(
            _has_port(rule, port, protocol) and _has_peer(rule.get(key), other) for rule in rules
        )

    def _over(self, end: End) -> Iterator[Thing]:
        if end.labels is not None and end.namespace == NAMESPACE:
            yield from (p for p in self.policies if selects(p["podSelector"], end.labels))


def _has_port(rule: Thing, port: int, protocol: str) -> bool:
    ports: list[Thing] | None = rule.get("ports")
    return not ports or any(
        own["protocol"] == protocol and own["port"] <= port <= own.get("endPort", own["port"])
        for own in ports
    )


def _has_peer(peers: list[Thing] | None, end: End) -> bool:
    return not peers or any(_is_peer(peer, end) for peer in peers)


def _is_peer(peer: dict[str, Any], end: End) -> bool:
    if "ipBlock" in peer:
        block = peer["ipBlock"]
        inside = end.ip and ip_address(end.ip) in ip_network(block["cidr"])
        return bool(inside) and not any(
            ip_address(end.ip) in ip_network(less) for less in block.get("except", ())
        )
    if end.labels is None:
        return False
    if "namespaceSelector" in peer:
        names = {"kubernetes.io/metadata.name": end.namespace}
        if not selects(peer["namespaceSelector"] or {}, names):
            return False
    elif end.namespace != NAMESPACE:
        return False
    return selects(peer.get("podSelector") or {}, end.labels)
