"""Token ids packed as the contracts carry them: one after the other, each as protobuf's varint.

A prompt is packed once, by its tokenizer; what it passes on its way hands the bytes on. To read
and write 67,000 ids would take a router 0.8 ms, to count them takes 0.03. On the wire a field of
such bytes is a field of `repeated uint32`, which it was before: replicas of that version read what
these write, and write what these read.
"""

import re
from collections.abc import Sequence

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from protos.common_pb2 import PackedIds, TokenIds

Ids = NDArray[np.uint32]

_FEW = 1024  # ids, or bytes of them, are protobuf's sooner
_LONGEST = 5  # bytes of one
_TOO_LONG = re.compile(rb"[\x80-\xff]{%d}" % _LONGEST)
_NO_IDS = "not packed token ids"


def pack(ids: Ids | Sequence[int]) -> bytes:
    """An array's take 0.4 ms."""
    if not len(ids):
        return b""
    if len(ids) < _FEW:
        few = ids.tolist() if isinstance(ids, np.ndarray) else ids
        return bytes(PackedIds.FromString(TokenIds(ids=few).SerializeToString()).ids)
    return _varints(np.asarray(ids, np.uint32))


def unpack(packed: bytes) -> Ids:
    """These take 0.3 ms. `packed` is one that `count` took."""
    return np.array(as_field(packed), np.uint32)  # a copy of memory, no list


def count(packed: bytes) -> int:
    """Raises ValueError where they are no ids."""
    if len(packed) < _FEW:
        if _TOO_LONG.search(packed):  # protobuf takes ten bytes of one
            raise ValueError(_NO_IDS)
        try:
            return len(as_field(packed))
        except DecodeError:
            raise ValueError(_NO_IDS) from None
    goes_on = np.frombuffer(packed, np.int8) < 0
    too_long = goes_on[_LONGEST - 1 :].copy()  # where five in a row go on
    for start in range(_LONGEST - 1):
        too_long &= goes_on[start : start + len(too_long)]
    if goes_on[-1:].any() or too_long.any():
        raise ValueError(_NO_IDS)
    return len(packed) - int(np.count_nonzero(goes_on))


def head(packed: bytes, most: int) -> bytes:
    """The first `most` of them, still packed."""
    if len(packed) <= most:  # a byte each, at least
        return packed
    ends = np.flatnonzero(np.frombuffer(packed, np.int8)[: most * _LONGEST] >= 0)
    return packed[: int(ends[:most][-1]) + 1] if most else b""


def as_field(packed: bytes) -> Sequence[int]:
    """As a message's field of `repeated uint32`, which other messages take over as memory: a list
    of them would hold the interpreter for 3 ms."""
    return TokenIds.FromString(PackedIds(ids=packed).SerializeToString()).ids


def _varints(numbers: Ids) -> bytes:
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
