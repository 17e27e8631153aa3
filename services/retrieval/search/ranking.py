"""One order out of two searches: by meaning, and by words; and the best of it by their tokens.

Each passage's score is the weighted mean of its cosine with the question and of its words' share:
what BM25 gives it, of what it gives the best one found. So scores keep what ranks forget, that one
passage is far better than the next. The best then change their places by what each of the
question's tokens finds in them (late interaction; decision 0051).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from services.retrieval.index.points import TOKENS, Found, Hit
from services.retrieval.token_vectors import unpacked

_CLOSELY = 24  # of the best are looked at by their tokens
_ALIKE = 1e-6  # what differs by less does not differ


@dataclass(frozen=True)
class Weights:
    embedding: float = 1.0
    text: float = 0.3
    late: float = 1.0


@dataclass(frozen=True)
class Ranked:
    """A passage found, and why it stands where it does."""

    payload: dict[str, Any]
    score: float  # what it is ranked by
    dense: float  # cosine with the question
    sparse: float  # by BM25; 0: not among the best by words
    late: float | None = None  # by its tokens; None: not looked at, or it has none


def by_meaning(hits: Sequence[Hit]) -> list[Ranked]:
    """As they were found, best first."""
    return [Ranked(hit.payload, hit.score, hit.score, 0.0) for hit in hits]


def by_both(found: Found, question: np.ndarray, weights: Weights) -> list[Ranked]:
    """Best first. `question`: its vector, of unit length."""
    dense = {hit.id: hit.score for hit in found.dense}
    sparse = {hit.id: hit.score for hit in found.sparse}
    for hit in found.sparse:
        if hit.id not in dense and hit.vector is not None:
            dense[hit.id] = float(hit.vector @ question)
    best = max(sparse.values(), default=1.0)
    whole = weights.embedding + weights.text

    def ranked(hit: Hit) -> Ranked:
        cosine, words = dense[hit.id], sparse.get(hit.id, 0.0)
        score = (weights.embedding * max(0.0, cosine) + weights.text * words / best) / whole
        return Ranked(hit.payload, score, cosine, words)

    once = {hit.id: hit for hit in (*found.dense, *found.sparse) if hit.id in dense}
    return sorted(map(ranked, once.values()), key=lambda one: one.score, reverse=True)


def by_tokens(ranked: Sequence[Ranked], question: np.ndarray, weights: Weights) -> list[Ranked]:
    """`ranked` is by_both's, whose scores are kept as a whole: what the tokens say is told in their
    mean and spread. So what has no tokens keeps its score and its place among the rest, and a
    score means what it did. `question`: float32 [tokens, size], of unit length.
    """
    best = list(ranked[:_CLOSELY])
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
        best[n] = replace(best[n], score=float(score), late=float(own))
    return sorted([*best, *ranked[_CLOSELY:]], key=lambda one: one.score, reverse=True)


def _late(question: np.ndarray, passages: Sequence[np.ndarray]) -> np.ndarray:
    """Of each passage: the cosine of a token of the question with the nearest one of its own, the
    mean over the tokens. Each counts as much as it tells these passages apart: what all of them
    have, and what none has, says nothing.
    """
    starts = np.cumsum([0, *map(len, passages[:-1])])
    nearest = np.maximum.reduceat(question @ np.concatenate(passages).T, starts, axis=1)
    weights = nearest.std(axis=1) + _ALIKE
    late: np.ndarray = weights @ nearest / weights.sum()
    return late


def beside(ranked: Sequence[Ranked], hits: Sequence[Hit]) -> list[Ranked]:
    """In turns with what was found by its words alone, where no cosine is to be had: each counts
    as much as the one that has its rank here, and beyond those less than any.
    """
    last = ranked[-1].score if ranked else 1.0
    alone = [
        Ranked(
            hit.payload,
            ranked[rank].score if rank < len(ranked) else last * hit.score / hits[0].score,
            0.0,
            hit.score,
        )
        for rank, hit in enumerate(hits)
    ]
    return sorted((*ranked, *alone), key=lambda one: one.score, reverse=True)
