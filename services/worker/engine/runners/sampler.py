"""Chooses the next tokens.

A sampled token depends on the logits, the sequence's seed and the token's absolute position, on
nothing else: not on the batch, on earlier draws, or on the machine's random state. So a sequence
that is preempted, moved or failed over goes on as it would have.

Randomness is counter-based: Philox-4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers:
as easy as 1, 2, 3", SC 2011), key = the 64-bit seed, counter = (token id // 4, position, 0, 0), and
the word token id % 4 of its output. Sampling is by Gumbel-max (Maddison et al., arXiv 1411.0030):
argmax(logit / temperature - log(-log(u))) is distributed as softmax(logit / temperature), and the
mask of top-k, top-p and min-p (Nguyen et al., arXiv 2407.01082) needs no renormalization. Each of
the three leaves tokens out for itself: a token is drawn that all of them leave in.

Before that a row's edits change single logits (logits.py), and after it come the logprobs of what
was drawn, of the logits as they were before the edits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.sampling import Top

_TOP_P_WIDTH = 1024
_MASK = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The parameters of B rows, on the device of the logits."""

    sampled_rows: Tensor
    """int64 [R]: rows with temperature > 0. The fields below have one entry for each of them."""
    temperatures: Tensor
    """float32 [R]"""
    top_ks: Tensor
    """int64 [R]; 0: off"""
    top_ps: Tensor
    """float64 [R]"""
    least_scores: Tensor
    """float32 [R]: min_p as a distance to the best token's score; -inf: off"""
    seeds: Tensor
    """int64 [R]: the unsigned seed's bits"""
    positions: Tensor
    """int64 [R]: of the tokens to be sampled"""
    filtered: bool
    """Any row has top_k, top_p or min_p."""
    width: int
    """How many of the best tokens to look at first: enough for each top_k, mostly for top_p."""

    @classmethod
    def of(cls, rows: NDArray[np.void], device: torch.device) -> "SamplingBatch":
        """From B rows of SAMPLING. top_k 1 is greedy: ties go to the first token, as at 0."""
        drawn = np.flatnonzero((rows["temperature"] > 0) & (rows["top_k"] != 1))
        chosen = rows[drawn]
        top_ks = chosen["top_k"].astype(np.int64)
        by_top_p = chosen["top_p"] < 1
        nothing = np.full(len(chosen), -np.inf, np.float32)

        def tensor(values: NDArray[Any]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device)

        return cls(
            sampled_rows=tensor(drawn),
            temperatures=tensor(chosen["temperature"]),
            top_ks=tensor(top_ks),
            top_ps=tensor(chosen["top_p"]),
            least_scores=tensor(np.log(chosen["min_p"], out=nothing, where=chosen["min_p"] > 0)),
            seeds=tensor(chosen["seed"].view(np.int64)),
            positions=tensor(chosen["position"].astype(np.int64)),
            filtered=bool(by_top_p.any() or top_ks.any() or chosen["min_p"].any()),
            width=max(
                [1, *top_ks.tolist(), *([_TOP_P_WIDTH] if (by_top_p & (top_ks == 0)).any() else [])]
            ),
        )


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Next tokens, int64 [B], from float32 logits [B, vocab]."""
    tokens = logits.argmax(dim=-1)
    if len(batch.sampled_rows) == 0:
        return tokens
    scores = logits[batch.sampled_rows]
    # The best score becomes 0, so that no temperature, however small, overflows.
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / batch.temperatures[:, None]
    noise = gumbel_noise(batch.seeds, batch.positions, logits.shape[-1])
    if batch.filtered:
        noise.masked_fill_(scores < _lowest_allowed(scores, batch)[:, None], -torch.inf)
    tokens[batch.sampled_rows] = (scores + noise).argmax(dim=-1)
    return tokens


def keep_allowed(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Puts out of rows [M] of the logits [B, vocab] the tokens whose bits in words, int32
    [M, ceil(vocab / 32)], are not set."""
    bits = words[:, :, None] >> torch.arange(32, device=words.device) & 1
    forbidden = bits.flatten(1)[:, : logits.shape[-1]] == 0
    logits[rows] = logits[rows].masked_fill(forbidden, -torch.inf)


def edit(logits: Tensor, rows: NDArray[np.void], edits: NDArray[np.void]) -> None:
    """Changes float32 logits [R, vocab] as the rows' edits say. A token that is there twice is
    changed twice."""
    for row in np.flatnonzero(rows["num_edits"]):
        first = int(rows["first_edit"][row])
        own = edits[first : first + int(rows["num_edits"][row])]
        for once in _each_token_once(own):
            tokens, factor, add = (
                torch.from_numpy(np.ascontiguousarray(once[name])).to(logits.device)
                for name in ("token", "factor", "add")
            )
            x = logits[row, tokens.long()]
            logits[row, tokens.long()] = torch.where(x > 0, x / factor, x * factor) + add


def _each_token_once(edits: NDArray[np.void]) -> Iterator[NDArray[np.void]]:
    """Consecutive pieces of which none has a token twice."""
    while len(edits):
        _, firsts = np.unique(edits["token"], return_index=True)
        end = next((at for at, first in enumerate(np.sort(firsts)) if at != first), len(firsts))
        yield edits[:end]
        edits = edits[end:]


def top_of(logits: Tensor, tokens: Tensor, rows: NDArray[np.void]) -> Top:
    """Logprobs of int64 tokens [R] and of the best ones, by float32 logits [R, vocab]."""
    found = Top.of(rows)
    asked = np.flatnonzero(rows["logprobs"])
    if not len(asked):
        return found
    logprobs = logits[asked].log_softmax(dim=-1)
    # Stable, so that of equals the first comes first, as in C++.
    best = logprobs.sort(dim=-1, descending=True, stable=True)
    width = min(found.width - 1, logits.shape[-1])
    own = tokens[asked][:, None].clamp(min=0)
    ids = torch.cat((own, best.indices[:, :width]), dim=-1)
    values = torch.cat((logprobs.gather(-1, own), best.values[:, :width]), dim=-1)
    found.ids[:] = -1
    found.ids[asked, : 1 + width] = ids.cpu().numpy()
    found.logprobs[asked, : 1 + width] = values.cpu().numpy()
    return found


def _lowest_allowed(scores: Tensor, batch: SamplingBatch) -> Tensor:
    """The score, per row, below which tokens are out: [R]. Each row's best score is 0.

    Top-k keeps the k best, top-p of those the fewest best whose probability reaches p. Tokens that
    tie with the last one kept are kept too: a choice among equals would depend on sorting order.
    """
    vocab = scores.shape[-1]
    total = scores.exp().sum(dim=-1, dtype=torch.float64)
    width = min(batch.width, vocab)
    lowest, decided = _border(scores, batch, width, total)
    if width < vocab and not decided.all():
        lowest, _ = _border(scores, batch, vocab, total)
    return lowest.maximum(batch.least_scores)


def _border(
    scores: Tensor, batch: SamplingBatch, width: int, total: Tensor
) -> tuple[Tensor, Tensor]:
    """The lowest allowed scores, as far as the `width` best tokens tell, and whether they do.

    In float64, so that how wide the look is, which other rows decide, moves no border.
    """
    ranked = scores.topk(width, dim=-1, sorted=True).values
    has_k, has_p = batch.top_ks > 0, batch.top_ps < 1
    beyond_k = torch.arange(width, device=scores.device) >= batch.top_ks[:, None]
    outside = beyond_k & has_k[:, None]
    sums = ranked.double().exp().masked_fill(outside, 0).cumsum(dim=-1)
    wanted = batch.top_ps * torch.where(has_k, sums[:, -1], total)
    outside[:, 1:] |= (sums[:, :-1] >= wanted[:, None]) & has_p[:, None]
    last = (~outside).sum(dim=-1, keepdim=True) - 1
    lowest = ranked.gather(-1, last).squeeze(-1).masked_fill(~(has_k | has_p), -torch.inf)
    decided = has_k | ~has_p | (sums[:, -1] >= wanted)
    return lowest, decided


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise, float32 [R, vocab], for int64 seeds and positions [R]."""
    lanes = torch.arange(-(-vocab // 4), device=seeds.device).expand(len(seeds), -1)
    zeros = torch.zeros_like(lanes)
    words = philox(
        (seeds & _MASK, (seeds >> 32) & _MASK),
        (lanes, (positions & _MASK)[:, None].expand_as(lanes), zeros, zeros),
    )
    bits = torch.stack(words, dim=-1).view(len(seeds), -1)[:, :vocab]
    # 23 bits and a half: strictly between 0 and 1 in float32.
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    return uniform.log_().neg_().log_().neg_()


def philox(
    key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor], rounds: int = 10
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox-4x32: four words of [R, n] from a key of two words [R] and a counter of [R, n] each.

    Words are uint32 values in int64 tensors. A product's high half survives the wrap-around of
    signed 64-bit multiplication, because the shift's sign bits are masked off.
    """
    k0, k1 = key[0][:, None], key[1][:, None]
    c0, c1, c2, c3 = counter
    for _ in range(rounds):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((p1 >> 32) & _MASK) ^ c1 ^ k0
        c2 = ((p0 >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = p1 & _MASK, p0 & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3
