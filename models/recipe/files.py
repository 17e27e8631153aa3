"""What a run keeps: whole files, in a folder that is one training's alone."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write, which takes the place of `path` as soon as it is whole and on the disk."""
    partial = path.with_name(f"{path.name}.tmp")
    yield partial
    with partial.open("rb") as written:
        os.fsync(written.fileno())  # else the name may outlive a crash, and the content not
    partial.replace(path)


def state_of(path: Path) -> dict[str, Any]:
    """What was saved in a run's folder. Raises ValueError if the file is none of these, OSError if
    it cannot be opened.
    """
    try:
        state = torch.load(path, weights_only=True)
    except OSError:
        raise
    except Exception as why:  # of other bytes PyTorch's reader raises nearly anything
        said = repr(why) if path.stat().st_size else "it is empty"
        raise ValueError(
            f"{path} cannot be read ({said}): if it is cut off, remove it to begin its stage anew"
        ) from why
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds a {type(state).__name__}: no training saved it")
    return state


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keeps a second training out of a folder. Raises BlockingIOError if one is there."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"another training runs in {folder}") from None
        yield
    finally:
        os.close(descriptor)
