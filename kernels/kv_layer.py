"""A layer's keys and values in the arena, as kernels take them."""

from dataclasses import dataclass

from torch import Tensor

E4M3_MOST = 448.0
"""The largest number of float8_e4m3fn."""


@dataclass(frozen=True, slots=True)
class KvLayer:
    """`slot = block * block_size + offset` names a token's place."""

    values: Tensor
    """[num_blocks, 2 (K, V), kv_heads, block_size, dim], of which the last two lie together."""
    scales: Tensor | None = None
    """float32 [num_blocks, 2, kv_heads, block_size], of values in float8_e4m3fn: what a token's
    are to be multiplied with. A token's largest is stored as 448, so no calibration is needed."""
