"""How the tests are shared among processes (`pytest -n auto`): a file at a time.

One process begins with what computes; others begin with what starts whole stacks, which takes
longest and mostly waits. The short files, of which most are and many wait, come last for them, and
first for one process that there is besides: it leaves stacks to the others, of which there are as
many as cores. A stack is a dozen processes, and more that start at once than there are cores run
into time limits of their own, as Ray's 15 s for its agents.
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
        if node is self.nodes[0]:
            scope = max(self.workqueue, key=_rank)
        elif self._leaves_stacks(node):
            short = [scope for scope in self.workqueue if _rank(scope) >= 0]
            if not short:
                return node.shutdown()
            scope = min(short, key=_rank)
        else:
            scope = min(self.workqueue, key=_rank)
        self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)

    def _leaves_stacks(self, node: WorkerController) -> bool:
        """Where others are there for them: not what comes in place of one that crashed."""
        there = [one for one in self.nodes if not one.shutting_down]
        return len(there) > 2 and node is there[-1]


def _rank(scope: str) -> int:
    """Less than 0 is what waits, more is what computes."""
    for rank, start in enumerate(_WAIT):
        if scope.startswith(start):
            return rank - len(_WAIT)
    for rank, start in enumerate(_COMPUTE):
        if scope.startswith(start):
            return len(_COMPUTE) - rank
    return 0
