"""Files that a process finds whole or not at all, and that nobody but our user can have written.

A file is written under a name of its own, whose lock its writer holds, and renamed. A name whose
lock is free is a dead writer's.
"""

import errno
import fcntl
import os
import re
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

BEGUN = re.compile(r"\.[0-9a-f]{32}")
"""The name of one that is being written."""
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def refuse_without_locks(folder: Path) -> None:
    """Raises OSError if its file system has none: nothing could be written there."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            words = "its file system has no file locks (flock)"
            raise OSError(error.errno, words, str(folder)) from error


def sweep(begun: Path) -> None:
    """Removes what a writer left that is no more."""
    with suppress(OSError):  # some file systems lock what is open for writing alone
        file = os.open(begun, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            begun.unlink(missing_ok=True)
        finally:
            os.close(file)


def write_whole(path: Path, *parts: bytes | bytearray | memoryview) -> None:
    begun, file = _begin(path.parent)
    try:
        with open(file, "wb", buffering=0, closefd=False) as raw:
            for part in parts:
                rest = memoryview(part)
                while rest:
                    rest = rest[raw.write(rest) :]
        begun.rename(path)
    except BaseException:
        begun.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)


def _begin(shelf: Path) -> tuple[Path, int]:
    """A new file that is locked as long as its descriptor is open."""
    while True:
        begun = shelf / f".{uuid.uuid4().hex}"
        file = os.open(begun, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if begun.exists():
                return begun, file
        except BaseException:  # some file systems have no locks
            os.close(file)
            begun.unlink(missing_ok=True)
            raise
        os.close(file)  # it was swept between the two
