"""Numbers below the normal ones are zeros in a step: each product with one takes a hundred times as
long, and whoever loads an adapter of such would hold up all that are computed beside it."""

from array import array

import numpy as np
import pytest

from kernels.cpu.deltas import Deltas, Part
from kernels.cpu.library import Library, supported
from kernels.cpu.program import Geometry, Limits, Program
from kernels.cpu.recorder import Recorder
from kernels.sampling import SAMPLING
from tests.support.programs import launch, logits_of, packed

TINY = np.float32(1e-30)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("instruction_set", supported())
def test_what_an_adapter_of_tiny_numbers_adds_is_nothing(
    instruction_set: str, threads: int
) -> None:
    """Of 1e-30 times 1e-10, in all rows and columns, whichever thread has them; where it is no
    subnormal number it is added."""
    library, recorder, rows, k, n, ranks = Library(instruction_set), Recorder(), 40, 64, 2048, 8
    x = recorder.wanted(recorder.embed(packed(library, np.ones((rows, k), np.float32))))
    matrix = packed(library, np.zeros((n, k), np.float32))
    logits = recorder.linear(x, matrix)
    deltas = Deltas([matrix], 2, ranks)
    for place, up in ((0, 1e-10), (1, 1.0)):
        part = Part(np.full((ranks, k), TINY), np.full((ranks, n), up, np.float32))
        deltas.put(place, {matrix: [part]})
    limits, geometry = Limits(rows, rows, rows), Geometry(1, 1, 16, 1, 16)
    program = Program(
        library, recorder, logits, geometry, limits, [], "float32", 1, threads, deltas
    )
    span, ends = np.arange(rows, dtype=np.int32), np.array([0, rows], np.int32)
    blocks, samplings = np.zeros((1, rows // 16 + 1), np.int32), np.zeros(rows, SAMPLING)
    step = span, span, ends, ends[1:], blocks, span, samplings
    for place, added in ((0, 0.0), (1, ranks * k * TINY)):
        launched = launch(program, *step, adapters=array("i", [place]) * rows)
        program.collect(launched)
        np.testing.assert_allclose(logits_of(program)[:rows], added, rtol=1e-5, atol=0)
    program.close()
