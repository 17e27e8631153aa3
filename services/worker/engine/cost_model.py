"""How long a step takes, learned from the steps that ran.

    step = fixed + a * prompt tokens + b * what they look back on
                 + c * decodes       + d * what they look back on

The five costs are never negative: the least squares of relative errors over the last steps, old
ones fading. Errors relative to what was measured, for two reasons: a short step says as much as a
long one, and one that took far longer than it computes (its processor was taken away) says little.
Steps with prompts and steps without are remembered apart, so that a long spell of one kind does
not soon wash away what is known of the other.

What the steps do not tell apart keeps its proportions: the machine became slower or faster as a
whole, as far as that explains them. And since a time that is too short would outweigh all others,
none counts for less than a third of what was expected, and no cost falls by more than a half at
once.
"""

import math
from dataclasses import dataclass
from operator import mul

import numpy as np
from numpy.typing import NDArray

_KEPT = 0.95
"""Of a kind's memory, with each step of that kind: about the last twenty count."""
_KEPT_BESIDE = 0.998
"""Likewise, with each step of the other kind: it may not come again for long, and the machine may
have changed since."""
_SHORTEST = 1 / 3
"""Of the time that was expected."""
_SWEEPS = 3
"""Over the costs, each time one by one to its best; from where they stood, so that what the
steps do not tell apart stays as it was."""

_NOTHING = 1e-12
"""Of a size, (1 / s)^2: so little is left of steps that had it long ago."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computes, in numbers."""

    prompt_tokens: int = 0
    prompt_context: int = 0
    """Tokens that they look back on, themselves included, summed over all of them."""
    decodes: int = 0
    decode_context: int = 0
    """Likewise."""

    @property
    def sizes(self) -> tuple[float, float, float, float, float]:
        """What each of the five costs counts."""
        return 1, self.prompt_tokens, self.prompt_context, self.decodes, self.decode_context


def looked_back(start: int, count: int) -> int:
    """Tokens that those of a prompt at [start, start + count) look back on, summed."""
    return count * start + count * (count + 1) // 2


class _Memory:
    """Steps of one kind: of their sizes, divided by their seconds, the sums of products."""

    def __init__(self) -> None:
        self.products = np.zeros((5, 5))
        self.sums = np.zeros(5)

    def fade(self, kept: float) -> None:
        self.products *= kept
        self.sums *= kept

    def add(self, rates: NDArray[np.float64]) -> None:
        self.products += rates[:, None] * rates
        self.sums += rates


class CostModel:
    """Times are in seconds. One that has learned nothing takes all for nothing."""

    def __init__(self) -> None:
        self._costs = [0.0] * 5
        self._prompts = _Memory()
        self._decodes = _Memory()

    def step_s(self, shape: StepShape) -> float:
        """What a step should take; nothing, if it computes nothing."""
        if not (shape.prompt_tokens or shape.decodes):
            return 0.0
        return float(sum(map(mul, self._costs, shape.sizes)))

    def chunk_s(self, start: int, count: int) -> float:
        """By how much tokens [start, start + count) of a prompt lengthen a step."""
        _, token, context, _, _ = self._costs
        return token * count + context * looked_back(start, count)

    def chunk_within(self, seconds: float, start: int) -> float:
        """The most tokens of a prompt from `start` on that lengthen a step by no more than
        `seconds`; infinite, if they cost nothing."""
        if math.isinf(seconds):
            return math.inf
        _, token, context, _, _ = self._costs
        # context / 2 * n^2 + linear * n = seconds, in the form that holds for context = 0, too
        linear = token + context * (start + 0.5)
        root = linear + math.sqrt(linear * linear + 2 * context * max(0.0, seconds))
        return 2 * max(0.0, seconds) / root if root else math.inf

    def learn(self, shape: StepShape, seconds: float) -> None:
        """Takes in a step that ran and computed something."""
        seconds = max(seconds, _SHORTEST * self.step_s(shape), 1e-6)
        kind, other = self._prompts, self._decodes
        if not shape.prompt_tokens:
            kind, other = other, kind
        kind.fade(_KEPT)
        other.fade(_KEPT_BESIDE)
        kind.add(np.array(shape.sizes) / seconds)
        self._fit(kind.products + other.products, kind.sums + other.sums)

    def _fit(self, products: NDArray[np.float64], sums: NDArray[np.float64]) -> None:
        """All costs by one factor first, then one by one."""
        before = np.array(self._costs)
        if (explained := before @ products @ before) > 0:
            before *= before @ sums / explained
        costs = self._costs = before.tolist()
        least = [cost / 2 for cost in costs]
        rows, wanted = products.tolist(), sums.tolist()
        for _ in range(_SWEEPS):
            for index, row in enumerate(rows):
                if row[index] > _NOTHING:
                    missing = wanted[index] - sum(map(mul, costs, row))
                    costs[index] = max(least[index], costs[index] + missing / row[index])
