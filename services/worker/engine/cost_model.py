"""How long a step takes, learned from the steps that ran.

    step = fixed + a * prompt tokens + b * what they look back on
                 + c * decodes       + d * what they look back on

A Kalman filter (R. E. Kalman, "A new approach to linear filtering and prediction problems", 1960)
of the five costs: with each goes how uncertain it is, and with each pair how far the one follows
the other. A step corrects the costs that it tells most of, by as much as they are uncertain beside
the step's own noise. Two things make them uncertain again: the machine as a whole becomes slower or
faster, which moves all costs alike, those that no step shows, too; and each moves by itself, while
steps contain it. So where all steps are alike, what they do not tell apart keeps its proportions
and is known to be in doubt (`doubt`): the scheduler now and then makes a step of decodes alone.

A step may be held up, by any factor, and a clock may be wrong. So an error counts for no more than
twice what was to be expected, and no cost falls by more than a half at once: one step says little,
and a machine of another speed is believed after some dozens. No cost is ever negative. What of an
error does not count does not lessen the doubt, either.
"""

import math
from dataclasses import dataclass
from operator import mul

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_NOISE = 0.1
"""Of a step's time, that nobody can tell."""
_TOGETHER = 0.03
"""By so much of itself each cost moves from step to step, all in the same direction."""
_ALONE = 0.05
"""Likewise, each by itself."""
_FAR = 2.0
"""Of an error's standard deviation: beyond, it counts as that."""
_MOST_DOUBT = 1.0
"""Of a cost."""
_AT_MOST = (1, 1, 0.01, 1, 0.01)
"""Of the first step's time that contains it, what a cost may be about: to look back on a token
takes far less than to compute one."""


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


class CostModel:
    """Times are in seconds. One that has learned nothing takes all for nothing."""

    def __init__(self) -> None:
        self._costs = [0.0] * 5
        self._spread = np.zeros((5, 5))
        """Covariances."""

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

    def doubt(self, shape: StepShape) -> float:
        """How uncertain `step_s` is: its standard deviation, as a part of it."""
        sizes = np.array(shape.sizes)
        expected = self.step_s(shape)
        return math.sqrt(max(0.0, sizes @ self._spread @ sizes)) / expected if expected else 0.0

    def learn(self, shape: StepShape, seconds: float) -> None:
        """Takes in a step that ran and computed something."""
        seconds = max(seconds, 1e-6)
        sizes, costs = np.array(shape.sizes, float), np.array(self._costs)
        self._grow_doubt(sizes, costs, seconds)
        expected = float(sizes @ costs)
        shared = self._spread @ sizes
        variance = float(sizes @ shared) + (_NOISE * (expected or seconds)) ** 2
        error = seconds - expected
        counts = min(1.0, _FAR * math.sqrt(variance) / max(abs(error), 1e-12))
        gain = counts * shared / variance
        falls = np.divide(-gain * error, costs, out=np.zeros(5), where=costs > 0)
        gain *= min(1.0, 0.5 / max(falls.max(), 0.5))
        self._costs = np.maximum(costs + gain * error, 0.0).tolist()
        self._spread -= np.outer(gain, shared)

    def _grow_doubt(self, sizes: Floats, costs: Floats, seconds: float) -> None:
        """Since the step before. What has no cost yet may be all that took the `seconds`."""
        spread, taking_part = self._spread, sizes > 0
        alone = _ALONE * costs * taking_part
        spread += _TOGETHER**2 * np.outer(costs, costs) + np.diag(alone * alone)
        deviations = np.sqrt(spread.diagonal())
        most = _MOST_DOUBT * costs
        less = np.divide(most, deviations, out=np.ones(5), where=deviations > most)
        spread *= np.outer(less, less)
        for new in np.flatnonzero(taking_part & (costs == 0)):
            spread[new, new] = (_AT_MOST[new] * seconds / sizes[new]) ** 2
