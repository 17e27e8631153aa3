"""Steps of the CPU kernels, one at a time."""

from typing import Any

from kernels.cpu.program import Ints, Program


def compute(program: Program, *step: Any) -> Ints:
    """What `launch` is given, computed: the sampled ids."""
    return program.collect(program.launch(*step))
