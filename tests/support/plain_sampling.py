"""What sampling is, plainly: the probabilities of a row's next token, by the definitions."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.worker.engine.messages import Sampling

Floats = NDArray[np.float64]


def adjusted(
    logits: NDArray[np.floating], s: Sampling, prompt: Sequence[int], output: Sequence[int]
) -> Floats:
    """Logits behind penalties, bias and bans; of no end-of-text tokens."""
    found = logits.astype(np.float64)
    for token in {*prompt, *output}:
        if found[token] > 0:
            found[token] /= s.repetition_penalty
        else:
            found[token] *= s.repetition_penalty
    for token, bias in s.logit_bias:
        found[token] += bias
    for token, count in Counter(output).items():
        found[token] -= s.frequency_penalty * count + s.presence_penalty
    for word in s.bad_words:
        if list(output[len(output) - len(word) + 1 :]) == list(word[:-1]) and len(output) >= (
            len(word) - 1
        ):
            found[word[-1]] = -np.inf
    if len(output) < s.min_tokens:
        found[list(s.stop_token_ids)] = -np.inf
    return found


def probabilities(logits: Floats, s: Sampling) -> Floats:
    """[vocab]; temperature > 0."""
    weights = np.exp((logits - logits.max()) / s.temperature)
    order = np.argsort(-weights, kind="stable")
    kept = np.ones(len(weights), bool)
    if s.top_k:
        kept &= weights >= weights[order[min(s.top_k, len(order)) - 1]]
    if s.top_p < 1:
        first = np.where(kept, weights, 0)[order]
        needed = int(np.searchsorted(np.cumsum(first), s.top_p * first.sum())) + 1
        kept &= weights >= weights[order[needed - 1]]
    kept &= weights >= s.min_p * weights.max()
    chosen = np.where(kept, weights, 0)
    found: Floats = chosen / chosen.sum()
    return found


def chi_square(counts: NDArray[np.integer], expected: Floats) -> tuple[float, int]:
    """The statistic over tokens that are expected at least five times, the rest together, and its
    degrees of freedom."""
    large = expected >= 5
    observed = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    usable = wanted > 0
    assert observed[~usable].sum() == 0, "what cannot be drawn was drawn"
    difference = observed[usable] - wanted[usable]
    return float((difference**2 / wanted[usable]).sum()), int(usable.sum()) - 1
