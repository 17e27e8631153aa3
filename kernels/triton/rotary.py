"""What lies between the query-key-value product and attention, in one pass over its rows: the norm
of queries and keys where a model has one, the turn by the position, and the way into the cache."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.heads import QkNorm
from kernels.kv_layer import FURTHEST, LEAST, KvLayer
from kernels.triton.heads import mix_heads, store_4_bits
from kernels.triton.launch import INTERPRETED, power_of_two
from kernels.triton.norm import rms_norm_in_place
from kernels.triton.numbers import nearest, to_e4m3

_HEADS = 8
"""Of one program."""


@triton.jit(do_not_specialize_on_alignment=["slots"])
def rotary_kernel(
    qkv,
    qkv_stride,
    positions,
    slots,
    cos,
    sin,
    q_weight,
    k_weight,
    epsilon,
    cache,
    block_stride,
    side_stride,
    head_stride,
    scales,
    scales_block_stride,
    scales_side_stride,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    TURNED: tl.constexpr,
    PADDED: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
    WIDE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, PADDED)
    inside = dims < HALF
    is_query, is_value = heads < Q_HEADS, heads >= Q_HEADS + KV_HEADS
    mask = (heads < Q_HEADS + 2 * KV_HEADS)[:, None] & inside[None, :]
    kind = qkv.dtype.element_ty

    # Pairs: first those that are turned, then what is left as it is.
    turned = dims < TURNED
    first = tl.where(turned, dims, dims + TURNED)
    second = tl.where(turned, dims + TURNED, dims + HALF)
    place = qkv + token * qkv_stride + heads[:, None] * (2 * HALF)
    a = tl.load(place + first[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(place + second[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + epsilon)[:, None]
        chosen = is_query[:, None]
        q_a = tl.load(q_weight + first, mask=inside, other=0.0).to(tl.float32)[None, :]
        q_b = tl.load(q_weight + second, mask=inside, other=0.0).to(tl.float32)[None, :]
        k_a = tl.load(k_weight + first, mask=inside, other=0.0).to(tl.float32)[None, :]
        k_b = tl.load(k_weight + second, mask=inside, other=0.0).to(tl.float32)[None, :]
        narrow = q_weight.dtype.element_ty
        normed_a = (a * factor).to(narrow).to(tl.float32) * tl.where(chosen, q_a, k_a)
        normed_b = (b * factor).to(narrow).to(tl.float32) * tl.where(chosen, q_b, k_b)
        a = tl.where(is_value[:, None], a, normed_a.to(kind).to(tl.float32))
        b = tl.where(is_value[:, None], b, normed_b.to(kind).to(tl.float32))
    angle = tl.load(positions + token).to(tl.int64) * TURNED + dims
    c = tl.where(is_value[:, None], 1.0, tl.load(cos + angle, mask=turned, other=1.0)[None, :])
    s = tl.where(is_value[:, None], 0.0, tl.load(sin + angle, mask=turned, other=0.0)[None, :])
    turned_a, turned_b = a * c - b * s, b * c + a * s

    queries = mask & is_query[:, None]
    tl.store(place + first[None, :], turned_a.to(kind), mask=queries)
    tl.store(place + second[None, :], turned_b.to(kind), mask=queries)

    slot = tl.load(slots + token)
    block, offset = (slot // BLOCK_SIZE).to(tl.int64), slot % BLOCK_SIZE
    side = is_value.to(tl.int64)
    kv_head = heads - Q_HEADS - side * KV_HEADS
    stored = mask & (heads >= Q_HEADS)[:, None]
    if SCALED:
        high = tl.maximum(tl.max(tl.abs(turned_a), 1), tl.max(tl.abs(turned_b), 1))
        high = tl.where(high < LEAST, MOST, high)
        # Of what is no number none: in 8 bits there may be no other sign of it.
        none = tl.sum(turned_a - turned_a, 1) + tl.sum(turned_b - turned_b, 1)
        at = block * scales_block_stride + side * scales_side_stride + kv_head * BLOCK_SIZE + offset
        there = (heads >= Q_HEADS) & (heads < Q_HEADS + 2 * KV_HEADS)
        tl.store(scales + at, high / MOST + none, mask=there)
        factor = (MOST / high)[:, None]
        if cache.dtype.element_ty == tl.int8:
            turned_a, turned_b = nearest(turned_a * factor), nearest(turned_b * factor)
        else:
            turned_a, turned_b = to_e4m3(turned_a * factor, WIDE), to_e4m3(turned_b * factor, WIDE)
    at = block * block_stride + side * side_stride + kv_head * head_stride + offset * (2 * HALF)
    target = cache + at[:, None]
    tl.store(target + first[None, :], turned_a.to(cache.dtype.element_ty), mask=stored)
    tl.store(target + second[None, :], turned_b.to(cache.dtype.element_ty), mask=stored)


def rotary_store(
    qkv: Tensor,
    angles: tuple[Tensor, Tensor],
    positions: Tensor,
    slots: Tensor,
    layer: KvLayer,
    norm: QkNorm | None = None,
) -> Tensor:
    kv_heads, dim = layer.values.shape[2], layer.dim
    heads = qkv.shape[1] // dim
    q_heads = heads - 2 * kv_heads
    if norm is not None and len(norm.q) > dim:  # over several heads: in passes of their own
        q, k, _ = qkv.split([q_heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
        rms_norm_in_place(q, norm.q, norm.epsilon)
        rms_norm_in_place(k, norm.k, norm.epsilon)
        norm = None
    if layer.mixed:
        return _mixed_store(qkv, angles, positions, slots, layer, norm)
    block_size = layer.values.shape[3]
    cos, sin = angles
    scales = layer.values if layer.scales is None else layer.scales
    rotary_kernel[(len(qkv), triton.cdiv(heads, _HEADS))](
        qkv,
        qkv.stride(0),
        positions,
        slots,
        cos,
        sin,
        qkv if norm is None else norm.q,
        qkv if norm is None else norm.k,
        0.0 if norm is None else norm.epsilon,
        layer.values,
        *layer.values.stride()[:3],
        scales,
        *scales.stride()[:2],
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HEADS=_HEADS,
        BLOCK_SIZE=block_size,
        HALF=dim // 2,
        TURNED=cos.shape[1],
        PADDED=power_of_two(dim // 2),
        NORM=norm is not None,
        SCALED=layer.scales is not None,
        MOST=FURTHEST.get(layer.values.dtype, 0.0),
        LEAST=LEAST,
        WIDE=INTERPRETED,
        num_warps=4,
    )
    return qkv.view(len(qkv), heads, dim)[:, :q_heads]


def _mixed_store(
    qkv: Tensor,
    angles: tuple[Tensor, Tensor],
    positions: Tensor,
    slots: Tensor,
    layer: KvLayer,
    norm: QkNorm | None,
) -> Tensor:
    """As a cache of blocks of one token the rows keep their own keys and values, which are mixed,
    too, and stored from there."""
    kv_heads, dim = layer.values.shape[2], layer.dim
    x = qkv.view(len(qkv), -1, dim)
    q_heads = x.shape[1] - 2 * kv_heads
    own = KvLayer(x[:, q_heads:].unflatten(1, (2, kv_heads, 1)))
    tokens = torch.arange(len(x), dtype=torch.int32, device=x.device)
    rotary_store(qkv, angles, positions, tokens, own, norm)
    mix_heads(x)
    store_4_bits(x[:, q_heads:], layer, slots)
    return x[:, :q_heads]
