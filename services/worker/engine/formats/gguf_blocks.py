"""Blocks of weights as llama.cpp's types have them (ggml-common.h): [rows, blocks, bytes] into what
they stand for. Q4_0, Q5_0 and Q8_0, whole numbers with a scale for each 32, are taken apart; of
others come float32."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from services.worker.engine.formats.stored import Floats

Blocks = NDArray[np.uint8]
Integers = NDArray[np.int8]
T = TypeVar("T", bound=np.generic)


def scales(blocks: Blocks) -> NDArray[np.float16]:
    """Of Q4_0, Q5_0 and Q8_0, [rows, blocks]."""
    found: NDArray[np.float16] = _halves(blocks, 0)[:, :, 0]
    return found


def q4_0(blocks: Blocks) -> Integers:
    """[rows, k], -8 to 7."""
    return _rows(_low_then_high(blocks[:, :, 2:])).view(np.int8) - np.int8(8)


def q5_0(blocks: Blocks) -> Integers:
    """[rows, k], -16 to 15."""
    fives = _low_then_high(blocks[:, :, 6:]) | _fifth_bits(blocks[:, :, 2:6])
    return _rows(fives).view(np.int8) - np.int8(16)


def q8_0(blocks: Blocks) -> Integers:
    return _rows(blocks[:, :, 2:]).view(np.int8)


def _q4_1(blocks: Blocks) -> Floats:
    return _rows(_times_and_plus(_low_then_high(blocks[:, :, 4:]), blocks))


def _q5_1(blocks: Blocks) -> Floats:
    fives = _low_then_high(blocks[:, :, 8:]) | _fifth_bits(blocks[:, :, 4:8])
    return _rows(_times_and_plus(fives, blocks))


def _q4_k(blocks: Blocks) -> Floats:
    nibbles = _by_pairs(blocks[:, :, 16:])
    return _rows(_of_eight(nibbles, blocks))


def _q5_k(blocks: Blocks) -> Floats:
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    high = blocks[:, :, None, 16:48] >> shifts & np.uint8(1)
    return _rows(_of_eight(_by_pairs(blocks[:, :, 48:]) | high << np.uint8(4), blocks))


def _q6_k(blocks: Blocks) -> Floats:
    low, high = blocks[:, :, :128].reshape(*blocks.shape[:2], 2, 64), blocks[:, :, 128:192]
    low = np.concatenate([low & 15, low >> 4], axis=3).reshape(*blocks.shape[:2], 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = high.reshape(*blocks.shape[:2], 2, 1, 32) >> shifts & np.uint8(3)
    sixes = (low | high << np.uint8(4)).reshape(*blocks.shape[:2], 16, 16).astype(np.float32) - 32
    of_sixteen = np.ascontiguousarray(blocks[:, :, 192:208]).view(np.int8).astype(np.float32)
    of_block = _halves(blocks, 208).astype(np.float32)
    return _rows(sixes * (of_block * of_sixteen)[..., None])


WIDENED: dict[str, Callable[[Blocks], Floats]] = {
    "Q4_1": _q4_1, "Q5_1": _q5_1, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip


def _times_and_plus(numbers: Blocks, blocks: Blocks) -> Floats:
    scale, plus = (_halves(blocks, at).astype(np.float32) for at in (0, 2))
    found: Floats = numbers.astype(np.float32) * scale + plus
    return found


def _of_eight(numbers: Blocks, blocks: Blocks) -> Floats:
    """Of 256 numbers each 32 have a scale and what is taken off, both six bits, of the block's."""
    packed = blocks[:, :, 4:16]
    first, second, rest = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    scale = np.concatenate([first & 63, rest & 15 | first >> 6 << 4], axis=2)
    minus = np.concatenate([second & 63, rest >> 4 | second >> 6 << 4], axis=2)
    scales = (_halves(blocks, 0).astype(np.float32) * scale)[..., None]
    found: Floats = scales * numbers - (_halves(blocks, 2).astype(np.float32) * minus)[..., None]
    return found


def _halves(blocks: Blocks, at: int) -> NDArray[np.float16]:
    """[rows, blocks, 1]"""
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view("<f2")


def _low_then_high(packed: Blocks) -> Blocks:
    return np.concatenate([packed & 15, packed >> 4], axis=2)


def _by_pairs(packed: Blocks) -> Blocks:
    """[rows, blocks, 8, 32]: 32 bytes have the lower halves of 32 numbers, and of the next."""
    parts = packed.reshape(*packed.shape[:2], 4, 1, 32)
    halves = np.concatenate([parts & 15, parts >> 4], axis=3)
    return halves.reshape(*packed.shape[:2], 8, 32)


def _fifth_bits(packed: Blocks) -> Blocks:
    return np.unpackbits(packed, axis=2, bitorder="little") << np.uint8(4)


def _rows(found: NDArray[T]) -> NDArray[T]:
    return np.ascontiguousarray(found).reshape(len(found), -1)
