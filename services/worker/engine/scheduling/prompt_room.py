"""What a step has left for prompts, beside its decodes."""

import math

from services.worker.engine.scheduling.cost_model import CostModel, StepShape

_SLOWED = 2.0
"""A step with prompts may take so many times as long as one without."""
_LEAST_SHARE = 0.2
"""Of a step's time, for prompts."""
_DOUBT = 0.2
"""Of what decodes take alone: known no better, it is worth a step without prompts."""


def is_worth_a_look(cost: CostModel, decoding: StepShape) -> bool:
    """Whether the decodes should run once without prompts beside them, to see what they take: that
    is what steps with prompts are sized by, and do not tell."""
    return bool(decoding.decodes) and cost.doubt(decoding) > _DOUBT


class PromptRoom:
    """Dealt out in turn, until nothing is left."""

    def __init__(self, cost: CostModel, tokens: int, seconds: float) -> None:
        self._cost = cost
        self._tokens = tokens
        self.seconds = seconds
        """That are left."""

    @property
    def left(self) -> bool:
        return self._tokens > 0 and self.seconds > 0

    def take(self, start: int, remaining: int) -> int:
        """How many of a prompt's `remaining` tokens, from `start` on, are computed in this step:
        one at least."""
        fit = self._cost.chunk_within(self.seconds, start)
        count = max(1, int(min(fit, remaining, self._tokens)))
        self._tokens -= count
        if fit > remaining:
            self.seconds -= self._cost.chunk_s(start, count)
        else:
            self.seconds = 0.0
        return count


def time_for_prompts(
    cost: CostModel, decoding: StepShape, present: int, tokens: int, target_s: float | None
) -> tuple[float, float]:
    """Of a step that decodes as `decoding` says: the seconds that prompts may add to it, and which
    share of it they are, being no more than `tokens`.

    It aims at `target_s`, or else at twice what a step would take if all `present` sequences were
    decoding, each with as much behind it, and as many guesses, as those that do. So one stream is
    slowed by a prompt to half its speed, and when many prompts come at once, streams are slowed to
    half of what they will have when all decode.
    """
    alone_s = cost.step_s(decoding)
    if not (decoding.decodes and alone_s):
        return math.inf, 1.0
    if target_s is None:
        context = decoding.decode_context * present // decoding.decodes
        drafts = decoding.drafts * present // decoding.decodes
        all_of_them = StepShape(0, 0, present, context, drafts)
        target_s = _SLOWED * cost.step_s(all_of_them)
    least_s = alone_s * _LEAST_SHARE / (1 - _LEAST_SHARE)
    prompts_s = max(target_s - alone_s, least_s)
    used_s = min(prompts_s, cost.chunk_s(0, tokens) or math.inf)
    return prompts_s, used_s / (used_s + alone_s)
