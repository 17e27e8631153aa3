"""What lies in a folder that can be indexed."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from services.retrieval.documents.kinds import SUFFIXES


class Mark(NamedTuple):
    """What changes when a file is written."""

    file: int
    bytes: int
    written_ns: int


class Found(NamedTuple):
    """Paths are relative to the folder, with slashes."""

    files: dict[str, Mark]
    skipped: dict[str, str]  # why, by path: folders' end in a slash


def look(folder: Path) -> Found:
    """All below it, but what is hidden, a link, empty, or of another kind.

    Raises OSError for a folder in it that cannot be read: what it holds is not gone.
    """
    found = Found({}, {})
    for path, entry in _below("", folder):
        if entry.name.startswith("."):
            found.skipped[path] = "hidden"
        elif why := _unwanted(entry):
            found.skipped[path] = why
        else:
            stat = entry.stat()
            found.files[path] = Mark(stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return found


def _below(above: str, folder: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Its files in order, and of folders those that are hidden."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = above + entry.name
        if not entry.is_dir(follow_symlinks=False):
            yield path, entry
        elif entry.name.startswith("."):
            yield path + "/", entry
        else:
            yield from _below(path + "/", Path(entry.path))


def _unwanted(entry: os.DirEntry[str]) -> str:
    if entry.is_symlink():
        return "a link"
    if not entry.is_file():
        return "no file"
    suffix = Path(entry.name).suffix.lower()
    if suffix not in SUFFIXES:
        return f"a {suffix} file" if suffix else "without a suffix"
    return "" if entry.stat().st_size else "empty"
