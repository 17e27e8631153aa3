"""Programs of the CPU kernels: their matrices, steps one at a time, and what these computed."""

import ctypes
from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.library import Library
from kernels.cpu.matrix import (
    E4M3,
    E4M3_GROUP,
    GROUP,
    Held,
    Matrix,
    elements_of,
    grouped,
    in_e4m3,
    quantized,
)
from kernels.cpu.memory import zeros
from kernels.cpu.program import Launched, Program


def packed(
    library: Library,
    weights: NDArray[np.generic],
    bias: NDArray[np.float32] | None = None,
    to: Held = "",
) -> Matrix:
    """`weights`: [n, k], k even; what they are rounded `to` says of which it is a multiple."""
    parts = rounded_to(to, weights.astype(np.float32)) if to else (weights,)
    return laid(library, to, *parts, bias=bias)


def laid(
    library: Library, held: Held, *parts: NDArray[Any], bias: NDArray[np.float32] | None = None
) -> Matrix:
    """`parts`: as `Library.pack` has them."""
    n, k = parts[0].shape
    panels = zeros(elements_of(n, k, held), np.uint8 if held else parts[0].dtype)
    library.pack(held, panels, *map(np.ascontiguousarray, parts))
    return Matrix(panels, n, k, bias, held)


def rounded_to(to: Held, weights: NDArray[np.float32]) -> tuple[NDArray[Any], ...]:
    """Numbers, scales and zeros, as `Library.pack` has them."""
    if to in ("int8", "w8a8"):
        return quantized(weights)
    if to == "int4":
        return grouped(weights)
    if to == "fp8":
        return in_e4m3(weights)
    if to == "fp8_blocks":
        bits, of_blocks = in_e4m3(weights.reshape(-1, E4M3_GROUP))
        return bits.reshape(weights.shape), of_blocks.reshape(len(weights), -1)
    groups = weights.reshape(len(weights), -1, GROUP)
    low, high = groups.min(axis=2).clip(max=0), groups.max(axis=2).clip(min=0)
    span = np.maximum(-low, high) / 127 if to == "int8_groups" else (high - low) / 15
    scales = span.astype(np.float16)
    steps = np.where(scales != 0, scales, 1).astype(np.float32)
    if to == "int8_groups":
        whole = np.rint(groups / steps[:, :, None]).clip(-128, 127).astype(np.int8)
        return whole.reshape(weights.shape), scales
    of_groups = np.rint(-low / steps).clip(0, 16)
    nibbles = (np.rint(groups / steps[:, :, None]) + of_groups[:, :, None]).clip(0, 15)
    # So that rounding what was rounded changes nothing.
    np.put_along_axis(nibbles, groups.argmin(axis=2)[:, :, None], 0, 2)
    np.put_along_axis(nibbles, groups.argmax(axis=2)[:, :, None], 15, 2)
    return nibbles.astype(np.uint8).reshape(weights.shape), scales, of_groups.astype(np.uint8)


def whole(to: Held, *parts: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Whole numbers [n, k] and what each is to be multiplied with, [n, k]."""
    numbers, scales, *zeros_of = parts
    if to in ("fp8", "fp8_blocks"):  # 512 of each are whole
        each = np.repeat(scales, E4M3_GROUP if to == "fp8_blocks" else 1, axis=-1)
        each = each.reshape(len(numbers), -1) / np.float32(512)
        return (E4M3[numbers] * 512).astype(np.int64), np.broadcast_to(each, numbers.shape)
    less: Any = 8 if to == "int4" else 0
    if zeros_of:
        less = np.repeat(zeros_of[0].astype(np.int64), GROUP, axis=1)
    if to in ("int8", "w8a8"):
        return numbers.astype(np.int64), np.repeat(scales[:, None], numbers.shape[1], axis=1)
    of_columns = np.repeat(scales.astype(np.float32), GROUP, axis=1)
    return numbers.astype(np.int64) - less, of_columns


def stood_for(to: Held, weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """The values that they are rounded to."""
    numbers, scales = whole(to, *rounded_to(to, weights))
    return numbers.astype(np.float32) * scales


def launch(program: Program, *step: NDArray[Any], **more: Any) -> Launched:
    """`step`: what `Program.launch` is given up to what is awaited, as numpy's arrays."""
    arrays: list[Any] = [array("i", of.tobytes()) for of in step]
    return program.launch(*arrays, **more)


def compute(program: Program, *step: NDArray[Any]) -> NDArray[np.int32]:
    """Such a step computed: the sampled ids."""
    return np.asarray(program.collect(launch(program, *step)))


def logits_of(program: Program) -> NDArray[np.float32]:
    """[sampled, vocab], of the last step's rows."""
    buffer = program._buffers[program._ops[-1].source]
    numbers = ctypes.cast(buffer.data, ctypes.POINTER(ctypes.c_float))
    return np.ctypeslib.as_array(numbers, (program._limits.sampled, buffer.width))
