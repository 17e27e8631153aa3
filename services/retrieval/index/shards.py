"""The embedded store: a shard for each model that the service has, and those of models before.

One process has the folder of all. A document is in one shard: what is written goes to that of the
model that embedded it, and leaves the others when it is whole there. Until then searches find it by
BM25 alone, for which the model does not matter.
"""

import errno
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from services.retrieval.index.earlier import earlier_points
from services.retrieval.index.layout import Layout
from services.retrieval.index.points import (
    BOTH,
    Condition,
    Every,
    Found,
    Hit,
    Point,
    Question,
    StoreUnusableError,
    best_of,
)
from services.retrieval.index.scopes import publish_unscoped
from services.retrieval.index.shard import MADE_BY, Shard, has_room

log = logging.getLogger(__name__)

_UNREADABLE = ".unreadable"  # a folder's suffix
_LOCK_S = 3.0  # for an earlier process to end, whose service was killed
_ALL = Every(())
_QUICKLY = 50_000  # points: a second


class Shards:
    """Raises StoreUnusableError where another process has them."""

    def __init__(self, layout: Layout, *others: Layout) -> None:
        self._lock = _lock(layout.root)
        self._folder = layout.folder
        self._first = layout.fingerprint
        layouts = {one.fingerprint: one for one in (layout, *others)}
        self._own = {fingerprint: _own(one) for fingerprint, one in layouts.items()}
        self._earlier = dict(_earlier(layout, {one.folder for one in layouts.values()}))
        self._unreadable = any(layout.root.glob(f"*{_UNREADABLE}"))
        for shard in self._all():
            shard.vacuum()
        self.moved = self._move(layout)  # points that versions before this one stored
        for shard in self._all():
            publish_unscoped(shard)

    def search(self, question: Question, model: str = "") -> Found:
        own = self._of_model(model)
        found = own.search(question)
        by_words = replace(question, dense=None, weights=BOTH, closely=0)
        hits, incomplete = list[list[Hit]](), self._unreadable
        for name, shard in chain(self._own.items(), self._earlier.items()):
            if shard is own:
                continue
            try:
                hits.append(shard.search(by_words))
            except Exception as error:  # the library knows no other
                log.error("%s cannot be searched: %s", name, error)
                incomplete = True
        return Found(found, best_of(hits, question.limit), incomplete)

    def put(self, points: Sequence[Point], model: str = "") -> None:
        """On a full disk the library would end with the process, again at each start."""
        if not has_room(self._folder, 0):
            raise OSError(errno.ENOSPC, "the disk is full", str(self._folder))
        self._of_model(model).put(points)

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

    def payloads(
        self, where: Condition, limit: int, keys: Sequence[str], model: str = ""
    ) -> list[dict[str, Any]]:
        return self._of_model(model).payloads(where, limit, keys)

    def count(self, where: Condition, model: str = "") -> int:
        return self._of_model(model).count(where)

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
        return chain(self._own.values(), self._earlier.values())

    def _of_model(self, fingerprint: str) -> Shard:
        return self._own[fingerprint or self._first]

    def _move(self, layout: Layout) -> int:
        """Takes over what versions before this one stored: how many points."""
        moved = 0
        with earlier_points(layout) as (theirs, batches):
            for points in batches:
                self._of(theirs).put(points)
                moved += len(points)
            self.flush()
        return moved

    def _of(self, theirs: Layout) -> Shard:
        if theirs.fingerprint in self._own:
            return self._own[theirs.fingerprint]
        if theirs.folder not in self._earlier:
            self._earlier[theirs.folder] = Shard(theirs)
        return self._earlier[theirs.folder]


def _own(layout: Layout) -> Shard:
    try:
        return Shard(layout)
    except Exception as error:
        raise StoreUnusableError(
            f"the embedded vector store in {layout.folder} cannot be read ({error}): restore it, "
            "or move it away and attach the stores' files again",
            "store_unreadable",
        ) from error


def _earlier(layout: Layout, own: Container[Path]) -> Iterator[tuple[Path, Shard]]:
    """Those besides `own` that hold something; the others are deleted. One that cannot be read is
    put aside for good: what it missed of deletions would be found again later.
    """
    for made_by in layout.root.glob(f"*/{MADE_BY}"):
        folder, model = made_by.parent, json.loads(made_by.read_text())["embedding_model"]
        if folder in own:
            continue
        try:
            shard = Shard(layout._replace(fingerprint=folder.name, model=model, dimension=0))
        except Exception as error:
            log.error("%s, of %s, cannot be read and is put aside: %s", folder, model, error)
            made_by.unlink()
            folder.rename(folder.with_suffix(_UNREADABLE))
            continue
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
