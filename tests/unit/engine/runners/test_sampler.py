"""Sampling: the right distribution, and a token that depends on seed and position alone."""

import math
from collections.abc import Iterable, Sequence

import pytest
import torch
from torch import Tensor

from services.worker.engine import Sampling
from services.worker.engine.runners.sampler import (
    SamplingBatch,
    _lowest_allowed,
    gumbel_noise,
    philox,
    sample,
)
from tests.support.samplings import as_rows


def batch_of(samplings: Sequence[Sampling], positions: Iterable[int]) -> SamplingBatch:
    return SamplingBatch.of(as_rows(samplings, positions), torch.device("cpu"))


def draw(logits: Tensor, samplings: list[Sampling], positions: list[int]) -> list[int]:
    tokens: list[int] = sample(logits, batch_of(samplings, positions)).tolist()
    return tokens


def draws(logits: Tensor, count: int, **fields: float) -> Tensor:
    """`count` tokens of one row of logits, each at another position; int64 [count]."""
    samplings = [Sampling(1, **{"seed": 7, **fields})] * count  # type: ignore[arg-type]
    batch = batch_of(samplings, range(count))
    return sample(logits.expand(count, -1), batch)


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [  # the known answers that Random123 publishes (kat_vectors)
        ((0, 0), (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((2**32 - 1,) * 2, (2**32 - 1,) * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(
    key: tuple[int, int], counter: tuple[int, int, int, int], words: str
) -> None:
    k0, k1 = (torch.tensor([k]) for k in key)
    c0, c1, c2, c3 = (torch.tensor([[c]]) for c in counter)
    result = philox((k0, k1), (c0, c1, c2, c3))
    assert " ".join(f"{word.item():08x}" for word in result) == words


def test_noise_is_gumbel_distributed_and_finite() -> None:
    noise = gumbel_noise(torch.arange(64), torch.arange(64), 4096).double()
    assert torch.isfinite(noise).all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)


def test_tokens_follow_the_softmax() -> None:
    """Chi-square over 12 tokens; 11 degrees of freedom exceed 31.3 once in a thousand."""
    logits = torch.linspace(-2, 2, 12)
    for temperature in (0.5, 1.0, 2.0):
        count = 20_000
        seen = draws(logits, count, temperature=temperature).bincount(minlength=12).double()
        wanted = (logits / temperature).double().softmax(0) * count
        assert ((seen - wanted) ** 2 / wanted).sum() < 31.3


def test_seeds_draw_independently_at_the_same_position() -> None:
    count = 20_000
    samplings = [Sampling(1, seed=seed) for seed in range(count)]
    batch = batch_of(samplings, [5] * count)
    seen = sample(torch.zeros(count, 8), batch).bincount(minlength=8).double()
    assert ((seen - count / 8) ** 2 / (count / 8)).sum() < 24.3  # 7 degrees, one in a thousand


def test_token_depends_on_seed_and_position_alone() -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 500)
    samplings = [
        Sampling(
            1,
            temperature=(0, 0.7, 1.3)[i % 3],
            top_k=(0, 20, 400)[i % 3 if i % 2 else 0],
            top_p=(1.0, 0.8)[i % 2],
            seed=2**64 - 1 - i,
        )
        for i in range(40)
    ]
    positions = list(range(100, 140))
    together = draw(logits, samplings, positions)
    singly = [draw(logits[i : i + 1], [samplings[i]], [positions[i]])[0] for i in range(40)]
    order = torch.randperm(40).tolist()
    shuffled = draw(logits[order], [samplings[i] for i in order], [positions[i] for i in order])
    torch.manual_seed(99)  # torch's own generator has no part in it
    assert together == singly == draw(logits, samplings, positions)
    assert shuffled == [together[i] for i in order]


def test_other_seed_or_position_gives_other_tokens() -> None:
    logits = torch.zeros(1, 1000)
    tokens = {
        draw(logits, [Sampling(1, seed=seed)], [position])[0]
        for seed in (0, 1, 2**32, 2**63)
        for position in range(5)
    }
    assert len(tokens) > 15


def test_temperature_zero_is_greedy_and_near_zero_is_too() -> None:
    torch.manual_seed(0)
    logits = torch.randn(16, 300)
    best = logits.argmax(-1).tolist()
    for temperature in (0.0, 1e-30):
        assert draw(logits, [Sampling(1, temperature=temperature)] * 16, [3] * 16) == best


@pytest.mark.parametrize("top_k", [1, 2, 7, 64, 1000])
def test_top_k_keeps_exactly_the_best(top_k: int) -> None:
    torch.manual_seed(1)
    logits = torch.randn(64) * 0.3
    seen = set(draws(logits, 8000, top_k=top_k).tolist())
    assert seen == set(logits.topk(min(top_k, 64)).indices.tolist())


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.05, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.985, 4), (1.0, 5)],
)
def test_top_p_keeps_the_fewest_that_reach_p(top_p: float, kept: int) -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01]).log()[torch.tensor([3, 0, 4, 1, 2])]
    best = logits.topk(kept).indices.tolist()
    assert set(draws(logits, 8000, top_p=top_p).tolist()) == set(best)


def test_top_p_counts_among_the_top_k() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Of the best two, the first has 4/7 of the probability.
    assert set(draws(logits, 2000, top_k=2, top_p=0.5).tolist()) == {0}
    assert set(draws(logits, 2000, top_k=2, top_p=0.6).tolist()) == {0, 1}


def test_borders_equal_their_definition_whoever_else_is_in_the_batch() -> None:
    """Peaked and flat rows together, over more tokens than are looked at first."""
    torch.manual_seed(3)
    vocab = 3000
    settings = [(0, 0.5), (0, 0.999), (5, 1.0), (50, 0.7), (2500, 0.9), (0, 1.0)]
    scores = torch.randn(12, vocab) * torch.tensor([0.1, 4.0]).repeat_interleave(6)[:, None]
    scores -= scores.amax(-1, keepdim=True)
    samplings = [Sampling(1, top_k=k, top_p=p) for k, p in settings * 2]
    for rows in ([*range(12)], [0], [1], [6], [7], [2, 8], [3, 4]):
        batch = batch_of([samplings[row] for row in rows], [0] * len(rows))
        for row, border in zip(rows, _lowest_allowed(scores[rows], batch).tolist(), strict=True):
            top_k, top_p = settings[row % 6]
            ranked = scores[row].sort(descending=True).values[: top_k or vocab].double()
            before = ranked.softmax(0).cumsum(0) - ranked.softmax(0)
            kept = int((before < top_p).sum())
            expected = -math.inf if row % 6 == 5 else ranked[kept - 1].item()
            assert border == expected


def test_ties_at_the_border_are_all_kept() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    assert set(draws(logits, 4000, top_k=2).tolist()) == {0, 1, 2, 3}


def test_filtered_tokens_keep_their_proportions() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0])
    count = 20_000
    seen = draws(logits, count, top_k=3).bincount(minlength=5).double()
    wanted = logits[:3].double().softmax(0) * count
    assert seen[3:].sum() == 0
    assert ((seen[:3] - wanted) ** 2 / wanted).sum() < 13.8  # 2 degrees, one in a thousand
