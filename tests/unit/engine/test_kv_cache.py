from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from services.worker.engine.kv_cache import KvCache, block_bytes
from services.worker.engine.model_config import read_config


def test_blocks_that_nobody_wrote_cost_no_memory(checkpoint: Callable[..., Path]) -> None:
    config = read_config(checkpoint())
    size = block_bytes(config, 16, torch.float32)
    count = 512 * 2**20 // size
    before = psutil.Process().memory_info().rss
    cache = KvCache(config, count, 16, torch.float32, torch.device("cpu"))
    assert psutil.Process().memory_info().rss - before < 64 * 2**20
    assert not any(cache.read([count - 1]))
    data = bytes(range(256)) * (size // 256)
    cache.write([count - 1], data)
    assert cache.read([count - 1]) == data


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_blocks_bytes_lie_as_the_other_engine_reads_them(
    checkpoint: Callable[..., Path], dtype: torch.dtype
) -> None:
    """[layers, 2 (K, V), block_size, kv_heads, head_dim] of each block, block after block."""
    config = read_config(checkpoint())
    one, other = (KvCache(config, 6, 4, dtype, torch.device("cpu")) for _ in range(2))
    shape = (config.num_layers, 2, 4, config.num_kv_heads, config.head_dim)
    for layer in range(config.num_layers):
        for side, part in enumerate(one.layer(layer)):
            part.copy_(torch.randn(part.shape))
            part[5].fill_(10 * layer + side + 1)
    data = one.read([5, 2])
    assert len(data) == 2 * block_bytes(config, 4, dtype)
    content = torch.frombuffer(bytearray(data), dtype=dtype).view(2, *shape)
    for layer in range(config.num_layers):
        for side, part in enumerate(one.layer(layer)):
            assert (content[0, layer, side] == 10 * layer + side + 1).all()
            assert torch.equal(content[1, layer, side], part[2])
    one.layer(0)[0].zero_()  # what was read is a copy
    other.write([0, 3], bytes(data))
    assert other.read([3, 0]) == bytes(data[len(data) // 2 :]) + bytes(data[: len(data) // 2])
    assert not any(other.read([1, 2, 4, 5]))
