"""What other processes take of the machine meanwhile."""

import os
import time
from collections.abc import Callable

import psutil

QUIET_CORES = 0.2
QUIET_S = 3


class ForeignLoad:
    """Cores that others used from here to `cores()`: all busy time, less our own."""

    def __init__(self, ours_s: Callable[[], float]) -> None:
        """`ours_s`: processor seconds of those whom we measure; this process is ours too."""
        self._ours_s = ours_s
        self._before = self._foreign_s()
        self._began = time.monotonic()

    def cores(self) -> float:
        elapsed = time.monotonic() - self._began
        return max(0.0, (self._foreign_s() - self._before) / elapsed)

    def _foreign_s(self) -> float:
        return busy_s() - self._ours_s() - sum(os.times()[:2])


def busy_s() -> float:
    """Processor seconds of all processes since the machine's start, and what its host took."""
    times = psutil.cpu_times()
    busy = times.user + times.nice + times.system + times.irq + times.softirq
    return float(busy + getattr(times, "steal", 0.0))


def wait_for_quiet(most_s: float) -> bool:
    """Returns once less than QUIET_CORES were busy for QUIET_S seconds on end, or False after
    `most_s` seconds."""
    deadline, quiet = time.monotonic() + most_s, 0
    while quiet < QUIET_S:
        if time.monotonic() > deadline:
            return False
        before = busy_s()
        time.sleep(1)
        quiet = quiet + 1 if busy_s() - before < QUIET_CORES else 0
    return True
