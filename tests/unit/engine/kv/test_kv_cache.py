from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.cpu.library import supported
from services.worker.engine.kv.cache import KvCache, block_bytes, block_shape
from services.worker.engine.kv.torch_cache import TorchCache
from services.worker.engine.models.registry import read_config
from tests.unit.engine.driving import make_engine

Checkpoint = Callable[..., Path]


@pytest.mark.parametrize("kernels", ["reference", *supported()])
def test_blocks_that_nobody_wrote_cost_no_memory(checkpoint: Checkpoint, kernels: str) -> None:
    size = block_bytes(read_config(checkpoint()), 16, "float32")
    count = 512 * 2**20 // size
    before = psutil.Process().memory_info().rss
    engine = make_engine(checkpoint(), num_blocks=count, kernels=kernels)
    assert psutil.Process().memory_info().rss - before < 64 * 2**20
    cache: KvCache = engine._runner.cache
    assert not any(cache.read([count - 1]))
    data = bytes(range(256)) * (size // 256)
    cache.write([count - 1], data)
    assert cache.read([count - 1]) == data


@pytest.mark.parametrize("kernels", ["reference", *supported()])
def test_what_was_read_of_one_cache_is_written_to_another(
    checkpoint: Checkpoint, kernels: str
) -> None:
    one, other = (make_engine(checkpoint(), num_blocks=6, kernels=kernels) for _ in range(2))
    size = one.info.kv_bytes_per_block
    content = np.random.default_rng(0).integers(0, 256, 2 * size, np.uint8).tobytes()
    one._runner.cache.write([5, 2], content)
    data = one._runner.cache.read([5, 2])
    one._runner.cache.write([5], bytes(size))  # what was read is a copy
    assert bytes(data) == content
    other._runner.cache.write([0, 3], data)
    assert other._runner.cache.read([3, 0]) == content[size:] + content[:size]
    assert not any(other._runner.cache.read([1, 2, 4, 5]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_keeps_a_heads_tokens_in_order(
    checkpoint: Checkpoint, dtype: torch.dtype
) -> None:
    """[layers, 2 (K, V), kv_heads, block_size, head_dim] of each block, block after block."""
    shape = block_shape(read_config(checkpoint()), 4)
    cache = TorchCache(6, shape, dtype, torch.device("cpu"))
    for layer in range(shape[0]):
        for side, part in enumerate(cache.layer(layer).values.transpose(2, 3).unbind(1)):
            assert part.shape == (6, 4, shape[2], shape[4])
            part.copy_(torch.randn(part.shape))
            part[5, 1] = 10 * layer + side + 1
    content = torch.frombuffer(bytearray(cache.read([5, 2])), dtype=dtype).view(2, *shape)
    for layer in range(shape[0]):
        for side, part in enumerate(cache.layer(layer).values.transpose(2, 3).unbind(1)):
            assert (content[0, layer, side, :, 1] == 10 * layer + side + 1).all()
            assert torch.equal(content[1, layer, side], part[2].transpose(0, 1))


def test_copies_are_queued_beside_the_steps_and_later_steps_behind_what_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU; here it is seen which stream each operation would be given."""
    cache = TorchCache(4, (1, 2, 1, 4, 8), torch.float32, torch.device("cpu"))
    copies, steps = mock.Mock(), mock.Mock()
    current = steps
    queued: list[Any] = []

    @contextmanager
    def stream(chosen: object) -> Iterator[None]:
        nonlocal current
        before, current = current, chosen
        yield
        current = before

    class Queue(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), how: Any = None):  # type: ignore[no-untyped-def]
            if "index" in function.name() or "copy" in function.name():
                queued.append(current)
            return function(*args, **(how or {}))

    monkeypatch.setattr(cache, "_copies", copies)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    data = bytes(range(256))
    with Queue():
        cache.write([2], data)
        steps.wait_stream.assert_called_once_with(copies)
        assert cache.read([2]) == data
    assert len(queued) >= 2
    assert set(queued) == {copies}
    steps.wait_stream.assert_called_once()
