"""A layer's keys and values in the arena, as kernels take them."""

from dataclasses import dataclass

import torch
from torch import Tensor

FURTHEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Numbers of 8 bits, and what a token's largest is stored as, so that no calibration is needed."""
LEAST = 2.0**-100
"""A token whose numbers are all smaller is stored as zeros: its scale would be no normal number."""


@dataclass(frozen=True, slots=True)
class KvLayer:
    """`slot = block * block_size + offset` names a token's place."""

    values: Tensor
    """[num_blocks, 2 (K, V), kv_heads, block_size, dim], of which the last two lie together."""
    scales: Tensor | None = None
    """float32 [num_blocks, 2, kv_heads, block_size], of values in 8 bits: what a token's are to be
    multiplied with. NaN where one was no number."""
