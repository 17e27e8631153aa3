"""A tier below the device whose disk answers as it is told to, at once or later."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from services.worker.engine.kv.tiers.disk import Arrived
from services.worker.engine.kv.tiers.folder import Name
from services.worker.engine.kv.tiers.loading import Loading, Wanted
from services.worker.engine.kv.tiers.pace import Pace
from services.worker.engine.outputs import KvEvents, TierCounts

Answer = Literal["now", "later", "gone", "full"]
ANSWERS: list[Answer] = ["now", "now", "now", "later", "later", "gone", "full"]
"""Of a look at the disk: the next block comes; none comes for now; the next one is not there any
more. Of a block to be stored: it is there, or, "full", it is not."""


class MemoryTier:
    """As `DiskTier`."""

    has_events = False
    news = -1

    def __init__(self, answers: Iterator[Answer]) -> None:
        self._answers = answers
        self._held: dict[Name, bytes] = {}
        self._forgotten: set[Name] = set()
        self._reads: list[tuple[Loading, Wanted]] = []
        self.counts = TierCounts()
        self.pace = Pace()

    def holds(self, block_hash: bytes, group: int) -> bool:
        return (block_hash, group) in self._held

    def store(self, names: Sequence[Name], read: Callable[[list[int]], memoryview]) -> None:
        for place, name in enumerate(names):
            if next(self._answers, "now") != "full":
                self._held[name] = bytes(read([place]))

    def forget(self, names: Iterable[Name]) -> None:
        for name in names:
            self._held.pop(name, None)
            self._forgotten.add(name)

    def ahead(self, names: list[Name]) -> None:
        assert all(name in self._held for name in names)

    def load(self, wanted: Sequence[Wanted]) -> Loading:
        loading = Loading(wanted)
        self._reads += [(loading, one) for one in wanted]
        return loading

    def give_up(self, loading: Loading, late: bool = False) -> None:
        assert not late
        loading.given_up = True

    def wait(self, seconds: float) -> None:
        pass

    def take(self) -> Iterator[Arrived]:
        while self._reads and (answer := next(self._answers, "now")) != "later":
            loading, wanted = self._reads.pop(0)
            if loading.given_up:
                continue
            if answer == "gone" or self._is_forgotten(wanted.name):
                self._held.pop(wanted.name, None)
                loading.num_missed += 1
            else:
                content = self._held.get(wanted.name)
                assert content is not None, 'it was there, and nothing goes but by "gone"'
                yield Arrived(loading, wanted, bytearray(content))

    def _is_forgotten(self, name: Name) -> bool:
        """And was not stored again."""
        return name in self._forgotten and name not in self._held

    def take_events(self) -> list[KvEvents]:
        return []

    def close(self) -> None:
        pass
