"""What of the inside no client may see: addresses, replicas' ids, paths, settings, exceptions."""

import re

from services.common.discovery import REPLICA_ID, Replica

_MARKS = {
    "an address": re.compile(r"(?:\d{1,3}\.){3}\d{1,3}|\blocalhost\b|\bipv[46]:|\bunix:|\[::"),
    "a replica's id": REPLICA_ID,
    "a path": re.compile(r"(?<![\w./])/(?:home|tmp|work|usr|var|root|dev|proc|etc|opt|run|mnt)/"),
    "a setting": re.compile(r"PENSTOCK_|REDIS_URL|QDRANT_|data_dir"),
    "an exception": re.compile(r"Traceback|\b[A-Z][A-Za-z]*(?:Error|Exception)\b|0x[0-9a-f]{6}"),
}


def leaks(told: str, *replicas: Replica) -> list[str]:
    """What of the inside `told` shows; also the whereabouts of these replicas."""
    found = [f"{what}: {m.group()}" for what, mark in _MARKS.items() for m in mark.finditer(told)]
    for replica in replicas:
        known = (replica.address, replica.address.rpartition(":")[2], replica.host_id)
        found += [f"of {replica.id}: {one}" for one in known if one and _stands_in(told, one)]
    return found


def _stands_in(told: str, known: str) -> bool:
    return re.search(rf"(?<![\w.-]){re.escape(known)}(?![\w.-])", told) is not None


def check(told: str, *replicas: Replica) -> None:
    """Fails the test when `told` shows something."""
    found = leaks(told, *replicas)
    assert not found, f"{found} in {told[:2000]}"
