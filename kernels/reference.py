"""The plain-PyTorch meaning of every kernel; contracts in `kernels/__init__.py`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.paged_batch import PagedBatch


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return weight * (wide * scale).to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    block_size = k_cache.shape[1]
    blocks, offsets = slots // block_size, slots % block_size
    k_cache[blocks, offsets] = k
    v_cache[blocks, offsets] = v


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, scale: float
) -> Tensor:
    outputs = []
    if batch.num_decodes:
        outputs.append(_decode(q[: batch.num_decodes], k_cache, v_cache, batch, scale))
    start = batch.num_decodes
    for row in range(batch.num_decodes, len(batch.host_query_lens)):
        end = start + batch.host_query_lens[row]
        length = batch.host_seq_lens[row]
        table = batch.block_tables[row, : -(-length // k_cache.shape[1])]
        k = k_cache[table].flatten(0, 1)[:length]
        v = v_cache[table].flatten(0, 1)[:length]
        outputs.append(_prefill(q[start:end], k, v, scale))
        start = end
    return torch.cat(outputs)


def _decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, scale: float) -> Tensor:
    """One token each of the first sequences: q [S, H, D], all at once, padded to the longest."""
    rows, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    positions = torch.arange(max(batch.host_seq_lens[:rows]), device=q.device)
    lengths = batch.seq_lens[:rows, None]
    # Padding repeats a sequence's last token: what lies beyond it may be NaN, which a weight of
    # zero would not silence.
    places = positions.minimum(lengths - 1)
    blocks = batch.block_tables.gather(1, places // k_cache.shape[1])
    offsets = places % k_cache.shape[1]
    k, v = k_cache[blocks, offsets], v_cache[blocks, offsets]
    # The query heads of one key-value head are rows of one product: the cache is read once.
    result = F.scaled_dot_product_attention(
        q.view(rows, kv_heads, heads // kv_heads, dim),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=(positions < lengths)[:, None, None, :],
        scale=scale,
    )
    return result.reshape(rows, heads, dim)


def _prefill(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The last tokens of one sequence: q [n, H, D] over k, v [length, G, D]."""
    count, heads, dim = q.shape
    length, kv_heads, _ = k.shape
    groups = heads // kv_heads
    mask = None
    if count < length:
        mask = torch.ones(count, length, dtype=torch.bool, device=q.device)
        mask = mask.tril_(diagonal=length - count)
    result = F.scaled_dot_product_attention(
        q.view(count, kv_heads, groups, dim).permute(1, 2, 0, 3),
        k.transpose(0, 1).unsqueeze(1).expand(-1, groups, -1, -1),
        v.transpose(0, 1).unsqueeze(1).expand(-1, groups, -1, -1),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
    return result.permute(2, 0, 1, 3).reshape(count, heads, dim)
