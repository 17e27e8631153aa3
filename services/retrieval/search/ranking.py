"""One order out of two searches: by meaning, and by words.

Each passage's score is the weighted mean of its cosine with the question and of its words' share:
what BM25 gives it, of what it gives the best one found. So scores keep what ranks forget, that one
passage is far better than the next (decision 0051).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.retrieval.index.points import Found, Hit


@dataclass(frozen=True)
class Weights:
    embedding: float = 1.0
    text: float = 0.3


@dataclass(frozen=True)
class Ranked:
    """A passage found, and why it stands where it does."""

    payload: dict[str, Any]
    score: float  # what it is ranked by
    dense: float  # cosine with the question
    sparse: float  # by BM25; 0: not among the best by words


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
