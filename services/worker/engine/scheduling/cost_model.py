"""How long a step takes, learned from the steps that ran.

    step = fixed + a * prompt tokens + b * what they look back on
                 + c * decodes       + d * what they look back on
                 + e * guesses behind them (speculation.py)

A Kalman filter (R. E. Kalman, "A new approach to linear filtering and prediction problems", 1960)
of the six costs: with each goes how uncertain it is, and with each pair how far the one follows
the other. A step corrects the costs that it tells most of, by as much as they are uncertain beside
the step's own noise. Two things make those that a step contains uncertain again: the machine as a
whole becomes slower or faster, which moves all of them alike; and each moves by itself. So where
all steps are alike, what they do not tell apart keeps its proportions and is known to be in doubt
(`doubt`): the scheduler now and then makes a step of decodes alone. What steps do not contain stays
as it was, and in ever more doubt: they do not tell whether the machine changed or only what they
compute, and to guess it step by step would add up to anything.

A step may be held up, by any factor, and a clock may be wrong. So an error counts for no more than
twice what was to be expected, and no cost falls by more than a half at once: one step says little,
and a machine of another speed is believed after some dozens. No cost is ever negative. What of an
error does not count does not lessen the doubt, either.
"""

import math
from collections.abc import Sequence as Seq
from typing import NamedTuple

_NOISE = 0.1
"""Of a step's time, that nobody can tell."""
_TOGETHER = 0.03
"""By so much of itself each cost moves from step to step, those of the step in the same direction.
"""
_ALONE = 0.05
"""Likewise, each by itself."""
_FAR = 2.0
"""Of an error's standard deviation: beyond, it counts as that."""
_MOST_DOUBT = 1.0
"""Of a cost."""
_AT_MOST = (1, 1, 0.01, 1, 0.01, 1)
"""Of the first step's time that contains it, what a cost may be about: to look back on a token
takes far less than to compute one."""


Sizes = tuple[float, float, float, float, float, float]
_COSTS = 6


class StepShape(NamedTuple):
    """What a step computes, in numbers."""

    prompt_tokens: int = 0
    prompt_context: int = 0
    """Tokens that they look back on, themselves included, summed over all of them."""
    decodes: int = 0
    decode_context: int = 0
    """Likewise."""
    drafts: int = 0


def looked_back(start: int, count: int) -> int:
    """Tokens that those of a prompt at [start, start + count) look back on, summed."""
    return count * start + count * (count + 1) // 2


class CostModel:
    """Times are in seconds. One that has learned nothing takes all for nothing."""

    def __init__(self) -> None:
        self._costs = [0.0] * _COSTS
        self._spread = [[0.0] * _COSTS for _ in range(_COSTS)]
        """Covariances. Lists, since so few numbers take numpy longer."""

    def step_s(self, shape: StepShape) -> float:
        """What a step should take; nothing, if it computes nothing."""
        if not (shape.prompt_tokens or shape.decodes):
            return 0.0
        return _dot(self._costs, (1, *shape))

    @property
    def fixed_s(self) -> float:
        """Of a step, whatever it computes."""
        return self._costs[0]

    @property
    def draft_s(self) -> float:
        """By how much a guess lengthens a step."""
        return self._costs[-1]

    def chunk_s(self, start: int, count: int) -> float:
        """By how much tokens [start, start + count) of a prompt lengthen a step."""
        _, token, context, *_ = self._costs
        return token * count + context * looked_back(start, count)

    def chunk_within(self, seconds: float, start: int) -> float:
        """The most tokens of a prompt from `start` on that lengthen a step by no more than
        `seconds`; infinite, if they cost nothing."""
        if math.isinf(seconds):
            return math.inf
        _, token, context, *_ = self._costs
        # context / 2 * n^2 + linear * n = seconds, in the form that holds for context = 0, too
        linear = token + context * (start + 0.5)
        root = linear + math.sqrt(linear * linear + 2 * context * max(0.0, seconds))
        return 2 * max(0.0, seconds) / root if root else math.inf

    def doubt(self, shape: StepShape) -> float:
        """How uncertain `step_s` is: its standard deviation, as a part of it."""
        sizes = (1, *shape)
        expected = _dot(self._costs, sizes)
        if not expected:
            return 0.0
        shared = [_dot(row, sizes) for row in self._spread]
        return math.sqrt(max(0.0, _dot(shared, sizes))) / expected

    def learn(self, shape: StepShape, seconds: float) -> None:
        """Takes in a step that ran and computed something."""
        # Plain loops: it runs in each step, and each call more is one through cold caches.
        seconds = max(seconds, 1e-6)
        sizes, costs, spread = (1, *shape), self._costs, self._spread
        there = [index for index in range(_COSTS) if sizes[index]]
        self._grow_doubt(sizes, there, seconds)
        shared: list[float] = []
        """How far each cost goes with a step of these sizes: covariances."""
        expected = variance = 0.0
        for row in spread:
            known = 0.0
            for index in there:
                known += row[index] * sizes[index]
            shared.append(known)
        for index in there:
            expected += costs[index] * sizes[index]
            variance += shared[index] * sizes[index]
        error = seconds - expected
        noise = _NOISE * max(expected or seconds, 1e-6)
        variance = max(0.0, variance) + noise**2
        counts = min(1.0, _FAR * math.sqrt(variance) / max(abs(error), 1e-12))
        for index, cost in enumerate(costs):
            fall = -error * shared[index] / variance
            if cost and counts * fall > cost / 2:
                counts = cost / 2 / fall
        for index, row in enumerate(spread):
            gain = counts * shared[index] / variance
            costs[index] = max(0.0, costs[index] + gain * error)
            for other in range(_COSTS):
                row[other] -= gain * shared[other]

    def _grow_doubt(self, sizes: Sizes, there: list[int], seconds: float) -> None:
        """Since the step before, which of the costs are `there`. What has no cost yet may be all
        that took the `seconds`."""
        costs, spread = self._costs, self._spread
        for index in there:
            for other in there:
                spread[index][other] += _TOGETHER**2 * costs[index] * costs[other]
        for index, cost in enumerate(costs):
            row, size = spread[index], sizes[index]
            if size and not cost:
                for other in range(_COSTS):  # it goes with no other as yet
                    row[other] = spread[other][index] = 0.0
                row[index] = (_AT_MOST[index] * seconds / size) ** 2
                continue
            row[index] += ((_ALONE if size else _TOGETHER) * cost) ** 2
            if row[index] > (most := (_MOST_DOUBT * cost) ** 2):
                less = math.sqrt(most / row[index])
                for other in range(_COSTS):
                    row[other] *= less
                    spread[other][index] *= less


def _dot(some: Seq[float], others: Seq[float]) -> float:
    a, b, c, d, e, f = some
    u, v, w, x, y, z = others
    return a * u + b * v + c * w + d * x + e * y + f * z
