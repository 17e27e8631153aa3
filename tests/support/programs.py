"""Programs of the CPU kernels: their matrices, steps one at a time, and what these computed."""

import ctypes
from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.library import Library
from kernels.cpu.matrix import Matrix, elements_of, grouped, quantized
from kernels.cpu.memory import zeros
from kernels.cpu.program import Launched, Program


def packed(
    library: Library,
    weights: NDArray[np.generic],
    bias: NDArray[np.float32] | None = None,
    to: str = "",
) -> Matrix:
    """`weights`: [n, k], k even; what they are rounded `to` is int8, k a multiple of four, or int4,
    k a multiple of 64."""
    n, k = weights.shape
    scales: NDArray[np.floating] | None = None
    if to:
        weights, scales = (quantized if to == "int8" else grouped)(weights.astype(np.float32))
    panels = zeros(elements_of(n, k, weights.dtype), weights.dtype)
    library.pack(np.ascontiguousarray(weights), panels, scales)
    return Matrix(panels, n, k, bias)


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
