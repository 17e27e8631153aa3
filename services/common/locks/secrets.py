"""What an install keeps to itself: its folder, random secrets in it, and URLs without passwords."""

import os
import re
import secrets
import stat
import tempfile
from pathlib import Path


def private_folder(path: Path) -> Path:
    """Makes the folder, or tightens it, so that only its owner can look into it (0700).

    Raises PermissionError when it belongs to another user or is shared by design, as /tmp is.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.geteuid() or found.st_mode & stat.S_ISVTX:
        raise PermissionError(f"{path} is not this user's own: choose a folder below it")
    if stat.S_IMODE(found.st_mode) != 0o700:
        path.chmod(0o700)
    return path


def kept_secret(folder: Path, name: str) -> str:
    """The secret kept in `folder` under `name` (0600), made at random at its first use.

    Processes that ask at once get the same one. Raises OSError when it cannot be kept, and
    ValueError when the file is empty.
    """
    path = private_folder(folder) / name
    if not path.exists():
        _write_once(path, secrets.token_urlsafe(32))
    path.chmod(0o600)
    secret = path.read_text().strip()
    if not secret:
        raise ValueError(f"{path} is empty: remove it")
    return secret


def _write_once(path: Path, text: str) -> None:
    """Writes the file whole, or not at all when another process was first."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # 0600
    try:
        with open(descriptor, "w") as file:
            file.write(text)
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        os.unlink(temporary)


def redacted(url: str) -> str:
    """The URL as it may be shown and logged: without its password."""
    # Of an URL with mistakes in it, too: those are the ones that get printed.
    without = re.sub(r"(://[^:@/]*):.*@", r"\1:***@", url)
    return re.sub(r"(password=)[^&]*", r"\1***", without)
