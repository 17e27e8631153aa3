"""How many processor cores this process may use."""

import os

from services.worker.engine.process import cgroups


def usable_cores() -> int:
    """Those that it may run on or, if that is less, as many as its cgroups' quotas come to: at
    least one."""
    cores = float(len(os.sched_getaffinity(0)))
    return max(1, int(min([cores, *_quotas()])))


def _quotas() -> list[float]:
    """In cores."""
    found = []
    for words in cgroups.settings("cpu", "cpu.cfs_quota_us cpu.cfs_period_us", "cpu.max"):
        match words:
            case [limit, period] if limit.isdigit() and period.isdigit():  # not "max", not -1
                found.append(int(limit) / int(period))
    return found
