"""Folders and files that nobody but our user can have written."""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path


def is_own(found: os.stat_result) -> bool:
    """Whether nobody else can have written it."""
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def make_own(folder: Path) -> None:
    """A folder that only our user may write to. Raises OSError if it is another one's."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    refuse_of_others(folder)


def refuse_of_others(folder: Path) -> None:
    """Raises OSError for a folder that is there and another user's, or that others may write to,
    and for what is no folder."""
    try:
        found = folder.stat()
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it is no folder", str(folder))
    if not is_own(found):
        whose = f"user {found.st_uid}'s and {stat.filemode(found.st_mode)}"
        words = f"{whose}; it is to be user {os.geteuid()}'s, and nobody else may write there"
        raise PermissionError(errno.EPERM, words, str(folder))
