"""A layer's keys and values in the arena, as kernels take them."""

from dataclasses import dataclass

import torch
from torch import Tensor

FURTHEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Numbers of 8 bits, and what a token's largest is stored as, so that no calibration is needed."""
INT4 = torch.uint8
"""Two numbers of 4 bits each: the first in the lower nibble, and each 8 more than it is. They are
of heads that were mixed (reference.mix_heads), of which the furthest is -8."""
LEAST = 2.0**-100
"""A token whose numbers are all smaller is stored as zeros: its scale would be no normal number."""


@dataclass(frozen=True, slots=True)
class KvLayer:
    """`slot = block * block_size + offset` names a token's place."""

    values: Tensor
    """[num_blocks, 2 (K, V), kv_heads, block_size, dim], of which the last two lie together; of
    INT4, where heads are mixed, [.., dim / 2]."""
    scales: Tensor | None = None
    """float32 [num_blocks, 2, kv_heads, block_size], of values in few bits: what a token's are to
    be multiplied with. NaN where one was no number."""

    @property
    def mixed(self) -> bool:
        return self.values.dtype == INT4

    @property
    def dim(self) -> int:
        return self.values.shape[4] * (2 if self.mixed else 1)
