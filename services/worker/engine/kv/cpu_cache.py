"""KV blocks of the C++ kernels."""

import numpy as np
from numpy.typing import NDArray


class CpuCache:
    """A program's arena, as `KvCache`."""

    def __init__(self, arena: NDArray[np.uint8], num_blocks: int) -> None:
        self._blocks = arena.reshape(num_blocks, -1)

    def read(self, blocks: list[int]) -> memoryview:
        return self._blocks[blocks].reshape(-1).data

    def write(self, blocks: list[int], data: bytes | bytearray | memoryview) -> None:
        self._blocks[blocks] = np.frombuffer(data, np.uint8).reshape(len(blocks), -1)
