"""The next tokens: what services/worker/engine/runners/sampler.py computes, without a sort.

A row's best score first; then, of a row with top_k or top_p, the least score that may be drawn;
then the best of score and noise. A row is read by several programs at a time, but for the border,
whose search goes by the bits of a score's distance to the best: 31 times it asks how many
candidates, or how much of the probability, lie nearer. Probabilities are summed as integers, in
units of 2^-44 of the best's: in whatever order, the sum is the same.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling import NONE_LEFT, NOT_FINITE, SAMPLING
from kernels.triton.launch import power_of_two
from kernels.triton.philox import gumbel_noise

TILE = 1024
MOST_SPANS = 64
WORDS = SAMPLING.itemsize // 4
_TEMPERATURE, _TOP_K, _TOP_P, _SEED, _POSITION, _MIN_P = (
    SAMPLING.fields[name][1]  # type: ignore[index]
    for name in ("temperature", "top_k", "top_p", "seed", "position", "min_p")
)

NEVER = tl.constexpr(-19.5)
"""Noise is between -2.82 and 16.65: a score below cannot win over the best's 0."""
UNIT = tl.constexpr(float(2**44))
_NOT_FINITE, _NONE_LEFT = tl.constexpr(NOT_FINITE), tl.constexpr(NONE_LEFT)


@triton.jit
def best_kernel(
    best, logits, stride, vocab, SPAN: tl.constexpr, SPANS: tl.constexpr, TILE: tl.constexpr
):
    """Of each span of a row the best logit, or NaN if one is."""
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    high = tl.full([TILE], float("-inf"), tl.float32)
    bad = tl.zeros([TILE], tl.int32)
    for first in range(span * SPAN, tl.minimum((span + 1) * SPAN, vocab), TILE):
        at = first + tl.arange(0, TILE)
        x = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        high = tl.maximum(high, x)
        bad |= (x != x).to(tl.int32)
    found = tl.where(tl.max(bad, 0) > 0, float("nan"), tl.max(high, 0))
    tl.store(best + row * SPANS + span, found)


@triton.jit
def best_of(best, row, SPANS: tl.constexpr):
    """The row's best logit; NaN if one is."""
    found = tl.load(best + row * SPANS + tl.arange(0, SPANS))
    bad = tl.max((found != found).to(tl.int32), 0) > 0
    return tl.where(bad, float("nan"), tl.max(tl.where(found != found, float("-inf"), found), 0))


@triton.jit
def scores_at(logits, stride, row, at, vocab, best, temperature):
    """As in torch: the best is 0, and division is exact to the last bit."""
    x = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x - best, tl.zeros_like(x) + temperature)


@triton.jit
def mass_of(scores):
    return (tl.exp(scores) * UNIT).to(tl.int64)


@triton.jit
def suffice(number, mass, by_count, most, wanted):
    """Whether so many candidates, of such probability, tell where the border is."""
    by_mass = tl.sum(mass, 0).to(tl.float64) >= wanted
    return tl.where(by_count, tl.sum(number, 0) >= most, by_mass)


@triton.jit
def nearer(keys, count, border, TILE: tl.constexpr):
    """Of candidates nearer to the best than `border`: how many, and their probability."""
    number = tl.zeros([TILE], tl.int32)
    mass = tl.zeros([TILE], tl.int64)
    for first in range(0, count, TILE):
        at = first + tl.arange(0, TILE)
        inside = at < count
        key = tl.load(keys + at, mask=inside, other=0)
        near = inside & (key < border)
        number += near.to(tl.int32)
        mass += tl.where(near, mass_of(-key.to(tl.float32, bitcast=True)), 0)
    return tl.sum(number, 0), tl.sum(mass, 0)


@triton.jit
def border_of(keys, count, most, wanted, TILE: tl.constexpr):
    """The key of the candidate with which there are `most`, or with which the probability reaches
    `wanted`, whichever comes first."""
    border = 0
    for step in range(31):
        further = border + (1 << (30 - step))
        number, mass = nearer(keys, count, further, TILE)
        border = tl.where((number < most) & (mass.to(tl.float64) < wanted), further, border)
    return border


@triton.jit
def border_kernel(
    least,
    logits,
    stride,
    vocab,
    best,
    floats,
    ints,
    doubles,
    keys,
    TEMPERATURE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    WORDS: tl.constexpr,
    SPANS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Of each row the least score that may be drawn."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(floats + row * WORDS + TEMPERATURE)
    top_k = tl.load(ints + row * WORDS + TOP_K)
    top_p = tl.load(doubles + row * (WORDS // 2) + TOP_P)
    lowest = float("-inf")
    if (temperature > 0) & (top_k != 1) & ((top_k > 0) | (top_p < 1)):
        high = best_of(best, row, SPANS)
        # How many there are, and their probability, to three depths, and altogether.
        none, nothing = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int64)
        n0, n1, n2 = none, none, none
        m0, m1, m2, m3 = nothing, nothing, nothing, nothing
        for first in range(0, vocab, TILE):
            at = first + tl.arange(0, TILE)
            scores = scores_at(logits, stride, row, at, vocab, high, temperature)
            mass = mass_of(scores)
            n0 += (scores >= -4.0).to(tl.int32)
            n1 += (scores >= -16.0).to(tl.int32)
            n2 += (scores >= -64.0).to(tl.int32)
            m0 += tl.where(scores >= -4.0, mass, 0)
            m1 += tl.where(scores >= -16.0, mass, 0)
            m2 += tl.where(scores >= -64.0, mass, 0)
            m3 += mass
        total = tl.sum(m3, 0)
        by_count = top_k > 0
        most = tl.where(by_count, tl.minimum(top_k, vocab), vocab)
        wanted = top_p * total.to(tl.float64)
        depth = tl.where(suffice(n2, m2, by_count, most, wanted), -64.0, float("-inf"))
        depth = tl.where(suffice(n1, m1, by_count, most, wanted), -16.0, depth)
        depth = tl.where(suffice(n0, m0, by_count, most, wanted), -4.0, depth)

        own = keys + row * vocab
        count = 0
        for first in range(0, vocab, TILE):
            at = first + tl.arange(0, TILE)
            scores = scores_at(logits, stride, row, at, vocab, high, temperature)
            kept = (scores >= depth) & (at < vocab)
            place = count + tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(own + place, (0.0 - scores).to(tl.int32, bitcast=True), mask=kept)
            count += tl.sum(kept.to(tl.int32), 0)
        tl.debug_barrier()  # candidates are read by other threads than wrote them

        every = total.to(tl.float64) * 2
        border = border_of(own, count, most, tl.where(by_count, every, wanted), TILE)
        if by_count & (top_p < 1):
            number, mass = nearer(own, count, border, TILE)
            last = mass_of(-border.to(tl.float32, bitcast=True))
            mass += (most - number) * last
            border = border_of(own, count, most, top_p * mass.to(tl.float64), TILE)
        lowest = -border.to(tl.float32, bitcast=True)
    min_p = tl.load(floats + row * WORDS + MIN_P)
    if min_p > 0:
        lowest = tl.maximum(lowest, tl.log(min_p))
    tl.store(least + row, lowest)


@triton.jit
def draw_kernel(
    winners,
    values,
    logits,
    stride,
    vocab,
    best,
    least,
    floats,
    ints,
    longs,
    TEMPERATURE: tl.constexpr,
    TOP_K: tl.constexpr,
    SEED: tl.constexpr,
    POSITION: tl.constexpr,
    WORDS: tl.constexpr,
    SPAN: tl.constexpr,
    SPANS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Of each span of a row the token whose score and noise are the most, and how much."""
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(floats + row * WORDS + TEMPERATURE)
    top_k = tl.load(ints + row * WORDS + TOP_K)
    seed = tl.load(longs + row * (WORDS // 2) + SEED)
    position = tl.load(ints + row * WORDS + POSITION)
    high = best_of(best, row, SPANS)
    draws = (temperature > 0) & (top_k != 1)
    lowest = tl.maximum(tl.load(least + row), NEVER)
    if not draws:
        temperature = 1.0
        lowest = 0.0  # the best alone
    most, winner = float("-inf"), 0
    for first in range(span * SPAN, tl.minimum((span + 1) * SPAN, vocab), TILE):
        at = first + tl.arange(0, TILE)
        scores = scores_at(logits, stride, row, at, vocab, high, temperature)
        allowed = scores >= lowest
        if tl.max(allowed.to(tl.int32), 0) > 0:
            if draws:
                scores += gumbel_noise(seed, position, first, TILE)
            scores = tl.where(allowed, scores, float("-inf"))
            value = tl.max(scores, 0)
            if value > most:
                most = value
                winner = first + tl.argmax(scores, 0)
    tl.store(winners + row * SPANS + span, winner)
    tl.store(values + row * SPANS + span, most)


@triton.jit
def pick_kernel(tokens, winners, values, best, SPANS: tl.constexpr):
    """Of a row's spans the best one's token, or why there is none."""
    row = tl.program_id(0)
    at = row * SPANS + tl.arange(0, SPANS)
    high = best_of(best, row, SPANS)
    finite = (high == high) & (tl.abs(high) != float("inf"))
    span = tl.argmax(tl.load(values + at), 0)
    token = tl.load(winners + row * SPANS + span)
    why_none = tl.where(high == float("-inf"), _NONE_LEFT, _NOT_FINITE)
    tl.store(tokens + row, tl.where(finite, token, why_none))


@dataclass(frozen=True)
class SamplerRoom:
    """Memory for what the sampler's kernels leave each other, for up to `rows` rows."""

    best: Tensor
    winners: Tensor
    values: Tensor
    """[rows, spans] each"""
    least: Tensor
    """[rows]"""
    keys: Tensor
    """int32 [rows, vocab]: candidates' distances to the best, by their bits"""

    @classmethod
    def of(cls, rows: int, vocab: int, device: torch.device) -> "SamplerRoom":
        def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        spans = min(MOST_SPANS, power_of_two(triton.cdiv(vocab, TILE)))
        return cls(
            best=room(rows, spans),
            winners=room(rows, spans, dtype=torch.int32),
            values=room(rows, spans),
            least=room(rows),
            keys=room(rows, vocab, dtype=torch.int32),
        )

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.best, self.winners, self.values, self.least, self.keys))


def sample(tokens: Tensor, logits: Tensor, samplings: Tensor, room: SamplerRoom) -> None:
    """Fills tokens, int32 [R]; below 0: why the row of logits [R, vocab] has none.
    samplings: int32 [R, WORDS], the bytes of SAMPLING."""
    rows, vocab = logits.shape
    spans = room.best.shape[1]
    span = triton.cdiv(triton.cdiv(vocab, spans), TILE) * TILE
    floats, longs = samplings.view(torch.float32), samplings.view(torch.int64)
    common = {"SPANS": spans, "TILE": TILE, "num_warps": 4}
    of_row = {"TEMPERATURE": _TEMPERATURE // 4, "TOP_K": _TOP_K // 4, "WORDS": WORDS}
    scored = (logits, logits.stride(0), vocab)
    best_kernel[(rows, spans)](room.best, *scored, SPAN=span, **common)
    border_kernel[(rows,)](
        room.least,
        *scored,
        room.best,
        floats,
        samplings,
        samplings.view(torch.float64),
        room.keys,
        TOP_P=_TOP_P // 8,
        MIN_P=_MIN_P // 4,
        **of_row,
        **common,
    )
    draw_kernel[(rows, spans)](
        room.winners,
        room.values,
        *scored,
        room.best,
        room.least,
        floats,
        samplings,
        longs,
        SEED=_SEED // 8,
        POSITION=_POSITION // 4,
        SPAN=span,
        **of_row,
        **common,
    )
    pick_kernel[(rows,)](tokens, room.winners, room.values, room.best, SPANS=spans, num_warps=1)
