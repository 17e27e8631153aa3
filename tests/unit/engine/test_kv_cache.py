from collections.abc import Callable
from pathlib import Path

import psutil
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
