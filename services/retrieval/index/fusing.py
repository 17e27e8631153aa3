"""One order out of two searches: by meaning, and by words.

Each passage's score is the weighted mean of its cosine with the question and of its words' share:
what BM25 gives it, of what it gives the best one found. So scores keep what ranks forget, that one
passage is far better than the next (decision 0051). It is done where the passages lie: of most of
what two searches find nothing else is ever read.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from services.retrieval.index.points import Question

# Of as many as one way fetches, and at least, are read. The first passage is the same for 99.8 % of
# the made set's questions as where all are, and no recall another.
_READ, _LEAST_READ = 0.6, 24


class Place(NamedTuple):
    """Of a point, of whose payload nothing is known."""

    id: Any  # as the store's library tells it
    score: float
    dense: float
    sparse: float


def fused(
    dense: Mapping[Any, float], sparse: Mapping[Any, float], question: Question
) -> list[Place]:
    """The best, best first. `dense`: the cosines of all; of an earlier model's points there are
    none, and its `sparse` are the scores.
    """
    if question.dense is None:
        places = [Place(point, words, 0.0, words) for point, words in sparse.items()]
    elif not question.weights.text:
        places = [Place(point, cosine, cosine, 0.0) for point, cosine in dense.items()]
    else:
        by_meaning, by_words, _ = question.weights
        best, whole = max(sparse.values(), default=1.0), by_meaning + by_words
        places = []
        for point, cosine in dense.items():
            words = sparse.get(point, 0.0)
            score = (by_meaning * max(0.0, cosine) + by_words * words / best) / whole
            places.append(Place(point, score, cosine, words))
    best_first = sorted(places, key=lambda place: place.score, reverse=True)
    return best_first[: most_read(question.limit)]


def most_read(limit: int) -> int:
    """How many are told where each way fetches so many; fewer: there are no more."""
    return max(_LEAST_READ, round(_READ * limit))
