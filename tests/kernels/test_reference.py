"""The reference kernels against definitions written out longhand."""

import math

import pytest
import torch
from torch import Tensor

from kernels import reference as kernels
from kernels.heads import QkNorm, Scores
from kernels.kv_layer import INT4, KvLayer
from kernels.paged_batch import tiles_of
from tests.support.paged import paged

torch.set_num_threads(1)


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
    result = kernels.silu_and_mul(torch.cat((gate, up), dim=-1))
    torch.testing.assert_close(result, gate * gate.sigmoid() * up)


def test_gelu_and_mul() -> None:
    gate, up = torch.randn(3, 5), torch.randn(3, 5)
    result = kernels.gelu_and_mul(torch.cat((gate, up), dim=-1))
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    torch.testing.assert_close(result, gate * (1 + inner.tanh()) / 2 * up)


def test_a_wide_weight_is_taken_as_it_is() -> None:
    x, weight = torch.randn(5, 16).bfloat16(), 1 + torch.randn(16) / 1000
    exact = torch.nn.functional.rms_norm(x.float(), (16,), weight, 1e-5)
    assert torch.equal(kernels.rms_norm(x, weight, 1e-5), exact.bfloat16())


def test_add_rms_norm() -> None:
    x, y, weight = torch.randn(5, 16), torch.randn(5, 16), torch.randn(16)
    total, normed = kernels.add_rms_norm(x, y, weight, 1e-5)
    torch.testing.assert_close(total, x + y)
    torch.testing.assert_close(normed, kernels.rms_norm(x + y, weight, 1e-5))


@pytest.mark.parametrize("turned", [8, 6])
@pytest.mark.parametrize("normed", ["", "head", "all"])
def test_queries_are_turned_and_keys_and_values_stored(normed: str, turned: int) -> None:
    heads, kv_heads, dim, size = 4, 2, 8, 4
    x, angles = torch.randn(3, heads + 2 * kv_heads, dim), torch.randn(20, turned // 2)
    positions, slots = torch.tensor([7, 0, 19]).int(), torch.tensor([5, 2, 11]).int()
    layer = KvLayer(torch.full((3, 2, kv_heads, size, dim), torch.nan))
    widths = {"head": (dim, dim), "all": (heads * dim, kv_heads * dim)}
    norm = QkNorm(*map(torch.randn, widths[normed]), 1e-6) if normed else None
    tables = (angles.cos(), angles.sin())
    q = kernels.rotary_store(x.flatten(1).clone(), tables, positions, slots, layer, norm)
    for token, (position, slot) in enumerate(zip([7, 0, 19], [5, 2, 11], strict=True)):
        cos, sin = angles[[position]].cos(), angles[[position]].sin()
        queries, keys, values = x[token].split([heads, kv_heads, kv_heads])
        if normed == "all":
            queries, keys = queries.flatten(), keys.flatten()
        if norm is not None:
            queries = kernels.rms_norm(queries, norm.q, norm.epsilon).view(heads, dim)
            keys = kernels.rms_norm(keys, norm.k, norm.epsilon).view(kv_heads, dim)
        stored = layer.values[slot // size, :, :, slot % size]
        for found, of in ((q[token], queries), (stored[0], keys)):
            expected = kernels.rotary(of[None, :, :turned], cos, sin)[0]
            torch.testing.assert_close(found[:, :turned], expected)
            torch.testing.assert_close(found[:, turned:], of[:, turned:])
        torch.testing.assert_close(stored[1], values)
    assert layer.values.isnan().sum() == layer.values.numel() - 3 * 2 * kv_heads * dim


def test_of_eight_bits_each_token_has_its_own_scale() -> None:
    layer = KvLayer(
        torch.zeros(2, 2, 3, 4, 8).to(torch.float8_e4m3fn), torch.full((2, 2, 3, 4), torch.nan)
    )
    k, v = torch.randn(3, 3, 8) * torch.tensor([1e-3, 1, 1e4])[:, None, None], torch.randn(3, 3, 8)
    v[1] = 0
    slots = torch.tensor([6, 1, 3])
    kernels.store_kv(k, v, layer, slots)
    loaded = kernels.load_kv(layer, slots // 4, slots % 4, torch.float32)
    torch.testing.assert_close(loaded[:, 0], k, rtol=2**-4, atol=0.01 * 1e-3)
    torch.testing.assert_close(loaded[:, 1], v, rtol=2**-4, atol=0.01)


@pytest.mark.parametrize("dim", [8, 24, 64])
def test_heads_are_mixed_by_a_rotation_that_is_its_own_inverse(dim: int) -> None:
    """Of as many features together as a power of two divides; what lay far out in one of them is
    spread over all."""
    x, y = torch.randn(3, 5, dim), torch.randn(3, 5, dim)
    torch.testing.assert_close(kernels.mix_heads(kernels.mix_heads(x)), x)
    torch.testing.assert_close(
        (kernels.mix_heads(x) * kernels.mix_heads(y)).sum(-1), (x * y).sum(-1)
    )
    one, together = torch.zeros(dim), dim & -dim
    one[3] = 4
    spread = kernels.mix_heads(one).abs()
    torch.testing.assert_close(spread[:together], torch.tensor(4 / together**0.5).expand(together))
    assert not spread[together:].any()
    assert torch.equal(
        kernels.mix_heads(x.bfloat16()), kernels.mix_heads(x.bfloat16().float()).bfloat16()
    )


def test_of_four_bits_the_furthest_is_8_steps_away() -> None:
    """Below 0 or above; next to nothing is zeros, and what is no number is told by its scale."""
    x = torch.tensor([[1.0, -16, 3, 15], [16, -16, 2, 0], [1e-33, -1e-33, 0, 0], [1, 2, 3, 4]])
    x[3, 1] = torch.inf
    content, scales = kernels.in_4_bits(x)
    assert content.dtype == INT4
    assert content.shape == (4, 2)
    torch.testing.assert_close(scales[:3], torch.tensor([2.0, -2.0, 1.0]))
    assert scales[3].isnan()
    numbers = kernels.of_4_bits(content)
    assert numbers[:3].tolist() == [[0, -8, 2, 7], [-8, 7, -1, 0], [0, 0, 0, 0]]


def test_an_outlier_costs_the_others_less_in_mixed_heads() -> None:
    """As keys have them, in a few features of all tokens."""
    torch.manual_seed(6)
    x = torch.randn(200, 64)
    x[:, 11] += 40
    apart = kernels.as_stored(x, INT4) - x
    plain, scales = kernels.in_4_bits(x)
    of_plain = kernels.of_4_bits(plain) * scales[:, None] - x
    assert apart.square().mean() < of_plain.square().mean() / 2


def test_tiles_cover_each_new_token_once() -> None:
    starts = torch.tensor([0, 1, 2, 9, 10, 22]).numpy()
    tiles = tiles_of(starts, 2, 5).tolist()
    assert sorted(tiles) == [[2, 0], [2, 5], [3, 0], [4, 0], [4, 5], [4, 10]]
    assert [first for _, first in tiles] == sorted((t[1] for t in tiles), reverse=True)
    assert tiles_of(starts[:3], 2, 5).shape == (0, 2)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    """One head and one query at a time, from the formula."""
    count, heads, _ = q.shape
    length, kv_heads, _ = k.shape
    result = torch.empty_like(q)
    for i in range(count):
        end = length - count + i + 1
        seen = slice(max(end - scores.window, 0) if scores.window else 0, end)
        for head in range(heads):
            group = head // (heads // kv_heads)
            found = k[seen, group] @ q[i, head] * scores.scale
            if scores.cap:
                found = scores.cap * (found / scores.cap).tanh()
            result[i, head] = found.softmax(0) @ v[seen, group]
    return result


@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (1, 0.0), (4, 0.0), (0, 0.7), (4, 0.7)])
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
    heads: int, kv_heads: int, query_lens: list[int], seq_lens: list[int], window: int, cap: float
) -> None:
    torch.manual_seed(0)
    dim = 8
    case = paged(query_lens, seq_lens, kv_heads, dim)
    q = torch.randn(sum(query_lens), heads, dim)
    scores = Scores(1 / math.sqrt(dim), cap, window)
    result = kernels.paged_attention(q, case.layer, case.batch, scores)
    expected = [
        dense_attention(part, k, v, scores)
        for part, (k, v) in zip(q.split(query_lens), case.content, strict=True)
    ]
    torch.testing.assert_close(result, torch.cat(expected))
