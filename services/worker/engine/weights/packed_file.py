"""A file that one process of a host makes and all of them map.

It has its name only once it is whole, and is never written again: what a process has mapped stays
as it is, whatever becomes of the file. While it is made it has another name, and is locked; who
comes meanwhile waits, or takes its place if it dies. Its last bytes say what it is.

Beside it lie others. Before one is made, those go that no process has mapped and none has opened
for `KEEP_S`; if there is no room, the others that no process has mapped, too, the oldest first. Who
maps one holds a shared lock on it for as long. Its last use is the time of an empty file beside it:
the file itself is never touched, since an overlay would copy it for that, from an image's layer.
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)

KEEP_S = 7 * 24 * 3600.0
_NOTED_EVERY_S = 24 * 3600.0
SPARE_BYTES = 256 * 2**20
"""The disk's free bytes are not taken below this."""
PATIENCE_S = 30.0
"""One that is being made grows within this time, or is not waited for any longer."""
SLOW_DISK = 20 * 2**20
"""Bytes per second. One that is whole is being synchronized, and does not grow: it is waited for as
long as so slow a disk takes, too."""
_LOOK_EVERY_S, _LOOKS_FOR_A_LOCK = 0.02, 50
_MAGIC = b"penstock weights"
_ENDING, _PART_ENDING, _USED_ENDING = ".packed", ".part", ".used"
_POPULATE_READ, _COLLAPSE = 22, 25  # MADV_..., which Python has no names for
_AS_A_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""No link, and no pipe that waits for its other end: the folder may be others' to write, too."""


def mapped(
    folder: Path, key: str, size: int, write: Callable[[int], None]
) -> tuple[Path, NDArray[np.uint8]]:
    """The file of this key, mapped for reading: [size].

    If it is not there, it is made: `write` fills a descriptor's first `size` bytes. `key` stands
    for all that the content follows from. Raises OSError where that cannot be: a folder that is
    read-only, a full disk, another process that makes it and does not get on.
    """
    path, end = folder / f"{key}{_ENDING}", _MAGIC + key.encode()
    part = path.with_suffix(_PART_ENDING)
    if (found := _open(path, size, end)) is not None:
        return path, found
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _sole_writer(part, size + len(end)) as file:
        try:
            if (found := _open(path, size, end)) is None:
                _make_room(folder, size)
                _fill(file, size, end, write)
                part.rename(path)
                found = _map(file, path, size, end)  # while it is locked for the writer alone
        finally:
            if _is(file, part):  # and not another's, that came since it was renamed
                part.unlink(missing_ok=True)
    if found is None:
        raise OSError(errno.EIO, "what was written is not what is read", str(path))
    return path, found


def _fill(file: int, size: int, end: bytes, write: Callable[[int], None]) -> None:
    os.ftruncate(file, 0)  # of one who died
    write(file)
    os.pwrite(file, end, size)
    os.fsync(file)  # else the name may outlive a crash, and the content not


def _open(path: Path, size: int, end: bytes) -> NDArray[np.uint8] | None:
    """None where there is none, or as `_map`."""
    try:
        file = os.open(path, os.O_RDONLY | _AS_A_FILE)
    except FileNotFoundError:
        return None
    try:
        found = _map(file, path, size, end)
    finally:
        os.close(file)
    if found is not None and time.time() - _last_use(path) > _NOTED_EVERY_S:
        _note_use(path)
    return found


def _map(file: int, path: Path, size: int, end: bytes) -> NDArray[np.uint8] | None:
    """None where it is not whole, of something else, or another user can have written it."""
    about = os.fstat(file)
    ours = about.st_uid in (0, os.geteuid()) and not about.st_mode & 0o022
    whole = about.st_size == size + len(end) and os.pread(file, len(end), size) == end
    if not (ours and whole):
        return None
    # The lock is the open file's, of which the mapping keeps a descriptor of its own.
    pages = mmap.mmap(file, size, mmap.MAP_SHARED, mmap.PROT_READ)
    _hold(file, path)
    _ask_for_huge_pages(pages)
    return np.frombuffer(pages, np.uint8)


def _hold(file: int, path: Path) -> None:
    """Says that it is used. A lock for one alone, its writer's or that of one who would remove it,
    lasts a moment only."""
    for _ in range(_LOOKS_FOR_A_LOCK):
        try:
            return fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            why = error
            if not isinstance(error, BlockingIOError):
                break
        time.sleep(_LOOK_EVERY_S)
    log.warning("%s cannot be locked, and may be removed while it is used: %s", path, why)


def _ask_for_huge_pages(pages: mmap.mmap) -> None:
    """Reads the file, in huge pages where the kernel can: new ones have them by the first advice,
    on file systems with large folios; others may by the last."""
    for advice in (mmap.MADV_HUGEPAGE, _POPULATE_READ, _COLLAPSE):
        with contextlib.suppress(OSError):
            pages.madvise(advice)


@contextlib.contextmanager
def _sole_writer(part: Path, size: int) -> Iterator[int]:
    """Its descriptor, locked. `size`: of a whole one. Raises TimeoutError, see PATIENCE_S and
    SLOW_DISK."""
    seen, since = None, time.monotonic()
    while True:
        file = os.open(part, os.O_RDWR | os.O_CREAT | _AS_A_FILE, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            about = os.fstat(file)
            os.close(file)
            now = (about.st_ino, about.st_size, about.st_mtime_ns)
            if now != seen:
                seen, since = now, time.monotonic()
            patience = PATIENCE_S + (size / SLOW_DISK if about.st_size >= size else 0)
            if time.monotonic() - since > patience:
                raise TimeoutError(
                    errno.ETIMEDOUT, "another process makes it and does not get on", str(part)
                ) from None
            time.sleep(_LOOK_EVERY_S)
            continue
        except BaseException:
            os.close(file)
            raise
        try:
            if _is(file, part):
                yield file
                return
        finally:
            os.close(file)


def _is(file: int, path: Path) -> bool:
    """Whether that is still its name: it may have been locked by one who finished or gave up."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _make_room(folder: Path, size: int) -> None:
    """Raises OSError where that cannot be."""
    for path in folder.glob(f"*{_PART_ENDING}"):
        _remove_unused(path, before=time.time() - KEEP_S)
    others = sorted(folder.glob(f"*{_ENDING}"), key=_last_use)
    for path in others:
        _remove_unused(path, before=time.time() - KEEP_S)
    for path in others:
        if shutil.disk_usage(folder).free >= size + SPARE_BYTES:
            break
        _remove_unused(path)
    if shutil.disk_usage(folder).free < size + SPARE_BYTES:
        raise OSError(errno.ENOSPC, f"no room for {size / 2**20:.0f} MiB", str(folder))


def _last_use(path: Path) -> float:
    """Or when it was made, whichever is later."""
    last = 0.0
    for noted in (path, _use_of(path)):
        with contextlib.suppress(FileNotFoundError):
            last = max(last, noted.stat().st_mtime)
    return last


def _use_of(path: Path) -> Path:
    return path.with_name(path.name + _USED_ENDING)


def _note_use(path: Path) -> None:
    with contextlib.suppress(OSError):  # a folder that is read-only loses nothing
        file = os.open(_use_of(path), os.O_WRONLY | os.O_CREAT | _AS_A_FILE, 0o600)
        try:
            os.utime(file)
        finally:
            os.close(file)


def _remove_unused(path: Path, before: float = float("inf")) -> None:
    if _last_use(path) >= before:
        return
    try:
        file = _locked(path)
    except (BlockingIOError, FileNotFoundError):  # it is used, or another one was quicker
        return
    except OSError as error:
        log.warning("%s cannot be removed: %s", path, error)
        return
    try:
        path.unlink(missing_ok=True)
        _use_of(path).unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be removed: %s", path, error)
    finally:
        os.close(file)


def _locked(path: Path) -> int:
    """Its descriptor, locked for this process alone. Raises OSError."""
    try:
        return _locked_as(path, os.O_RDONLY)  # an overlay copies what is opened for writing
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
    return _locked_as(path, os.O_RDWR)  # as NFS asks for


def _locked_as(path: Path, access: int) -> int:
    file = os.open(path, access | _AS_A_FILE)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file
