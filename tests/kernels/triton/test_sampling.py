"""The GPU's sampler, run by Triton's interpreter, against the one in torch that says what sampling
is."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.sampling import NONE_LEFT, NOT_FINITE
from kernels.triton.sampling import SamplerRoom, sample
from services.worker.engine.messages import Sampling
from services.worker.engine.runners import sampler
from tests.support.samplings import as_rows, rows_of_logits

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, at infinities
VOCAB, ROWS = 2051, 12
"""More than two tiles, of which the last is all but empty."""


def drawn(logits: torch.Tensor, samplings: list[Sampling], positions: list[int]) -> list[int]:
    rows = as_rows(samplings, positions)
    tokens = torch.full((len(rows),), 10**6, dtype=torch.int32)
    room = SamplerRoom.of(len(rows), logits.shape[1], logits.device)
    sample(tokens, logits, torch.from_numpy(rows.view(np.int32).reshape(len(rows), -1)), room)
    return tokens.tolist()


def expected(logits: torch.Tensor, samplings: list[Sampling], positions: list[int]) -> list[int]:
    batch = sampler.SamplingBatch.of(as_rows(samplings, positions), torch.device("cpu"))
    return sampler.sample(logits, batch).tolist()


KINDS = [
    Sampling(1, temperature=0.3),
    Sampling(1, temperature=3.0, top_k=5),
    Sampling(1, temperature=1.0, top_k=5000, top_p=0.5),
    Sampling(1, temperature=2.0, top_p=0.999),
    Sampling(1, temperature=1.0, top_p=1e-9),
    Sampling(1, temperature=1.0, top_k=40, top_p=0.8),
    Sampling(1, temperature=1e-30, top_k=3),
    Sampling(1, temperature=0.7, min_p=0.05),
    Sampling(1, temperature=2.0, top_k=40, min_p=0.3),
]


@pytest.mark.parametrize("turn", range(2))
def test_the_same_tokens_as_in_torch(turn: int) -> None:
    """Rows of all kinds together; each turn brings each row of logits another."""
    logits = rows_of_logits(ROWS, VOCAB)
    generator = np.random.default_rng(turn)
    seeds = generator.integers(0, 2**64, ROWS, np.uint64).tolist()
    positions = generator.integers(0, 2**31 - 1, ROWS).tolist()
    samplings = [
        replace(of, seed=seed) for seed, of in zip(seeds, (KINDS * 4)[2 * turn :], strict=False)
    ]
    assert drawn(logits, samplings, positions) == expected(logits, samplings, positions)


def test_top_p_is_of_what_top_k_leaves() -> None:
    """Of 1 and 0.74 together seven tenths need both; of the first alone they would not."""
    logits = torch.tensor([[0.0, -0.3, -0.4]]).expand(ROWS, -1)
    samplings = [
        Sampling(1, temperature=1.0, top_k=2, top_p=0.7, seed=seed) for seed in range(ROWS)
    ]
    found = drawn(logits, samplings, [3] * ROWS)
    assert found == expected(logits, samplings, [3] * ROWS)
    assert set(found) == {0, 1}


def test_greedy_and_drawn_rows_together_and_of_bfloat16() -> None:
    logits = rows_of_logits(ROWS, VOCAB).bfloat16()
    greedy = [Sampling(1, temperature=0.0), Sampling(1, temperature=1.0, top_k=1, seed=9)]
    samplings = [*greedy, Sampling(1, temperature=1.0, seed=2**64 - 1, top_p=0.9)] * 4
    found = drawn(logits, samplings, list(range(ROWS)))
    assert found == expected(logits.float(), samplings, list(range(ROWS)))
    best = logits.float().argmax(-1).tolist()
    assert [found[i] for i in range(ROWS) if i % 3 < 2] == [
        best[i] for i in range(ROWS) if i % 3 < 2
    ]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "of", [Sampling(1, temperature=0.0), Sampling(1, temperature=1.0, top_p=0.5)], ids=str
)
def test_logits_that_are_not_finite_are_told(of: Sampling, bad: float) -> None:
    logits = torch.zeros(4, VOCAB)
    logits[0, 0] = logits[1, VOCAB - 1] = bad
    logits[2, :] = -torch.inf
    found = drawn(logits, [of] * 4, [1] * 4)
    assert found[:3] == [NOT_FINITE, NOT_FINITE, NONE_LEFT]
    assert found[3] >= 0
