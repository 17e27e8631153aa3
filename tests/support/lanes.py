"""How the tests are shared among processes (`pytest -n auto`): a file at a time.

Most of a test's time is spent waiting, for servers that start above all. So there is a process more
than there are cores. All but one of them begin with what starts whole stacks, which takes longest;
that one begins with what computes. The short files, of which most are, come last for all of them,
so that they end together.
"""

import os

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

_MOST = 8  # each imports all tests, half a gigabyte

_TOGETHER = {
    # Two Rays on one machine would hand out the same ports.
    "ray": (
        "tests/integration/test_ray.py",
        "tests/integration/test_chart_runs.py",
        "tests/integration/test_start.py",
    ),
    # They share one Penstock.
    "penstock": (
        "tests/e2e/test_whole_way.py",
        "tests/e2e/test_prometheus.py",
        "tests/e2e/test_chart_ask.py",
    ),
}
_GROUPS = {file: group for group, files in _TOGETHER.items() for file in files}

# Beginnings of scopes, the longest first.
_WAIT = (
    "ray",
    "tests/chaos/test_lost_parts.py",
    "penstock",
    "tests/integration/test_drain.py",
    "tests/e2e/",
    "tests/chaos/",
    "tests/integration/",
)
_COMPUTE = ("tests/models/", "tests/kernels/", "tests/observability/", "tests/unit/engine/")


def processes() -> int:
    """How many there are to be."""
    return min(len(os.sched_getaffinity(0)) + 1, _MOST)


class Lanes(LoadScopeScheduling):
    """A scope is a file, or the files that share something."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return _GROUPS.get(file, file)

    def _assign_work_unit(self, node: WorkerController) -> None:
        computes = node is self.nodes[0]
        scope = (max if computes else min)(self.workqueue, key=_rank)
        self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)


def _rank(scope: str) -> int:
    """Less than 0 is what waits, more is what computes."""
    for rank, start in enumerate(_WAIT):
        if scope.startswith(start):
            return rank - len(_WAIT)
    for rank, start in enumerate(_COMPUTE):
        if scope.startswith(start):
            return len(_COMPUTE) - rank
    return 0
