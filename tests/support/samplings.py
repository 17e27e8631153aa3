"""Sampling parameters as the kernels take them."""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.sampling import SAMPLING
from services.worker.engine.messages import Sampling


def as_rows(samplings: Iterable[Sampling], positions: Iterable[int]) -> NDArray[np.void]:
    return np.array(
        [
            (s.temperature, s.top_k, s.top_p, s.seed, position, s.min_p, 0, 0, 0, 0)
            for s, position in zip(samplings, positions, strict=True)
        ],
        SAMPLING,
    )


def rows_of_logits(rows: int, vocab: int) -> torch.Tensor:
    """[rows, vocab], at least 12: flat and steep, of two levels, with ties, shifted, and with
    tokens that are out."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(rows, vocab, generator=generator) * torch.logspace(-1, 1.3, rows)[:, None]
    logits[3] = logits[3].round()
    logits[5] += 1e4
    logits[7, ::2] = -torch.inf
    logits[9] = torch.where(torch.arange(vocab) == 77, 50.0, 0.0)
    logits[11] = 0
    return logits
