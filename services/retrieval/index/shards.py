"""The embedded store: a shard for the present model, and those of models before it.

One process has the folder of all. A document is in one shard: what is written goes to the present
model's, and leaves the earlier ones when it is whole there. Until then searches find it by BM25
alone, for which the model does not matter.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from services.retrieval.index.earlier import earlier_points
from services.retrieval.index.layout import Layout
from services.retrieval.index.points import (
    Condition,
    Every,
    Found,
    Point,
    Question,
    StoreUnusableError,
    best_of,
)
from services.retrieval.index.shard import MADE_BY, Shard

_LOCK_S = 3.0  # for an earlier process to end, whose service was killed
_ALL = Every(())
_AT_ONCE = 1024
_QUICKLY = 50_000  # points: a second


class Shards:
    """Raises StoreUnusableError where another process has them."""

    def __init__(self, layout: Layout) -> None:
        self._lock = _lock(layout.root)
        self._own = Shard(layout)
        self._earlier = dict(_earlier(layout))
        for shard in self._all():
            shard.vacuum()
        self.moved = self._move(layout)  # points that versions before this one stored

    def search(self, question: Question) -> Found:
        found = self._own.search(question)
        by_words = replace(question, dense=None)
        hits = [shard.search(by_words).sparse for shard in self._earlier.values()]
        return found._replace(earlier=best_of(hits, question.limit))

    def put(self, points: Sequence[Point]) -> None:
        self._own.put(points)

    def supersede(self, where: Condition) -> None:
        for shard in self._earlier.values():
            while ids := shard.ids(where, _AT_ONCE):
                shard.delete(ids)

    def change(self, where: Condition, payload: Mapping[str, Any]) -> None:
        for shard in self._all():
            shard.change(where, payload)

    def delete(self, ids: Sequence[str]) -> None:
        for shard in self._all():
            shard.delete(ids)

    def ids(self, where: Condition, limit: int) -> list[str]:
        found: list[str] = []
        for shard in self._all():
            if len(found) < limit:
                found += shard.ids(where, limit - len(found))
        return found

    def payloads(self, where: Condition, limit: int, keys: Sequence[str]) -> list[dict[str, Any]]:
        return self._own.payloads(where, limit, keys)

    def count(self, where: Condition) -> int:
        return self._own.count(where)

    def flush(self) -> None:
        for shard in self._all():
            shard.flush()

    def vacuum(self) -> None:
        """Nothing is answered meanwhile, so a large store waits for the next start."""
        for shard in self._all():
            if shard.count(_ALL) <= _QUICKLY:
                shard.vacuum()

    def close(self) -> None:
        for shard in self._all():
            shard.close()
        os.close(self._lock)

    def _all(self) -> Iterator[Shard]:
        return chain([self._own], self._earlier.values())

    def _move(self, layout: Layout) -> int:
        """Takes over what versions before this one stored: how many points."""
        moved = 0
        with earlier_points(layout) as (theirs, batches):
            for points in batches:
                self._of(theirs, layout).put(points)
                moved += len(points)
            self.flush()
        return moved

    def _of(self, theirs: Layout, ours: Layout) -> Shard:
        if theirs.folder == ours.folder:
            return self._own
        if theirs.folder not in self._earlier:
            self._earlier[theirs.folder] = Shard(theirs)
        return self._earlier[theirs.folder]


def _earlier(layout: Layout) -> Iterator[tuple[Path, Shard]]:
    """Those of other models that hold something; the others are deleted."""
    for made_by in layout.root.glob(f"*/{MADE_BY}"):
        folder, model = made_by.parent, json.loads(made_by.read_text())["embedding_model"]
        if folder == layout.folder:
            continue
        shard = Shard(layout._replace(fingerprint=folder.name, model=model))
        if shard.count(_ALL):
            yield folder, shard
        else:
            shard.close()
            made_by.unlink()  # first: without it what is left of a folder is none
            shutil.rmtree(folder)


def _lock(root: Path) -> int:
    """Held until this process ends, however it does."""
    for folder in (root.parent, root):  # each for its owner alone
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    until = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError:
            if time.monotonic() > until:
                raise StoreUnusableError(
                    f"the embedded vector store in {root} is in use by another process: stop it, "
                    "set another PENSTOCK_DATA_DIR, or run a Qdrant server and set QDRANT_URL",
                    "store_locked",
                ) from None
            time.sleep(0.05)
