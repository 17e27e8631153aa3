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
- Refs whose holder died: `EngineClient` removes its engine's leftovers when that process ends, and
  each engine process at its start removes those of dead processes of this host (`sweep`).
Removing twice is harmless.
"""

import itertools
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path

from services.worker.engine.messages import KvData, SharedRef

FOLDER = Path("/dev/shm") if os.path.isdir("/dev/shm") else Path(tempfile.gettempdir())
_NAME = re.compile(r"penstock-kv-(\d+)-(\d+)-\d+")
_numbers = itertools.count()


def _pid_namespace() -> int:
    """Tells apart containers that share /dev/shm but not their process ids."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _path(name: str) -> Path:
    """Raises ValueError on a name that is not ours: refs may come from another host's message."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"not a KV segment's name: {name!r}")
    return FOLDER / name


def share(data: bytes | memoryview) -> SharedRef:
    """Puts `data` into a new segment. Raises OSError (no room), leaving nothing behind."""
    name = f"penstock-kv-{_pid_namespace()}-{os.getpid()}-{next(_numbers)}"
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
            file.seek(data.offset)
            content = file.read(data.size)
    finally:
        path.unlink(missing_ok=True)
    if len(content) != data.size:
        raise ValueError(f"KV segment {data.name} holds {len(content)} bytes, not {data.size}")
    return content


def discard(data: KvData) -> None:
    """Removes the segment that `data` refers to, if it does and if it still exists."""
    if isinstance(data, SharedRef):
        with suppress(ValueError):
            _path(data.name).unlink(missing_ok=True)


def remove_all_of(pid: int) -> None:
    """Removes every segment that process `pid` made."""
    for path in FOLDER.glob(f"penstock-kv-{_pid_namespace()}-{pid}-*"):
        path.unlink(missing_ok=True)


def sweep() -> None:
    """Removes the segments of processes that are no more."""
    namespace = _pid_namespace()
    for path in FOLDER.glob(f"penstock-kv-{namespace}-*"):
        match = _NAME.fullmatch(path.name)
        if match and not _alive(int(match[2])):
            path.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
