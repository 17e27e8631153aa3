"""Many token ids as the contracts carry them, without a Python integer for each."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from protos.common_pb2 import TokenIds

_FIELD = b"\x0a"  # `ids`, packed
_FEW = 1024  # are a list sooner


def message_ids(ids: NDArray[np.uint32]) -> Sequence[int]:
    """They as a message's field, which other messages take over as memory: 67,000 take 1 ms, where
    a list of them and a message of that take 3, and hold the interpreter all the while."""
    if len(ids) < _FEW:
        few: list[int] = ids.tolist()
        return few
    data = _varints(ids)
    size = _varints(np.array([len(data)], np.uint32))
    return TokenIds.FromString(_FIELD + size + data).ids


def _varints(numbers: NDArray[np.uint32]) -> bytes:
    """protobuf's: seven bits in a byte, the lowest first; each byte but a number's last has its
    eighth bit set."""
    width = max(1, -(-int(numbers.max(initial=0)).bit_length() // 7))
    digits = np.empty((len(numbers), width), np.uint8)
    counts = np.ones((len(numbers), width), np.bool_)
    for place in range(width):
        rest = numbers >> np.uint32(7 * place)
        digits[:, place] = rest & np.uint32(0x7F)
        if place + 1 < width:
            counts[:, place + 1] = goes_on = rest > 0x7F
            digits[:, place] |= goes_on.astype(np.uint8) << np.uint8(7)
    return digits[counts].tobytes()
