"""The memory behind the block pool.

One tensor holds the keys and values of all layers:

    [num_blocks, layers, 2 (K, V), block_size, kv_heads, head_dim]

Block-major: all that belongs to a block lies together, so moving a block (to a decode worker, to
host memory, to disk) is one contiguous copy instead of one for each layer and side. A kernel sees a
layer's keys as [num_blocks, block_size, kv_heads, head_dim] with a large block stride; a block's
tokens are contiguous there, which is what its loads need.
"""

import math

import numpy as np
import torch
from torch import Tensor

from services.worker.engine.model_config import ModelConfig


class KvCache:
    """Allocated once, as zeros; on the CPU a page costs memory only once it is written."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_shape = block_shape(config, block_size)
        shape = (num_blocks, *self.block_shape)
        if device.type == "cpu":
            # torch.zeros would write every page; numpy takes zeroed ones from the kernel.
            size = math.prod(shape) * dtype.itemsize
            self._data = torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
        else:
            self._data = torch.zeros(shape, dtype=dtype, device=device)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [num_blocks, block_size, kv_heads, head_dim]."""
        return self._data[:, index, 0], self._data[:, index, 1]

    def read(self, blocks: list[int]) -> memoryview:
        """A copy of these blocks' bytes, as `KvBlocks.data` has them."""
        content = self._data[torch.tensor(blocks, device=self._data.device)].cpu()
        return content.view(torch.uint8).numpy().reshape(-1).data

    def write(self, blocks: list[int], data: bytes | bytearray | memoryview) -> None:
        """Fills `blocks` with bytes that `read` gave of as many blocks."""
        # torch wants memory that it could write to.
        writable = bytearray(data) if memoryview(data).readonly else data
        source = torch.frombuffer(writable, dtype=self._data.dtype)
        self._data[torch.tensor(blocks, device=self._data.device)] = source.view(
            len(blocks), *self.block_shape
        ).to(self._data.device)


def block_shape(config: ModelConfig, block_size: int) -> tuple[int, int, int, int, int]:
    """layers, 2, block_size, kv_heads, head_dim."""
    return config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """2 x layers x kv_heads x head_dim x tokens x bytes of an element."""
    layers, sides, tokens, heads, dim = block_shape(config, block_size)
    return layers * sides * tokens * heads * dim * dtype.itemsize
