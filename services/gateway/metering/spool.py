"""What has ended and Redis could not take yet, bounded."""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, islice

from services.gateway.metering.run import UNCHARGED, Run


class Spool:
    """Of more than `most` those go first that charge nothing: what is only held, which ends with
    its lease, then what used nothing; of charges the oldest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: tuple[OrderedDict[str, Run], ...] = tuple(OrderedDict() for _ in range(3))

    def __len__(self) -> int:
        return sum(map(len, self._waiting))

    def __iter__(self) -> Iterator[Run]:
        """The dearest first, and of those the oldest."""
        return chain.from_iterable(of.values() for of in reversed(self._waiting))

    def some(self, count: int) -> list[Run]:
        return list(islice(self, count))

    def put(self, run: Run) -> Run | None:
        """Returns what has to go for it."""
        self._waiting[_worth(run)][run.id] = run
        if len(self) <= self._most:
            return None
        cheapest = next(of for of in self._waiting if of)
        return cheapest.popitem(last=False)[1]

    def take_out(self, run: Run) -> None:
        for of in self._waiting:
            of.pop(run.id, None)


def _worth(run: Run) -> int:
    if run.status in UNCHARGED:
        return 0
    return 2 if any(run.used) else 1
