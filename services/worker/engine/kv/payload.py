"""KV block data between processes: inline bytes, or a shared-memory segment on one host.

A segment is a file in /dev/shm (POSIX shared memory; the temporary folder where that is missing).
It is written once, whole, before its name is told to anybody.

Who removes a segment: the one process that holds its `SharedRef`.
- The engine that exports makes it and gives the ref away with the StepOutput.
- `EngineClient` passes the ref to its caller, who owns it from then on and either hands it to
  another engine's `write_kv`, which always removes it (also for a request that is gone or refused),
  or calls `discard`.
- A hand-over between workers may break off anywhere, so the sending worker stays the owner until
  the other has confirmed the commit: else it discards all that it sent (kv_sender.py).
- Refs whose holder died: `EngineClient` when its engine ended, and each engine process at its
  start, remove the segments of processes that are no more (`sweep`).
Removing twice is harmless.

Whether a process lives cannot be told by its id: containers may share /dev/shm and not their ids.
So each process that makes segments holds a lock on a file of its own, and names its segments after
it. The kernel drops the lock with the process, and whoever can take it may remove all of that name.
"""

import fcntl
import os
import re
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

from services.worker.engine.messages import KvData, SharedRef

FOLDER = Path("/dev/shm") if os.path.isdir("/dev/shm") else Path(tempfile.gettempdir())
_OWNER = re.compile(r"penstock-kv-[0-9a-f]{16}")
_NAME = re.compile(rf"{_OWNER.pattern}-\d+")


class _Owner:
    """This process, as its segments' names say it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pid = os.getpid()
        self.name = f"penstock-kv-{uuid.uuid4().hex[:16]}"
        self.segments = 0
        self._lock = _locked(folder / self.name)  # held as long as this process lives

    def new_name(self) -> str:
        self.segments += 1
        return f"{self.name}-{self.segments}"

    def close(self) -> None:
        """In a fork it leaves the lock to whom it is a copy of."""
        os.close(self._lock)


_owner: _Owner | None = None


def _this_process() -> _Owner:
    global _owner
    if _owner is None or (_owner.folder, _owner.pid) != (FOLDER, os.getpid()):
        if _owner is not None:
            _owner.close()
        _owner = _Owner(FOLDER)
    return _owner


def _locked(path: Path) -> int:
    """Makes the file and locks it, for as long as the descriptor that it returns is open."""
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDONLY, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):  # `sweep` came between the two
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)


def _path(name: str) -> Path:
    """Raises ValueError on a name that is not ours: refs may come from another host's message."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"not a KV segment's name: {name!r}")
    return FOLDER / name


def share(data: bytes | memoryview) -> SharedRef:
    """Puts `data` into a new segment. Raises OSError (no room), leaving nothing behind."""
    name = _this_process().new_name()
    path = _path(name)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with open(descriptor, "wb", buffering=0) as file:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
    except BaseException:
        path.unlink()
        raise
    return SharedRef(name, 0, len(data))


def take(data: KvData) -> bytes | bytearray | memoryview:
    """The bytes of `data`; a segment is removed. Raises ValueError or OSError if there is none."""
    if not isinstance(data, SharedRef):
        return data
    path = _path(data.name)
    try:
        with open(path, "rb", buffering=0) as file:
            there = os.fstat(file.fileno()).st_size - data.offset
            if there < data.size:
                raise ValueError(f"KV segment {data.name} holds {there} bytes, not {data.size}")
            file.seek(data.offset)
            content = bytearray(data.size)
            rest = memoryview(content)
            while rest:  # the kernel gives 2 GiB at a time, at most
                count = file.readinto(rest)
                if not count:
                    raise ValueError(f"KV segment {data.name} became shorter")
                rest = rest[count:]
    finally:
        path.unlink(missing_ok=True)
    return content


def discard(data: KvData) -> None:
    """Removes the segment that `data` refers to, if it does and if it still exists."""
    if isinstance(data, SharedRef):
        with suppress(ValueError):
            _path(data.name).unlink(missing_ok=True)


def sweep() -> None:
    """Removes the segments of processes that are no more, wherever they ran."""
    for owner in FOLDER.glob("penstock-kv-*"):
        if not _OWNER.fullmatch(owner.name):
            continue
        with suppress(OSError):  # another user's, or already removed
            # Any user may put anything there: opening a pipe would wait for who writes into it.
            file = os.open(owner, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for segment in FOLDER.glob(f"{owner.name}-*"):
                    segment.unlink(missing_ok=True)
                owner.unlink(missing_ok=True)
            finally:
                os.close(file)
