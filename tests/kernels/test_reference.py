"""The reference kernels against definitions written out longhand."""

import math

import pytest
import torch
from torch import Tensor

from kernels import ops as kernels
from kernels.paged_batch import PagedBatch

torch.set_num_threads(1)
BLOCK_SIZE, NUM_BLOCKS, LAYERS = 4, 32, 2


def test_rms_norm() -> None:
    x, weight = torch.randn(5, 16), torch.randn(16)
    expected = torch.nn.functional.rms_norm(x, (16,), weight, 1e-5)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), expected)
    narrow = kernels.rms_norm(x.bfloat16(), weight.bfloat16(), 1e-5)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), expected, rtol=0.02, atol=0.02)


def test_rms_norm_of_narrow_numbers_is_rounded_once() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 256).bfloat16()
    wide = torch.nn.functional.rms_norm(x.float(), (256,), None, 1e-5)
    narrow = kernels.rms_norm(x, torch.ones(256).bfloat16(), 1e-5)
    torch.testing.assert_close(narrow.float(), wide, rtol=2**-8, atol=0)


def test_rotary_turns_each_pair_by_its_angle() -> None:
    x, angles = torch.randn(3, 2, 8), torch.randn(3, 4)
    result = kernels.rotary(x, angles.cos(), angles.sin())
    pairs = torch.complex(x[..., :4], x[..., 4:])
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(result, torch.cat((turned.real, turned.imag), dim=-1))
    assert kernels.rotary(x.bfloat16(), angles.cos(), angles.sin()).dtype == torch.bfloat16


def test_silu_and_mul() -> None:
    gate, up = torch.randn(3, 5), torch.randn(3, 5)
    torch.testing.assert_close(kernels.silu_and_mul(gate, up), gate * gate.sigmoid() * up)


def paged(
    query_lens: list[int], seq_lens: list[int], kv_heads: int, dim: int
) -> tuple[PagedBatch, Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """A batch on scattered blocks, its caches with NaN wherever nothing was stored, and each
    sequence's keys and values; stored through `store_kv`."""
    # As in the engine: a layer's cache is a strided view of a larger tensor.
    memory = torch.full((NUM_BLOCKS, LAYERS, 2, BLOCK_SIZE, kv_heads, dim), torch.nan)
    k_cache, v_cache = memory[:, 1, 0], memory[:, 1, 1]
    free = torch.randperm(NUM_BLOCKS).tolist()
    tables, slots, positions, content = [], [], [], []
    for count, length in zip(query_lens, seq_lens, strict=True):
        table = [free.pop() for _ in range(-(-length // BLOCK_SIZE))]
        k, v = torch.randn(length, kv_heads, dim), torch.randn(length, kv_heads, dim)
        places = torch.tensor([table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
                               for p in range(length)])  # fmt: skip
        kernels.store_kv(k, v, k_cache, v_cache, places)
        tables.append(table)
        slots.append(places[length - count :])
        positions.append(torch.arange(length - count, length))
        content.append((k, v))
    width = max(map(len, tables))
    rows = [table + [table[-1]] * (width - len(table)) for table in tables]
    batch = PagedBatch(
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        block_tables=torch.tensor(rows, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        num_decodes=query_lens.count(1),
        host_query_lens=query_lens,
        host_seq_lens=seq_lens,
    )
    assert memory[:, 0].isnan().all(), "another layer was written to"
    return batch, k_cache, v_cache, content


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One head and one query at a time, from the formula."""
    count, heads, _ = q.shape
    length, kv_heads, _ = k.shape
    result = torch.empty_like(q)
    for i in range(count):
        visible = length - count + i + 1
        for head in range(heads):
            group = head // (heads // kv_heads)
            weights = (k[:visible, group] @ q[i, head] * scale).softmax(0)
            result[i, head] = weights @ v[:visible, group]
    return result


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        ([1], [1]),
        ([1, 1, 1], [9, 1, 4]),
        ([7], [7]),
        ([3], [11]),
        ([1, 1, 5, 2, 4], [13, 8, 5, 10, 4]),
    ],
)
def test_paged_attention(
    heads: int, kv_heads: int, query_lens: list[int], seq_lens: list[int]
) -> None:
    torch.manual_seed(0)
    dim = 8
    batch, k_cache, v_cache, content = paged(query_lens, seq_lens, kv_heads, dim)
    q = torch.randn(sum(query_lens), heads, dim)
    scale = 1 / math.sqrt(dim)
    result = kernels.paged_attention(q, k_cache, v_cache, batch, scale)
    expected = [
        dense_attention(part, k, v, scale)
        for part, (k, v) in zip(q.split(query_lens), content, strict=True)
    ]
    torch.testing.assert_close(result, torch.cat(expected))
