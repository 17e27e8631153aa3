"""Unix time that never jumps: one monotonic clock, set to the wall clock once per process."""

import time

_OFFSET_NS = time.time_ns() - time.monotonic_ns()


def now_ns() -> int:
    """Nanoseconds since the Unix epoch. Differences are exact durations."""
    return time.monotonic_ns() + _OFFSET_NS
