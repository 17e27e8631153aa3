"""KV blocks in files, for all engines of a host that make the same ones.

    ROOT/KIND/XX/HASH-GROUP     32 bytes of SHA-256, then the block as `KvCache.read` has it

KIND is a digest of what the blocks are of: checkpoint, format, shape (tenant and adapter are in the
hash). XX is the first byte of HASH. The digest in a file is of its kind, its name and its content:
one that was torn, changed or renamed is none. The digest has no key: what is read must be a file
of our own user, in folders that nobody else may write to.

Any number of processes share ROOT, and may be killed at any time: whoever finds a name finds a
whole file (own_files.py), unless the machine itself went down. Whoever writes makes room: of all
kinds the files go first that were written or read longest ago; also where the disk is nearly full,
whoever filled it, for all else on it is worth more. Each process counts what there is, not what it
wrote, so the bound holds for all together, but for what others write between its look and its
writing; of several bounds the least. And no kind has more than `MOST_BLOCKS`.
"""

import errno
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from services.common.locks.own_folders import is_own, make_own
from services.worker.engine.kv.tiers.own_files import (
    BEGUN,
    refuse_without_locks,
    sweep,
    write_whole,
)

Name = tuple[bytes, int]
"""A block's hash and its KV group (kv/groups.py)."""
DIGEST_BYTES = 32
MOST_BLOCKS = 2**20
"""Of one kind: a router keeps some 100 bytes for each, and for each worker that may have it."""
_KIND, _SHELF = re.compile("[0-9a-f]{32}"), re.compile("[0-9a-f]{2}")
_BLOCK = re.compile("([0-9a-f]{32})-([0-9]{1,4})")
_MORE = 1 / 16
"""Of the bound: so much more room is made than is needed, to have some for a while."""
_SPARE, _SPARE_BYTES = 1 / 20, 2**30
"""Of the disk, and at most, what is left to others."""
_SETTLED_NS = 2 * 10**9
"""Within so long of its last change a folder may change without another time of change."""


def check_limit(limit: int, block_bytes: int) -> None:
    """Raises ValueError for less than a block."""
    if limit < block_bytes + DIGEST_BYTES:
        raise ValueError(f"kv_disk_bytes {limit} is less than one block ({block_bytes})")


@dataclass
class _Shelf:
    """A folder of blocks as it was when it was looked at."""

    changed_ns: int = -1
    sizes: dict[str, int] = field(default_factory=dict)
    """Of its files, by name."""


class Folder:
    """One process's view. `read` and `ahead` may be called beside the others."""

    def __init__(self, root: Path, kind: str, block_bytes: int, limit: int) -> None:
        """`limit`: bytes of all files under `root`. Raises OSError, also for a folder that others
        may write to or that has no file locks, and ValueError for a limit of less than a block."""
        check_limit(limit, block_bytes)
        self.root, self.limit, self.block_bytes = root, limit, block_bytes
        self.kind = sha256(kind.encode()).hexdigest()[:32]
        self._names: set[Name] = set()
        """Of this kind, that were there at the last look, or were written since."""
        self._added: list[Name] = []
        self._gone: list[Name] = []
        self.evicted = 0
        """Files that this process removed to make room."""
        self.held_bytes = 0
        """Of all kinds, as far as is known."""
        self._shelves: dict[str, _Shelf] = {}
        self._file_bytes = {self.kind: DIGEST_BYTES + block_bytes}
        """By kind, all of whose blocks have one size."""
        make_own(root)
        make_own(root / self.kind)
        refuse_without_locks(root / self.kind)

    def read(self, name: Name) -> bytearray | None:
        """The block; None if there is none, or what is there is not it, which is then removed.
        Raises OSError where the disk fails."""
        path = self._path(name)
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EACCES):
                raise
        else:
            try:
                if content := self._content(file, name):
                    with suppress(OSError):  # it is the time of last use
                        os.utime(file)
                    return content
            finally:
                os.close(file)
        path.unlink(missing_ok=True)
        return None

    def _content(self, file: int, name: Name) -> bytearray | None:
        """Of a file of our own that is the block, and whole."""
        found, size = os.fstat(file), DIGEST_BYTES + self.block_bytes
        if not (is_own(found) and stat.S_ISREG(found.st_mode) and found.st_size == size):
            return None
        digest, content = bytearray(DIGEST_BYTES), bytearray(self.block_bytes)
        came = os.readv(file, [digest, content])
        return content if came == size and digest == self._digest(name, content) else None

    def ahead(self, name: Name) -> None:
        """Has the system read the file into memory, which is not waited for."""
        with suppress(OSError):
            file = os.open(self._path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(file)

    def touch(self, name: Name) -> None:
        """It was used, if it is there."""
        with suppress(OSError):
            os.utime(self._path(name), follow_symlinks=False)

    def remove(self, name: Name) -> None:
        """If it is there. Raises OSError."""
        path = self._path(name)
        self._remove(f"{self.kind}/{path.parent.name}", path.name)

    def write(self, name: Name, content: bytes | bytearray | memoryview) -> bool:
        """Whether it is written: there may be one already. Raises OSError, leaving nothing."""
        path, size = self._path(name), DIGEST_BYTES + len(content)
        with suppress(FileNotFoundError):
            if stat.S_ISREG((found := path.lstat()).st_mode):
                self._note(name, found.st_size)
                return False
        for folder in (self.root, self.root / self.kind, path.parent):
            make_own(folder)
        self._make_room(size)
        write_whole(path, self._digest(name, content), content)
        self._note(name, size)
        return True

    def look(self) -> None:
        """Learns what others have written and removed. Folders that did not change are not read
        again. Raises OSError."""
        there = set(self._find_shelves())
        for shelf in there:
            known, path = self._shelves.get(shelf), self.root / shelf
            with suppress(FileNotFoundError):
                changed_ns = path.stat().st_mtime_ns
                if known is None or known.changed_ns != changed_ns:
                    self._replace(shelf, _read_shelf(path, changed_ns, self._file_bytes))
        for gone in self._shelves.keys() - there:
            self._replace(gone, _Shelf())
            del self._shelves[gone]

    def _replace(self, shelf: str, found: _Shelf) -> None:
        before = self._shelves.get(shelf, _Shelf())
        self._shelves[shelf] = found
        self.held_bytes += sum(found.sizes.values()) - sum(before.sizes.values())
        if shelf.startswith(self.kind):
            now, then = found.sizes.keys(), before.sizes.keys()
            names, went = ({_name(file) for file in files} for files in (now - then, then - now))
            self._added += names - self._names
            self._gone += went & self._names
            self._names |= names
            self._names -= went

    def take_changes(self) -> tuple[list[Name], list[Name]]:
        """Names that came, and names that went, since the last call, as far as that is still so; of
        this kind."""
        added = [name for name in self._added if name in self._names]
        gone = [name for name in self._gone if name not in self._names]
        self._added, self._gone = [], []
        return added, gone

    def _note(self, name: Name, size: int) -> None:
        """It is there; who is told may have found it missing."""
        path = self._path(name)
        sizes = self._shelves.setdefault(f"{self.kind}/{path.parent.name}", _Shelf()).sizes
        self.held_bytes += size - sizes.get(path.name, 0)
        sizes[path.name] = size
        self._names.add(name)
        self._added.append(name)

    def _make_room(self, size: int) -> None:
        """Raises OSError if there is none to make."""
        if self._excess(size) <= 0 and len(self._names) < MOST_BLOCKS:
            return
        self.look()
        if (more := len(self._names) + 1 - MOST_BLOCKS) > 0:
            self._evict((more + MOST_BLOCKS * _MORE) * size, self.kind)
        if (excess := self._excess(size)) > 0:
            self._evict(excess + self.limit * _MORE)
        if self._excess(size) > 0:
            raise OSError(errno.ENOSPC, "the disk is full", str(self.root))

    def _evict(self, goes: float, kind: str = "") -> None:
        """So many bytes go. `kind`: of this one alone."""
        for _, shelf, file in sorted(self._last_used(kind)):
            if goes <= 0:
                break
            goes -= self._remove(shelf, file)
            self.evicted += 1

    def _remove(self, shelf: str, file: str) -> int:
        """Gives the bytes that it had. Raises OSError."""
        (self.root / shelf / file).unlink(missing_ok=True)
        size = self._shelves.setdefault(shelf, _Shelf()).sizes.pop(file, 0)
        self.held_bytes -= size
        if shelf.startswith(self.kind):
            self._names.discard(_name(file))
            self._gone.append(_name(file))
        return size

    def _excess(self, size: int) -> float:
        """Bytes that are to go before so many are written."""
        disk = os.statvfs(self.root)
        spare = min(_SPARE * disk.f_blocks * disk.f_frsize, _SPARE_BYTES)
        too_little = size + spare - disk.f_bavail * disk.f_frsize
        return max(self.held_bytes + size - self.limit, too_little)

    def _last_used(self, kind: str) -> Iterator[tuple[int, str, str]]:
        """Of each block when, on which shelf, and its file's name."""
        for shelf, found in self._shelves.items():
            for file in found.sizes if shelf.startswith(kind) else ():
                if _BLOCK.fullmatch(file):
                    try:
                        used = (self.root / shelf / file).stat().st_mtime_ns
                    except FileNotFoundError:  # another process was quicker: it counts no more
                        used = 0
                    yield used, shelf, file

    def _find_shelves(self) -> Iterator[str]:
        for kind in _folders(self.root, _KIND):
            for shelf in _folders(self.root / kind, _SHELF):
                yield f"{kind}/{shelf}"

    def _path(self, name: Name) -> Path:
        block_hash, group = name
        file = f"{block_hash.hex()}-{group}"
        return self.root / self.kind / file[:2] / file

    def _digest(self, name: Name, content: bytes | bytearray | memoryview) -> bytes:
        block_hash, group = name
        found = sha256(f"{self.kind} {block_hash.hex()}-{group} ".encode())
        found.update(content)
        return found.digest()


def _folders(path: Path, named: "re.Pattern[str]") -> list[str]:
    with suppress(FileNotFoundError, PermissionError), os.scandir(path) as entries:
        return [
            entry.name
            for entry in entries
            if named.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]
    return []


def _read_shelf(path: Path, changed_ns: int, file_bytes: dict[str, int]) -> _Shelf:
    """`changed_ns`: of the folder, before it is read. `file_bytes`: of a block's file, by kind; of
    a kind that is not among them one is asked, and none else: there may be hundreds of thousands,
    of which each costs as much as a step's turn of the interpreter."""
    kind = path.parent.name
    shelf = _Shelf()
    with os.scandir(path) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if BEGUN.fullmatch(entry.name):
                    sweep(Path(entry.path))
                elif _BLOCK.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    if kind not in file_bytes:
                        file_bytes[kind] = entry.stat(follow_symlinks=False).st_size
                    shelf.sizes[entry.name] = file_bytes[kind]
    if time.time_ns() - changed_ns > _SETTLED_NS:
        shelf.changed_ns = changed_ns
    return shelf


def _name(file: str) -> Name:
    block_hash, _, group = file.partition("-")
    return bytes.fromhex(block_hash), int(group)
