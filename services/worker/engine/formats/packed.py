"""Small whole numbers in larger ones."""

from collections.abc import Callable
from functools import lru_cache
from threading import local
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.worker.engine.formats.stored import Plain

Words = NDArray[np.int32]
_BLOCK_BYTES = 4 * 2**20


def unpacked(words: Words, bits: int) -> NDArray[np.int16]:
    """[rows, words] as [rows, numbers], the lowest bits first; from 0 up. `bits`: 4 or 8."""
    bytes_ = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return bytes_.astype(np.int16)
    pairs = np.stack([bytes_ & 15, bytes_ >> 4], axis=2)
    return pairs.reshape(len(words), -1).astype(np.int16)


def columns(tensor: Plain, first: int, last: int) -> NDArray[Any]:
    """Of a matrix all rows of its columns [first, last). Its file is read in blocks of columns that
    the next call is likely to want, too: who asks column by column asks for each row each time."""
    width = max(64, _BLOCK_BYTES // (tensor.shape[0] * tensor.itemsize))
    found = [_lately.read(tensor, width, at) for at in range(first // width, -(-last // width))]
    begin = first // width * width
    return np.concatenate(found, axis=1)[:, first - begin : last - begin]


def _block(tensor: Plain, width: int, number: int) -> NDArray[Any]:
    return tensor.columns(width * number, min(width * (number + 1), tensor.shape[1]))


class _Lately(local):
    """Of each thread its own: a matrix is made of three tensors, and threads that pack would push
    out one another's blocks. They end when all is packed."""

    def __init__(self) -> None:
        self.read: Callable[[Plain, int, int], NDArray[Any]] = lru_cache(maxsize=4)(_block)


_lately = _Lately()
