"""A GGUF file's header: its metadata, and where each tensor lies. Whatever the file is, reading
takes memory and time by its own size at most."""

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_BYTES = 64 * 2**20
"""Of a header: a vocabulary of a quarter of a million tokens takes some 12 MB."""
_MOST_TENSORS, _MOST_KEYS, _MOST_STRINGS = 100_000, 10_000, 2**21
_MOST_DIMENSIONS = 4
_MOST_WORDS = 500
"""Characters of a refusal."""
_ALIGNMENT = "general.alignment"
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
BLOCKS = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "BF16": (30, 1, 2),
    "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34), "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210),
}  # fmt: skip
"""By name: number, weights of a block, and its bytes."""
_NAMES = {number: name for name, (number, _, _) in BLOCKS.items()}
_OTHERS = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16",
    26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""Types that are refused by name."""


class UnsupportedGguf(ValueError):
    """The message names the file, and the key or the tensor."""


@dataclass(frozen=True, slots=True)
class TensorAt:
    type: str
    """Of BLOCKS."""
    shape: tuple[int, ...]
    """The last one lies in one piece."""
    offset: int
    """In the file."""

    @property
    def bytes(self) -> int:
        _, weights, size = BLOCKS[self.type]
        return prod(self.shape) // weights * size


@dataclass(frozen=True, slots=True)
class Header:
    path: Path
    metadata: dict[str, Any]
    """Numbers, texts, and of many either a numpy array or a list."""
    tensors: dict[str, TensorAt]

    def one(self, key: str, usual: Any = None) -> Any:
        """A key's value, which is not many. Raises UnsupportedGguf."""
        value = self.metadata.get(key, usual)
        if isinstance(value, list | np.ndarray):
            raise self.refusal(f"key {key} has {len(value)} items, not one")
        return value

    def refusal(self, words: str) -> UnsupportedGguf:
        return _refusal(self.path, words)


def read_header(path: Path) -> Header:
    """Raises UnsupportedGguf, and OSError."""
    with path.open("rb") as file:
        return _Reader(path, file).header()


class _Reader:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._size = os.fstat(file.fileno()).st_size
        self._left = min(self._size, _MOST_BYTES)

    def header(self) -> Header:
        if self._bytes(4) != _MAGIC:
            raise self._refusal("it is no GGUF file")
        version: int = self._number("<I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            big = ", of a machine whose bytes lie the other way round" if swapped else ""
            raise self._refusal(f"GGUF version {version} is not supported{big}")
        tensors, keys = self._number("<Q"), self._number("<Q")
        if tensors > _MOST_TENSORS or keys > _MOST_KEYS:
            raise self._refusal(f"{tensors} tensors and {keys} keys are more than it can have")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string()
            if key in metadata:
                raise self._refusal(f"key {key!r} is there twice")
            metadata[key] = self._value(key)
        entries: dict[str, tuple[str, tuple[int, ...], int]] = {}
        for _ in range(tensors):
            name = self._string()
            if name in entries:
                raise self._refusal(f"tensor {name!r} is there twice")
            entries[name] = self._entry(name)
        start = self._start(metadata)
        places = {name: self._place(name, start, *entry) for name, entry in entries.items()}
        self._check_apart(places)
        return Header(self._path, metadata, places)

    def _entry(self, name: str) -> tuple[str, tuple[int, ...], int]:
        """Type, shape and offset."""
        dimensions = self._number("<I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise self._refusal(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(reversed([self._number("<Q") for _ in range(dimensions)]))
        number = self._number("<I")
        if number not in _NAMES:
            told = _OTHERS.get(number, f"of the unknown type {number}")
            raise self._refusal(f"tensor {name!r} is {told}; supported: {', '.join(BLOCKS)}")
        return _NAMES[number], shape, self._number("<Q")

    def _place(self, name: str, start: int, type: str, shape: tuple[int, ...], at: int) -> TensorAt:
        if 0 in shape or shape[-1] % BLOCKS[type][1]:
            raise self._refusal(f"tensor {name!r} of {list(shape)} is no whole blocks of {type}")
        found = TensorAt(type, shape, start + at)
        if (end := found.offset + found.bytes) > self._size:
            raise self._refusal(
                f"tensor {name!r} ends at byte {end}, the file at {self._size}: cut short?"
            )
        return found

    def _check_apart(self, places: dict[str, TensorAt]) -> None:
        """A file whose tensors share bytes would be a model of any size."""
        end = 0
        for name, at in sorted(places.items(), key=lambda place: place[1].offset):
            if at.offset < end:
                raise self._refusal(f"tensor {name!r} lies in another one")
            end = at.offset + at.bytes

    def _start(self, metadata: dict[str, Any]) -> int:
        """Of the data."""
        alignment = metadata.get(_ALIGNMENT, 32)
        if type(alignment) is not int or not 1 <= alignment <= 2**20:
            raise self._refusal(f"{_ALIGNMENT} {alignment!r} is no number of bytes")
        return -(-self._file.tell() // alignment) * alignment

    def _value(self, key: str) -> Any:
        type = self._number("<I")
        if type != _ARRAY:
            return self._of_type(key, type)()
        items, count = self._number("<I"), self._number("<Q")
        of_item = self._of_type(key, items)
        least = 8 if items == _STRING else struct.calcsize(_SCALARS[items])
        if count * least > self._left or (items == _STRING and count > _MOST_STRINGS):
            raise self._refusal(f"key {key!r} has {count} items, more than it can have")
        if items == _STRING:
            return [of_item() for _ in range(count)]
        return np.frombuffer(self._bytes(count * least), _SCALARS[items])

    def _of_type(self, key: str, type: int) -> Callable[[], Any]:
        if type == _STRING:
            return self._string
        if type not in _SCALARS:
            raise self._refusal(f"key {key!r} is of the type {type}, which is not supported")
        return lambda: self._number(_SCALARS[type])

    def _string(self) -> str:
        """Bytes that are no UTF-8 are told as such (a token's may be any)."""
        return self._bytes(self._number("<Q")).decode("utf-8", "replace")

    def _number(self, code: str) -> Any:
        return struct.unpack(code, self._bytes(struct.calcsize(code)))[0]

    def _bytes(self, count: int) -> bytes:
        if count > self._left:
            raise self._refusal("its header ends too early: broken, or cut short")
        self._left -= count
        found = self._file.read(count)
        if len(found) < count:
            raise self._refusal("it was cut short while it was read")
        return found

    def _refusal(self, words: str) -> UnsupportedGguf:
        return _refusal(self._path, words)


def _refusal(path: Path, words: str) -> UnsupportedGguf:
    """What a file says of itself may be as long as the file."""
    return UnsupportedGguf(f"{path}: {words[:_MOST_WORDS]}")
