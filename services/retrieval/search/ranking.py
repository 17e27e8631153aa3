"""The order of what two searches found (index/fusing.py), looked at closely.

The best change their places by what each of the question's tokens finds in them (late interaction;
decision 0051).
"""

from collections.abc import Sequence

import numpy as np

from services.retrieval.index.points import TOKENS, Hit, Weights
from services.retrieval.token_vectors import unpacked

CLOSELY = 24  # of the best are looked at by their tokens
_ALIKE = 1e-6  # what differs by less does not differ


def by_tokens(ranked: Sequence[Hit], question: np.ndarray, weights: Weights) -> list[Hit]:
    """`ranked` is by both, whose scores are kept as a whole: what the tokens say is told in their
    mean and spread. So what has no tokens keeps its score and its place among the rest, and a
    score means what it did. `question`: float32 [tokens, size], of unit length.
    """
    best = list(ranked[:CLOSELY])
    passages = [unpacked(one.payload.get(TOKENS), question.shape[1]) for one in best]
    looked_at = [n for n, tokens in enumerate(passages) if tokens is not None]
    if not looked_at:
        return list(ranked)
    late = _late(question, [tokens for tokens in passages if tokens is not None])
    scores = np.array([best[n].score for n in looked_at])
    told = scores
    if late.std() > _ALIKE:
        told = scores.mean() + (late - late.mean()) * (scores.std() / late.std())
    share = weights.late / (weights.embedding + weights.text + weights.late)
    mixed = np.clip((1 - share) * scores + share * told, 0.0, 1.0)
    for n, score, own in zip(looked_at, mixed, late, strict=True):
        best[n] = best[n]._replace(score=float(score), late=float(own))
    return sorted([*best, *ranked[CLOSELY:]], key=lambda one: one.score, reverse=True)


def _late(question: np.ndarray, passages: Sequence[np.ndarray]) -> np.ndarray:
    """Of each passage: the cosine of a token of the question with the nearest one of its own, the
    mean over the tokens. Each counts as much as it tells these passages apart: what all of them
    have, and what none has, says nothing.
    """
    starts = np.cumsum([0, *map(len, passages[:-1])])
    tokens = np.concatenate(passages).astype(np.float32)
    lengths = np.sqrt(np.einsum("td,td->t", tokens, tokens)) + np.float32(_ALIKE)
    nearest = np.maximum.reduceat(question @ tokens.T / lengths, starts, axis=1)
    weights = nearest.std(axis=1) + _ALIKE
    late: np.ndarray = weights @ nearest / weights.sum()
    return late


def beside(ranked: Sequence[Hit], hits: Sequence[Hit]) -> list[Hit]:
    """In turns with what was found by its words alone, where no cosine is to be had: each counts
    as much as the one that has its rank here, and beyond those less than any.
    """
    last = ranked[-1].score if ranked else 1.0
    alone = [
        Hit(
            hit.payload,
            ranked[rank].score if rank < len(ranked) else last * hit.score / hits[0].score,
            0.0,
            hit.score,
        )
        for rank, hit in enumerate(hits)
    ]
    return sorted((*ranked, *alone), key=lambda one: one.score, reverse=True)
