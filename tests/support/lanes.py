"""How the tests are shared among processes (`pytest -n auto`): a file at a time.

Most of a test's time is spent waiting, for servers that start above all. So there is a process
more than there are cores. All but one of them begin with what starts whole stacks, which takes
longest; that one begins with the many short files, which fill the time in which the others wait.
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

_LONGEST = ("ray", "tests/chaos/", "penstock", "tests/e2e/", "tests/integration/")
"""Beginnings of scopes, to begin with. What is not here is short."""


def processes() -> int:
    """How many there are to be."""
    return min(len(os.sched_getaffinity(0)) + 1, _MOST)


class Lanes(LoadScopeScheduling):
    """A scope is a file, or the files that share something."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return _GROUPS.get(file, file)

    def _assign_work_unit(self, node: WorkerController) -> None:
        begins_with_short = node is self.nodes[0]
        choose = max if begins_with_short else min
        self.workqueue.move_to_end(choose(self.workqueue, key=_rank), last=False)
        super()._assign_work_unit(node)


def _rank(scope: str) -> int:
    """The longer it takes, the lower."""
    ranks = (rank for rank, start in enumerate(_LONGEST) if scope.startswith(start))
    return next(ranks, len(_LONGEST))
