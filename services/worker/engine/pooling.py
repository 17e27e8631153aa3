"""What a request gets that asks for no tokens: an embedding, or logits, of its prompt's states."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.worker.engine.messages import Pooling

Numbers = NDArray[np.float64]


class Head(Protocol):
    """What makes logits of a state."""

    @property
    def logit_cap(self) -> float: ...

    def head_rows(self, ids: Sequence[int]) -> NDArray[np.float32]: ...


class Pool:
    """Gathers the states of one sequence, whose prompt may come in chunks."""

    def __init__(self, wanted: Pooling) -> None:
        self._wanted = wanted
        self._sum: Numbers | None = None

    @property
    def of_all(self) -> bool:
        """Of all tokens; else of the last one."""
        return self._wanted.kind == "mean"

    def add(self, states: NDArray[np.float32]) -> None:
        """The sum of a chunk's."""
        wide = states.astype(np.float64)
        self._sum = wide if self._sum is None else self._sum + wide

    def clear(self) -> None:
        """All of it is to be computed again."""
        self._sum = None

    def numbers(self, head: Head) -> bytes:
        """Once all have come: float32. A sum is at unit length what its mean is."""
        assert self._sum is not None
        if self._wanted.kind == "logits":
            found = _logits(self._sum, self._wanted.logits_of, head)
        else:
            found = _at_unit_length(self._sum[: self._wanted.dimensions or None])
        return found.astype("<f4").tobytes()


def _at_unit_length(vector: Numbers) -> Numbers:
    return vector / max(float(np.linalg.norm(vector)), 1e-12)


def _logits(state: Numbers, ids: Sequence[int], head: Head) -> Numbers:
    found: Numbers = head.head_rows(ids).astype(np.float64) @ state
    return head.logit_cap * np.tanh(found / head.logit_cap) if head.logit_cap else found
