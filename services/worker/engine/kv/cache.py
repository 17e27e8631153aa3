"""The memory behind the block pool: an arena of blocks.

    [num_blocks, layers, 2 (K, V), kv_heads, block_size, head_dim]

with as many layers as a KV group has (kv/groups.py), of numbers of 16 or 32 bits, or of 8 or 4 with
a scale for each token and head (decision 0067).

Block-major: all that belongs to a block lies together, so moving a block (to a decode worker, to
host memory, to disk) is one contiguous copy instead of one for each layer and side. Within a layer
and side a head lies together, so that a share of the heads is one piece, too. In which order a
head's tokens and dims lie is the runner's own (`ModelInfo.kv_format`).
"""

from typing import Protocol

from services.worker.engine.models.config import ModelConfig

Shape = tuple[int, int, int, int, int]
TOKEN_BYTES = {
    "float32": (4, 0),
    "bfloat16": (2, 0),
    "int8": (1, 4),
    "fp8": (1, 4),
    "int4": (0.5, 4),
}
"""Of a format, of each token and head: of an element, and of the scale."""


class KvCache(Protocol):
    """Zeros at first, of which, on a CPU, a page costs memory only once it is written.

    Neither way has to wait for the step that runs, though ranks do, which obey in order: what is
    read was written by steps that have been collected and is written no more, and what is written
    are blocks that no step which runs uses. Steps launched later find it."""

    def read(self, blocks: list[int]) -> memoryview:
        """A copy of these blocks' bytes, as `KvBlocks.data` has them."""

    def write(self, blocks: list[int], data: bytes | bytearray | memoryview) -> None:
        """Fills `blocks` with bytes that `read` gave of as many blocks."""


def block_shape(config: ModelConfig, block_size: int, layers: int | None = None) -> Shape:
    """layers, 2, kv_heads, block_size, head_dim. `layers`: None, all of the model's."""
    layers = config.num_layers if layers is None else layers
    return layers, 2, config.num_kv_heads, block_size, config.head_dim


def block_bytes(
    config: ModelConfig, block_size: int, kv_format: str, layers: int | None = None
) -> int:
    """2 x layers x kv_heads x tokens x (head_dim x bytes of an element, and of a token's scale).
    `kv_format`: of TOKEN_BYTES."""
    layers, sides, heads, tokens, dim = block_shape(config, block_size, layers)
    element_bytes, scale_bytes = TOKEN_BYTES[kv_format]
    return layers * sides * heads * tokens * (int(dim * element_bytes) + scale_bytes)
