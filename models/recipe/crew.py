"""Threads that share the weights of one lesson and do a step's parts side by side.

Each has gradients of its own, summed at the end of the step. On a CPU this beats handing every
small operation to all cores, the more so when the machine has other work: the threads meet once a
step.
"""

import copy
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import torch

from models.recipe.batches import Row
from models.recipe.lessons import Figures, Lesson


class Tally:
    """Sums of a lesson's figures since the last report."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        self.lock = Lock()

    def add(self, figures: Figures) -> None:
        with self.lock:
            for name, (much, of) in figures.items():
                sums = self.sums[name]
                self.sums[name] = sums[0] + much, sums[1] + of

    def __str__(self) -> str:
        return " ".join(f"{n} {a / max(1, b):.3f}" for n, (a, b) in sorted(self.sums.items()))


class Crew:
    """The threads, each with a replica of the lesson."""

    def __init__(self, lesson: Lesson, threads: int, half: bool) -> None:
        """`half`: in bfloat16 where that is exact enough."""
        self.half = half
        self.replicas = [lesson, *(copy.deepcopy(lesson) for _ in range(threads - 1))]
        for replica in self.replicas[1:]:
            for mine, shared in zip(replica.parameters(), lesson.parameters(), strict=True):
                mine.data = shared.data
        # PyTorch's own number of threads is set thread by thread.
        self.threads = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def learn(self, rows: list[Row], tally: Tally) -> None:
        """Leaves the gradient of one step, of the rows' mean loss, in the lesson's parameters."""
        lesson = self.replicas[0]
        shares = _dealt(list(lesson.parts(rows)), lesson, len(self.replicas))

        def work(replica: Lesson, share: list[list[Row]]) -> None:
            for part in share:
                lost, figures = replica.lose(part, self.half)
                (lost / len(rows)).backward()
                tally.add(figures)

        list(self.threads.map(work, self.replicas, shares))
        for replica in self.replicas[1:]:
            for shared, mine in zip(lesson.parameters(), replica.parameters(), strict=True):
                if mine.grad is not None:
                    shared.grad = mine.grad if shared.grad is None else shared.grad.add_(mine.grad)
                    mine.grad = None
        lesson.hold()


def _dealt(parts: list[list[Row]], lesson: Lesson, hands: int) -> list[list[list[Row]]]:
    """The parts in `hands` shares of like cost, the same each time."""
    shares: list[list[list[Row]]] = [[] for _ in range(hands)]
    costs = [0] * hands
    for part in sorted(parts, key=lambda part: -lesson.cost(part[-1]) * len(part)):
        least = costs.index(min(costs))
        shares[least].append(part)
        costs[least] += lesson.cost(part[-1]) * len(part)
    return shares
