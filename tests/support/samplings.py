"""Sampling parameters as the kernels take them."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kernels.sampling import SAMPLING
from services.worker.engine.messages import Sampling


def as_rows(samplings: Iterable[Sampling], positions: Iterable[int]) -> NDArray[np.void]:
    return np.array(
        [
            (s.temperature, s.top_k, s.top_p, s.seed, position)
            for s, position in zip(samplings, positions, strict=True)
        ],
        SAMPLING,
    )
