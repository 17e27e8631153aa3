"""KV blocks in a torch device's memory."""

import math

import numpy as np
import torch
from torch import Tensor

from kernels.kv_layer import INT4, KvLayer
from services.worker.engine.kv.cache import Shape


class TorchCache:
    """See `KvCache`; of a head its tokens lie in order, and of a token its dims. Numbers of few
    bits are followed by a block's scales, [layers, 2, kv_heads, block_size] in float32.

    On a GPU copies have a stream of their own, and go on beside the step that runs: see `KvCache`
    for why they may. Never run on a GPU as yet (docs/performance.md)."""

    def __init__(
        self, num_blocks: int, shape: Shape, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`shape`: of a block."""
        few_bits = dtype.itemsize == 1
        if dtype == INT4:
            shape = (*shape[:-1], shape[-1] // 2)
        content = math.prod(shape) * dtype.itemsize
        scales = math.prod(shape[:-1]) * 4 if few_bits else 0
        self._memory = _zeros(num_blocks, content + scales, device)
        self._values = self._memory[:, :content].view(dtype).unflatten(1, shape)
        self._scales: Tensor | None = None
        if few_bits:
            self._scales = self._memory[:, content:].view(torch.float32).unflatten(1, shape[:-1])

        self._copies: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)
            self._copies.wait_stream(torch.cuda.current_stream(device))

    def layer(self, index: int) -> KvLayer:
        scales = None if self._scales is None else self._scales[:, index]
        return KvLayer(self._values[:, index], scales)

    def read(self, blocks: list[int]) -> memoryview:
        with torch.cuda.stream(self._copies):
            return self._memory[self._places(blocks)].cpu().numpy().reshape(-1).data

    def write(self, blocks: list[int], data: bytes | bytearray | memoryview) -> None:
        # torch wants memory that it could write to.
        writable = bytearray(data) if memoryview(data).readonly else data
        source = torch.frombuffer(writable, dtype=torch.uint8).view(len(blocks), -1)
        with torch.cuda.stream(self._copies):
            self._memory[self._places(blocks)] = source.to(self._memory.device)
        if self._copies:  # the steps launched from here on come after it
            torch.cuda.current_stream(self._memory.device).wait_stream(self._copies)

    def _places(self, blocks: list[int]) -> Tensor:
        return torch.tensor(blocks, device=self._memory.device)


def _zeros(rows: int, width: int, device: torch.device) -> Tensor:
    """Bytes."""
    if device.type == "cpu":
        # torch.zeros would write every page; numpy takes zeroed ones from the kernel.
        return torch.from_numpy(np.zeros((rows, width), np.uint8))
    return torch.zeros((rows, width), dtype=torch.uint8, device=device)
