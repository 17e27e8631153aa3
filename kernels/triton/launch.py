"""What launches of several kernels have in common."""

import triton

from kernels.heads import Scores

LOG2_E = 1.4426950408889634

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Kernels run on CPU tensors, in Triton's interpreter; see numbers.py."""


def power_of_two(size: int) -> int:
    """The least that is not less."""
    found: int = triton.next_power_of_2(size)
    return found


def scale_and_cap(scores: Scores) -> tuple[float, float]:
    """What `attend` is given for them."""
    if scores.cap:
        return scores.scale / scores.cap, scores.cap * LOG2_E
    return scores.scale * LOG2_E, 0.0


def tile(dim: int) -> int:
    """Tokens that attention takes at a time, by a head's width."""
    return 64 if dim <= 128 else 32
