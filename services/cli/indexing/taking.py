"""Brings a store to what a folder holds.

A changed file is indexed before its earlier version leaves, so that searches find one of them at
any time; broken off in between, the next round goes on from what it finds.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from services.cli.indexing.folder import Found, Mark
from services.cli.indexing.remote_store import Held, RemoteStore, digest

_ON_THE_WAY = 8  # files, so that the server has always one to go on with

Report = Callable[[str, str, str], None]
"""Is told of each file as it is done: what became of it, its path, why (if it failed)."""


@dataclass
class Taken:
    """What became of each path."""

    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)  # from the folder, and still in the store
    failed: dict[str, str] = field(default_factory=dict)  # why

    @property
    def did_something(self) -> bool:
        return bool(self.added or self.changed or self.removed or self.failed)


class _Coming(NamedTuple):
    """A file on its way into the store, and what it takes the place of."""

    path: str
    id: str
    earlier: list[Held]


class Taking:
    """`prune`: what left the folder leaves the store."""

    def __init__(self, store: RemoteStore, folder: Path, prune: bool, report: Report) -> None:
        self._store = store
        self._folder = folder
        self._prune = prune
        self._report = report
        self._digests: dict[str, tuple[Mark, str]] = {}  # of files as earlier rounds read them
        self._coming: deque[_Coming] = deque()
        self._taken = Taken()

    def round(self, found: Found) -> Taken:
        """Raises as RemoteStore does."""
        self._taken, held = Taken(), self._store.held()
        self._coming.clear()
        for path, mark in found.files.items():
            self._begin(path, mark, held.get(path, []))
            if len(self._coming) >= _ON_THE_WAY:
                self._end(self._coming.popleft())
        while self._coming:
            self._end(self._coming.popleft())
        for path in sorted(held.keys() - found.files.keys()):
            self._leave(path, held[path])
        return self._taken

    def _begin(self, path: str, mark: Mark, held: list[Held]) -> None:
        try:
            own = self._digest(path, mark)
            same = [one for one in held if one.sha256 == own and one.status != "failed"]
            others = [one for one in held if one not in same[:1]]
            if not same:
                id = self._store.add(path, (self._folder / path).read_bytes())
            elif same[0].status == "completed":
                return self._stay(path, others)
            else:
                id = same[0].id
        except OSError as error:
            self._fail(path, error.strerror or str(error))
        except RuntimeError as error:  # the server does not take it; others may be well
            self._fail(path, str(error))
        else:
            self._coming.append(_Coming(path, id, others))

    def _digest(self, path: str, mark: Mark) -> str:
        known = self._digests.get(path)
        if known is None or known[0] != mark:
            known = self._digests[path] = mark, digest((self._folder / path).read_bytes())
        return known[1]

    def _stay(self, path: str, others: list[Held]) -> None:
        self._drop(others)
        self._taken.unchanged.append(path)
        self._report("unchanged", path, "")

    def _end(self, one: _Coming) -> None:
        """What cannot be indexed leaves the store again; its earlier version stays."""
        if why := self._store.outcome(one.id):
            self._store.drop(one.id)
            return self._fail(one.path, why)
        self._drop(one.earlier)
        if one.earlier:
            self._taken.changed.append(one.path)
        else:
            self._taken.added.append(one.path)
        self._report("changed" if one.earlier else "added", one.path, "")

    def _leave(self, path: str, held: list[Held]) -> None:
        if not self._prune:
            self._taken.gone.append(path)
            return
        self._drop(held)
        self._taken.removed.append(path)
        self._report("removed", path, "")

    def _drop(self, held: list[Held]) -> None:
        for one in held:
            self._store.drop(one.id)

    def _fail(self, path: str, why: str) -> None:
        self._taken.failed[path] = why
        self._report("failed", path, why)
