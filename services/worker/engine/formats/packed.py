"""Small whole numbers in larger ones."""

from functools import lru_cache
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
    found = [_block(tensor, width, at) for at in range(first // width, -(-last // width))]
    begin = first // width * width
    return np.concatenate(found, axis=1)[:, first - begin : last - begin]


@lru_cache(maxsize=4)
def _block(tensor: Plain, width: int, number: int) -> NDArray[Any]:
    return tensor.columns(width * number, min(width * (number + 1), tensor.shape[1]))
