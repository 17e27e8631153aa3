"""The Penstock that runs on this machine, as the commands find it. Imports next to nothing.

One runs per data directory: it holds a lock on a file there, which the system takes back however
it ends. Its process id alone would tell nothing: after a crash another process may have it, in a
container likely the next Penstock itself.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.common.config import Settings

_MOMENT_S = 0.5


@dataclass(frozen=True)
class Running:
    """What a running Penstock wrote down for the other commands."""

    url: str
    grpc: str  # host:port of the public gRPC service
    redis_url: str
    namespace: str
    key: str
    pid: int


def state_file(settings: "Settings") -> Path:
    return settings.data_dir / "running.json"


def find_running(settings: "Settings") -> Running | None:
    """The Penstock that was started with this data directory, if it is up."""
    running = last_running(settings)
    return running if running is not None and running.pid == _holder(settings) else None


def last_running(settings: "Settings") -> Running | None:
    """What a Penstock wrote down that runs, or ended without tidying up."""
    with suppress(FileNotFoundError, ValueError, TypeError):
        return Running(**json.loads(state_file(settings).read_text()))
    return None


@contextmanager
def holding(settings: "Settings") -> Iterator[None]:
    """Makes this process the one that runs with the data directory, a folder that exists.

    Raises RuntimeError when another one does, be it that it only starts or ends.
    """
    _lock_file(settings).touch(mode=0o600)
    with _lock_file(settings).open("a+") as file:
        if not _locked(file.fileno()):
            raise RuntimeError(f"{_told(settings)}; stop it, or choose another PENSTOCK_DATA_DIR")
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _locked(descriptor: int) -> bool:
    """Whether the lock is ours. A command that looks who has it (`_holder`) has it for a moment."""
    patience = time.monotonic() + _MOMENT_S
    while time.monotonic() < patience:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(_MOMENT_S / 20)
    return False


def _told(settings: "Settings") -> str:
    if (other := find_running(settings)) is not None:
        return f"Penstock already runs here at {other.url} (pid {other.pid})"
    return f"Another Penstock starts or ends with {settings.data_dir} (pid {_holder(settings)})"


def _holder(settings: "Settings") -> int | None:
    """The process that has the lock."""
    with suppress(FileNotFoundError, ValueError), _lock_file(settings).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(file.read())
    return None


def _lock_file(settings: "Settings") -> Path:
    return settings.data_dir / "running.lock"
