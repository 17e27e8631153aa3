"""How many processor cores this process may use."""

import os
from pathlib import Path

_OWN_GROUPS, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Those that it may run on or, if that is less, as many as its cgroups' quotas come to, which
    is how Kubernetes and Docker limit a container: at least one."""
    cores = float(len(os.sched_getaffinity(0)))
    return max(1, int(min([cores, *_quotas()])))


def _quotas() -> list[float]:
    """Of the process's own groups and those above them, in cores."""
    found = []
    for line in _read(_OWN_GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _MOUNT / controllers
        own = root / path.lstrip("/")
        # In a container its own group is mounted as the root, and the path is the host's.
        for folder in {own, *own.parents, root} - set(root.parents):
            if controllers:
                quota = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
            else:
                first, _, second = _read(folder / "cpu.max").partition(" ")
                quota = first, second
            limit, period = (part.strip() for part in quota)
            if limit.isdigit() and period.isdigit():  # not "max", not -1
                found.append(int(limit) / int(period))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
