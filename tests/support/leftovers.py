"""What a test file leaves behind in the process that ran it, which runs many.

A process with more than 1,024 open files breaks whatever uses `select`, far from the file that did
not close its own. So each file may leave little: what libraries keep for good when they are first
used (gRPC: two pollers, four threads), and fixtures of the whole session.
"""

import gc
import os
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Self

import psutil

AT_MOST = 16
"""More than before the file, of each kind."""
IN_ALL_AT_MOST = 200


@dataclass(frozen=True, slots=True)
class Held:
    """What this process has, counted by what it is."""

    files: Counter[str]
    threads: Counter[str]
    children: Counter[str]

    @classmethod
    def now(cls) -> Self:
        return cls(
            _files(),
            Counter(thread.name for thread in threading.enumerate()),
            _children(),
        )

    def too_much(self, before: Self) -> list[str]:
        """What of it a test file should have ended."""
        found = []
        for kind in ("files", "threads", "children"):
            there: Counter[str] = getattr(self, kind)
            more = there.total() - getattr(before, kind).total()
            if more > AT_MOST or (more > 0 and there.total() > IN_ALL_AT_MOST):
                told = (there - getattr(before, kind)).most_common(8)
                found.append(f"{more} {kind} of {there.total()}: {dict(told)}")
        return found


def left(before: Held) -> list[str]:
    """What was not there before, if it is too much. What nobody holds any more does not count."""
    if not Held.now().too_much(before):
        return []
    gc.collect()
    return Held.now().too_much(before)


def _files() -> Counter[str]:
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # closed since, as that of the folder itself
            continue
        found[target.partition(":[")[0]] += 1
    return found


def _children() -> Counter[str]:
    found: Counter[str] = Counter()
    for child in psutil.Process().children():
        try:
            found[" ".join(child.cmdline()[:4]) or child.name()] += 1
        except psutil.Error:
            continue
    return found
