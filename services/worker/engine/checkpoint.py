"""A checkpoint's tensors as numpy arrays, read row by row as they are asked for. No torch."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from services.common.sampled import sampled
from services.worker.engine.model_config import ModelConfig, UnsupportedModel
from services.worker.engine.weights import check_weights, in_full, unused

_TYPES: dict[str, Any] = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}

Floats = NDArray[np.float32]
Bits = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in its file. Reading raises UnsupportedModel where that has become shorter."""

    file: BinaryIO
    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return prod(self.shape)

    def values(self, first: int = 0, last: int | None = None) -> NDArray[Any]:
        """Rows [first, last), as they are stored; numpy has no bfloat16, so of that the bits."""
        shape = (len(range(self.shape[0])[first:last]), *self.shape[1:])
        found = np.empty(shape, _TYPES[self.dtype])
        at = self.offset + first * prod(self.shape[1:]) * found.itemsize
        rest = found.reshape(-1).view(np.uint8).data
        while rest:
            count = os.preadv(self.file.fileno(), [rest], at)
            if not count:
                raise UnsupportedModel(f"{self.file.name}: was cut short while it was read")
            rest, at = rest[count:], at + count
        return found

    def float32(self, first: int = 0, last: int | None = None) -> Floats:
        """Rows [first, last); exact, but for float64."""
        values = self.values(first, last)
        if self.dtype != "BF16":
            return values.astype(np.float32, copy=False)
        return (values.astype(np.uint32) << 16).view(np.float32)

    def bfloat16(self, first: int = 0, last: int | None = None) -> Bits:
        """Rows [first, last): the bits of the nearest values, of two the even one."""
        if self.dtype == "BF16":
            return self.values(first, last)
        wide = self.float32(first, last)
        bits = wide.view(np.uint32)
        nearest = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(wide), np.uint16(0x7FC0), nearest)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An open one."""

    paths: list[Path]
    fingerprint: str
    """Of its files as they were before the first was opened."""
    tensors: dict[str, Stored]
    """All that the model needs, by name."""

    def check_unchanged(self) -> None:
        """To be asked once all is read: what was read may be of either, before and after a change.
        Raises UnsupportedModel."""
        if _fingerprint(self.paths) != self.fingerprint:
            raise UnsupportedModel(
                f"{self.paths[0].parent}: the checkpoint was changed while it was read"
            )


@contextmanager
def open_checkpoint(directory: str | Path, config: ModelConfig) -> Iterator[Checkpoint]:
    """Raises UnsupportedModel as `check_weights` does."""
    paths = check_weights(directory, config)
    found = _fingerprint(paths)
    with ExitStack() as files:
        tensors = {
            name: stored
            for path in paths
            for name, stored in _tensors(files.enter_context(_open(path)))
            if not unused(name, config)
        }
        yield Checkpoint(paths, found, tensors)


def _fingerprint(paths: Iterable[Path]) -> str:
    """Another one when any of the files is: also of the times of their last change, though these
    alone do not do, since copies and images may have any. Raises UnsupportedModel."""
    found = sha256()
    for path in paths:
        try:
            found.update(f"{path.stat().st_mtime_ns} {sampled(path).hex()}\n".encode())
        except OSError as error:
            raise UnsupportedModel(f"{path}: {error}") from error
    return found.hexdigest()


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise UnsupportedModel(f"{path}: {error}") from error


def _tensors(file: BinaryIO) -> Iterator[tuple[str, Stored]]:
    """safetensors: the header's size in 8 bytes, the header as JSON, the data."""
    start = 8 + int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
    for name, about in json.loads(os.pread(file.fileno(), start - 8, 8)).items():
        if name == "__metadata__" or about["dtype"] not in _TYPES:
            continue
        begin, _ = about["data_offsets"]
        yield in_full(name), Stored(file, start + begin, tuple(about["shape"]), about["dtype"])
