"""What each kernel on torch tensors computes, in plain PyTorch: the contracts, and what every
faster one is tested against. `kernels/triton` has the same functions for a GPU.

Shapes: T tokens of a step, S sequences, H query heads, G key-value heads (G divides H), D head_dim.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.deltas import Delta
from kernels.heads import QkNorm, Scores
from kernels.kv_layer import FURTHEST, INT4, LEAST, KvLayer
from kernels.paged_batch import PagedBatch
from kernels.triton.matrix import NarrowMatrix


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x², last dim) + epsilon) * weight, of x's dtype; the mean is taken in float32,
    and what is multiplied with the weight is rounded to the weight's dtype.

    x: [..., N]; weight: [N].
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (weight * (wide * scale).to(weight.dtype)).to(x.dtype)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x + y, for which x's memory may be used, and the norm of that."""
    total = x + y
    return total, rms_norm(total, weight, epsilon)


def silu_and_mul(x: Tensor) -> Tensor:
    """silu of the first half of each row of x [T, 2 N], times the second: [T, N]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_and_mul(x: Tensor) -> Tensor:
    """gelu, approximated by tanh, of the first half of each row of x [T, 2 N], times the second:
    [T, N]."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def in_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of x [T, k] as numbers of -127 to 127, int8, of which each row's furthest is one, and
    what they are to be multiplied with, float32 [T]. A row with NaN or infinity has NaN for that.
    """
    wide = x.float()
    furthest = wide.abs().amax(-1).clamp(min=2.0**-64)
    numbers = (wide * (127 / furthest)[:, None]).round().clamp(-127, 127)
    scales = furthest / 127 + (wide - wide).sum(-1)
    return numbers.nan_to_num().to(torch.int8), scales


def narrow_linear(x: Tensor, matrix: NarrowMatrix, bias: Tensor | None = None) -> Tensor:
    """x [T, k] times a matrix [n, k] of few bits, and the bias [n], of x's dtype, summed in
    float32: the matrix's numbers are not rounded. Rows that meet w8a8 are `in_int8` first."""
    rows = x.float()
    if matrix.held == "w8a8":
        numbers, scales = in_int8(x)
        rows = numbers.float() * scales[:, None]
    y = rows @ matrix.rows().T
    return (y if bias is None else y + bias.float()).to(x.dtype)


def route(logits: Tensor, chosen: int, normed: bool) -> tuple[Tensor, Tensor]:
    """Of rows of logits [T, E] the shares of their softmax, float32 [T, chosen], that the largest
    have, of equals the first, and whose they are, int64; normed: divided by their sum."""
    experts = logits.sort(dim=-1, descending=True, stable=True).indices[:, :chosen]
    shares = logits.softmax(-1, dtype=torch.float32).gather(-1, experts)
    return shares / shares.sum(-1, keepdim=True) if normed else shares, experts


def mixed(x: Tensor, gate_up: Tensor, down: Tensor, shares: Tensor, experts: Tensor) -> Tensor:
    """Of each row of x [T, N] the sum of what its experts make of it, times their shares, summed in
    float32.

    gate_up: [E, 2 inner, N]; down: [E, N, inner]; shares, experts: [T, chosen].
    """
    found = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in experts.unique().tolist():
        rows, which = (experts == expert).nonzero(as_tuple=True)
        y = F.linear(silu_and_mul(F.linear(x[rows], gate_up[expert])), down[expert])
        found.index_add_(0, rows, y.float() * shares[rows, which, None])
    return found.to(x.dtype)


def add_deltas(y: Tensor, x: Tensor, places: Tensor, deltas: Mapping[int, Sequence[Delta]]) -> None:
    """To each row of y [T, n], in place, what the deltas at its place make of its row of x [T, k],
    in float32.

    places: int32 [T], -1: none.
    """
    for place in places.unique().tolist():
        rows = (places == place).nonzero().squeeze(1)
        for delta in deltas.get(place, ()):
            columns = slice(delta.first, delta.first + delta.up.shape[1])
            added = x[rows].float() @ delta.down.float().T @ delta.up.float()
            y[rows, columns] = (y[rows, columns].float() + added).to(y.dtype)


def capped(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), of x's dtype."""
    return (cap * torch.tanh(x.float() / cap)).to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x[..., i], x[..., i + R/2]) by their angles, and leaves x[..., R:] as it
    is; the result is of x's dtype.

    x: [T, heads, D]; cos, sin: float32 [T, R/2], R at most D.
    """
    turned, rest = x.float().tensor_split([2 * cos.shape[-1]], dim=-1)
    a, b = turned.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).to(x.dtype)


def rotary_store(
    qkv: Tensor,
    angles: tuple[Tensor, Tensor],
    positions: Tensor,
    slots: Tensor,
    layer: KvLayer,
    norm: QkNorm | None = None,
) -> Tensor:
    """Of rows qkv [T, (H + 2 G) D], whose memory may be used: queries [T, H, D], normed if there is
    a norm, turned by their positions, and mixed where the layer's heads are; keys likewise, and
    values, are stored in their slots.

    angles: cos and sin, float32 [context, R/2]; positions, slots: int32 [T].
    """
    kv_heads, dim = layer.values.shape[2], layer.dim
    heads = qkv.view(len(qkv), -1, dim)
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if norm is not None:
        q, k = _norm_parts(q, norm.q, norm.epsilon), _norm_parts(k, norm.k, norm.epsilon)
    cos, sin = (table[positions] for table in angles)
    store_kv(rotary(k, cos, sin), v, layer, slots)
    q = rotary(q, cos, sin)
    return mix_heads(q) if layer.mixed else q


def _norm_parts(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Of x [T, heads, D] as many features together as there are weights."""
    return rms_norm(x.reshape(len(x), -1, len(weight)), weight, epsilon).view(x.shape)


def store_kv(k: Tensor, v: Tensor, layer: KvLayer, slots: Tensor) -> None:
    """Writes the keys and values of T tokens, [T, G, D], to their slots [T], all distinct."""
    size = layer.values.shape[3]
    blocks, offsets = slots // size, slots % size
    content = torch.stack((k, v), dim=1)
    if layer.scales is not None:
        content, scales = in_few_bits(content, layer.values.dtype)
        layer.scales[blocks, :, :, offsets] = scales
    _bits(layer.values)[blocks, :, :, offsets] = _bits(content.to(layer.values.dtype))


def mix_heads(x: Tensor) -> Tensor:
    """Of x [..., D] as many features together as a power of two divides D, by the Walsh-Hadamard
    matrix: a rotation that is its own inverse. What lay far out in one feature is spread over all,
    and products of two rows that are mixed are as before. Of x's dtype; summed in float32."""
    together, apart = x.shape[-1] & -x.shape[-1], 1
    found = x.float()
    while apart < together:
        a, b = found.unflatten(-1, (-1, 2, apart)).unbind(-2)
        found = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        apart *= 2
    return (found / math.sqrt(together)).to(x.dtype)


def in_few_bits(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of x [..., D] the nearest numbers of `dtype`, and what each D of them are to be multiplied
    with, float32 [...]: what lies furthest from 0 is the furthest number. INT4: of x mixed,
    [..., D / 2]."""
    return in_4_bits(mix_heads(x.float())) if dtype == INT4 else in_8_bits(x, dtype)


def in_4_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `in_few_bits`; x float32, mixed. Of two that lie as far it is the positive one."""
    most = x.abs().amax(dim=-1)
    furthest = torch.where(x.amax(dim=-1) < most, -most, most)
    furthest = torch.where(most < LEAST, -8.0, furthest)
    numbers = (x * (-8 / furthest)[..., None]).nan_to_num().round().clamp(-8, 7).int() + 8
    a, b = numbers.unflatten(-1, (-1, 2)).unbind(-1)
    return (a | b << 4).to(INT4), furthest / -8 + 0 * most


def of_4_bits(content: Tensor) -> Tensor:
    """The numbers of INT4 [..., D / 2], as float32 [..., D]."""
    numbers = torch.stack((content & 15, content >> 4), dim=-1)
    return numbers.flatten(-2).float() - 8


def as_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Of x [..., D] what numbers of `dtype` and their scales stand for, float32."""
    numbers, scales = in_few_bits(x, dtype)
    if dtype == INT4:
        return mix_heads(of_4_bits(numbers) * scales[..., None])
    return numbers.float() * scales[..., None]


def in_8_bits(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `in_few_bits`: of int8 and float8_e4m3fn."""
    most, x = FURTHEST[dtype], x.float()
    largest = x.abs().amax(dim=-1)
    largest = torch.where(largest < LEAST, most, largest)
    found = x * (most / largest)[..., None]
    # Of infinity, too, the scale is NaN: an int8 could not tell.
    return (found.round() if dtype == torch.int8 else found).to(dtype), largest / most + 0 * largest


def load_kv(layer: KvLayer, blocks: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """What is stored there, mixed or not, [*places, 2, G, D], of `dtype` or as wide as scales make
    it."""
    content = _bits(layer.values)[blocks, :, :, offsets].view(layer.values.dtype)
    if layer.scales is None:
        return content
    numbers = of_4_bits(content) if layer.mixed else content.float()
    return (numbers * layer.scales[blocks, :, :, offsets][..., None]).to(dtype)


def _bits(values: Tensor) -> Tensor:
    """PyTorch does not index numbers of 8 bits on every device."""
    return values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values


def paged_attention(q: Tensor, layer: KvLayer, batch: PagedBatch, scores: Scores) -> Tensor:
    """Causal attention of each sequence's newest tokens over all its tokens in the cache, theirs
    included (so `rotary_store` comes first); with a window over the last ones up to itself. Queries
    are as that gave them, the result is of values before they were mixed.

    q and the result: [T, H, D]; query heads h * H/G to (h + 1) * H/G - 1 share key-value head h.
    Cache content outside the sequences' lengths has no influence, not even when it is NaN.
    """
    outputs = []
    decodes = batch.num_decodes
    if decodes:
        outputs.append(_decode(q[:decodes], layer, batch, scores))
    starts, lengths = batch.starts.tolist(), batch.lengths.tolist()
    for row in range(decodes, len(lengths)):
        places = torch.arange(lengths[row], device=q.device)
        if scores.window:  # as in `_decode`: what no token sees need not be there
            seen = lengths[row] - starts[row + 1] + starts[row] + 1 - scores.window
            places = places.clamp(min=max(0, seen))
        size = layer.values.shape[3]
        blocks = batch.block_tables[row, places // size]
        k, v = load_kv(layer, blocks, places % size, q.dtype).unbind(1)
        outputs.append(_prefill(q[starts[row] : starts[row + 1]], k, v, scores))
    found = torch.cat(outputs)
    return mix_heads(found) if layer.mixed else found


def _decode(q: Tensor, layer: KvLayer, batch: PagedBatch, scores: Scores) -> Tensor:
    """One token each of the first sequences: q [S, H, D], all at once, padded to the longest."""
    rows, heads, dim = q.shape
    _, _, kv_heads, size, _ = layer.values.shape
    lengths = batch.lengths[:rows, None]
    positions = torch.arange(int(lengths.max()), device=q.device)
    # Padding repeats a sequence's last token: what lies beyond it may be NaN, which a weight of
    # zero would not silence. So does what lies before the window, whose blocks may be others'.
    places = positions.minimum(lengths - 1)
    if scores.window:
        places = torch.where(positions < lengths - scores.window, lengths - 1, places)
    blocks = batch.block_tables.gather(1, places // size)
    k, v = load_kv(layer, blocks, places % size, q.dtype).unbind(2)
    mask = positions < lengths
    if scores.window:
        mask &= positions >= lengths - scores.window
    # The query heads of one key-value head are rows of one product: the cache is read once.
    result = _attend(
        q.view(rows, kv_heads, heads // kv_heads, dim),
        k.transpose(1, 2),
        v.transpose(1, 2),
        mask[:, None, None, :],
        scores,
    )
    return result.reshape(rows, heads, dim)


def _prefill(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    """The last tokens of one sequence: q [n, H, D] over k, v [length, G, D]."""
    count, heads, dim = q.shape
    length, kv_heads, _ = k.shape
    groups = heads // kv_heads
    mask = None
    if count < length or scores.window or scores.cap:
        mask = torch.ones(count, length, dtype=torch.bool, device=q.device)
        mask = mask.tril_(diagonal=length - count)
        if scores.window:
            mask = mask.triu_(diagonal=length - count - scores.window + 1)
    result = _attend(
        q.view(count, kv_heads, groups, dim).permute(1, 2, 0, 3),
        k.transpose(0, 1).unsqueeze(1).expand(-1, groups, -1, -1),
        v.transpose(0, 1).unsqueeze(1).expand(-1, groups, -1, -1),
        mask,
        scores,
    )
    return result.permute(2, 0, 1, 3).reshape(count, heads, dim)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """Queries [.., n, D] over keys and values [.., length, D]; no mask: a causal one."""
    if not scores.cap or mask is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scores.scale
        )
    found = capped((q @ k.transpose(-1, -2)).float() * scores.scale, scores.cap)
    return found.masked_fill(~mask, -torch.inf).softmax(-1).to(v.dtype) @ v
