"""Results of searches, kept in this process: bytes of them all and of each tenant are bounded, the
ones used last are kept longest.

A result is known by its key, which holds all that was asked (searches.py), and is apart by tenant
besides. It is as the search left it: whoever takes it out gets a copy.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from services.common.fairness.shares import Shares
from services.retrieval.cache.revisions import Revision

_OVERHEAD = 1024  # bytes of an entry beside its own: so their number is bounded, too
_LARGEST = 8  # of them make all that there is room for: a larger one is not kept
_ALIKE = 256  # of one kind are compared at most, the ones used last


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """`kind`: the key without the query."""

    tenant: str
    kind: bytes
    key: bytes
    revisions: tuple[Revision, ...]
    made: float  # monotonic
    took_s: float
    reply: bytes  # SearchReply
    vector: np.ndarray  # of the query, at unit length

    @property
    def size(self) -> int:
        return len(self.reply) + self.vector.nbytes + _OVERHEAD


class Results:
    """Of several that have the same key the latest is kept, whatever its revision."""

    def __init__(self, max_bytes: int) -> None:
        self._room = Shares(max_bytes)
        self._of: dict[str, OrderedDict[bytes, Result]] = {}
        self._kinds: dict[tuple[str, bytes], OrderedDict[bytes, Result]] = defaultdict(OrderedDict)

    @property
    def held(self) -> int:
        """Bytes."""
        return self._room.taken

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def get(self, tenant: str, key: bytes) -> Result | None:
        own = self._of.get(tenant)
        found = own.get(key) if own else None
        if found is not None:
            self._used(found)
        return found

    def alike(self, tenant: str, kind: bytes, vector: np.ndarray) -> list[tuple[float, Result]]:
        """Of one kind, with the cosine of their queries, the nearest first."""
        if (tenant, kind) not in self._kinds:
            return []
        them = list(self._kinds[tenant, kind].values())[-_ALIKE:]
        scores = np.stack([one.vector for one in them]) @ vector
        return [(float(scores[n]), them[n]) for n in np.argsort(-scores, kind="stable")]

    def put(self, result: Result) -> None:
        self.drop(result.tenant, [result.key])
        if result.size * _LARGEST > self._room.total:
            return
        while not self._room.take(result.tenant, result.size):
            holder = result.tenant if self._of.get(result.tenant) else self._largest()
            self.drop(holder, [next(iter(self._of[holder]))])
        self._of.setdefault(result.tenant, OrderedDict())[result.key] = result
        self._kinds[result.tenant, result.kind][result.key] = result

    def drop(self, tenant: str, keys: Iterable[bytes]) -> None:
        own = self._of.get(tenant) or OrderedDict()
        for key in keys:
            if (gone := own.pop(key, None)) is None:
                continue
            self._room.give_back(tenant, gone.size)
            kind = self._kinds[tenant, gone.kind]
            del kind[key]
            if not kind:
                del self._kinds[tenant, gone.kind]
        if not own:
            self._of.pop(tenant, None)

    def _used(self, result: Result) -> None:
        self._of[result.tenant].move_to_end(result.key)
        self._kinds[result.tenant, result.kind].move_to_end(result.key)

    def _largest(self) -> str:
        return max(self._of, key=self._room.held)
