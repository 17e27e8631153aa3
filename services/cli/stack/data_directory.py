"""The data directory as `up` wants it, and `doctor` asks for it: this user's own, with room."""

import os
import shutil
from pathlib import Path

from services.common.locks.secrets import private_folder

FULL_BYTES = 64 * 2**20
"""Free bytes below which a disk is as good as full: Redis and Ray's state begin with some 10 MB."""

_SETTING = "setting PENSTOCK_DATA_DIR"


def open_data_directory(path: Path) -> None:
    """Makes it, closed to other users. Raises RuntimeError where it cannot hold what is written
    while Penstock runs: parts of it would wait for ever, or fail one by one."""
    try:
        private_folder(path)
    except FileExistsError:
        raise RuntimeError(f"{_SETTING}: {path} is not a folder") from None
    except OSError as error:
        raise RuntimeError(f"{_SETTING}: {path}: {error.strerror or error}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise RuntimeError(f"{_SETTING}: {path} cannot be written to")
    if (free := shutil.disk_usage(path).free) < FULL_BYTES:
        raise RuntimeError(
            f"{_SETTING}: the disk of {path} is full, {free / 2**20:.0f} MiB are free: make room "
            f"({FULL_BYTES / 2**20:.0f} MiB at least), or choose another one"
        )
