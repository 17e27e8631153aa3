"""A folder for the sockets of a process and its children, which no other user can enter.

It lies in the system's temporary folder, not in the data directory: a socket's path has at most 107
bytes (103 on a Mac), a data directory's any number, and some file systems (those that a virtual
machine shares with its host) hold no sockets at all. A lock says that its owner lives: folders
without one are removed by the next process that makes one, and who tidies up leaves the others.
"""

import fcntl
import os
import shutil
import stat
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

_PREFIX = "penstock-run-"


class SocketFolder:
    """A new folder (0700), which goes with this object, or with the process."""

    def __init__(self) -> None:
        _sweep()
        self.path, descriptor = _locked_folder()
        self.close = weakref.finalize(self, _remove, self.path, descriptor)


def may_be_one(folder: Path) -> bool:
    """Whether it may be such a folder of this user's."""
    try:
        found = folder.lstat()
    except (OSError, ValueError):
        return False
    return stat.S_ISDIR(found.st_mode) and _is_private(found)


def _is_private(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == 0o700


def _locked_folder() -> tuple[Path, int]:
    """A new one; locked as long as the descriptor is open."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        with suppress(FileNotFoundError):  # another process swept before it was locked
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if path.exists():
                return path, descriptor
            os.close(descriptor)


def _sweep() -> None:
    """Removes the folders of this user's processes that are no more."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # a link, or removed meanwhile
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            if _is_dead(descriptor):
                _remove(path, descriptor)
            else:
                os.close(descriptor)


def _is_dead(descriptor: int) -> bool:
    """Whether the folder is this user's and nobody's; it is locked then."""
    if not _is_private(os.fstat(descriptor)):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(path: Path, descriptor: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)
