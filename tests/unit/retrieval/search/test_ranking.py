"""One order out of two searches."""

import numpy as np
import pytest

from services.retrieval.index.points import Found, Hit
from services.retrieval.search.ranking import Weights, beside, by_both, by_meaning

QUESTION = np.array([1, 0], np.float32)


def hit(name: str, score: float, cosine: float | None = None) -> Hit:
    vector = None if cosine is None else np.array([cosine, (1 - cosine**2) ** 0.5], np.float32)
    return Hit(name, score, {"name": name}, vector)


def names(ranked: list) -> list[str]:
    return [one.payload["name"] for one in ranked]


def test_by_meaning_a_score_is_the_cosine() -> None:
    ranked = by_meaning([hit("a", 0.9), hit("b", 0.4)])
    assert [(one.score, one.dense, one.sparse) for one in ranked] == [(0.9, 0.9, 0), (0.4, 0.4, 0)]


def test_by_both_a_score_is_the_mean_of_cosine_and_of_the_words_share() -> None:
    found = Found(
        [hit("meant", 0.8), hit("both", 0.7), hit("far", -0.2)],
        [hit("said", 10.0, 0.5), hit("both", 5.0, 0.7)],
    )
    ranked = by_both(found, QUESTION, Weights(1.0, 1.0))
    assert names(ranked) == ["said", "both", "meant", "far"]
    assert [one.score for one in ranked] == pytest.approx([0.75, 0.6, 0.4, 0.0])
    assert [(one.dense, one.sparse) for one in ranked] == [
        (pytest.approx(0.5), 10.0),
        (0.7, 5.0),
        (0.8, 0.0),
        (-0.2, 0.0),
    ]


def test_the_weights_say_what_counts() -> None:
    found = Found([hit("meant", 0.9), hit("said", 0.1)], [hit("said", 3.0, 0.1)])
    assert names(by_both(found, QUESTION, Weights(1.0, 0.0))) == ["meant", "said"]
    assert names(by_both(found, QUESTION, Weights(0.0, 2.0))) == ["said", "meant"]
    assert by_both(found, QUESTION, Weights(0.0, 2.0))[0].score == 1.0


def test_without_shared_words_the_meaning_decides() -> None:
    assert names(by_both(Found([hit("a", 0.9), hit("b", 0.4)], []), QUESTION, Weights())) == [
        "a",
        "b",
    ]
    assert by_both(Found([], []), QUESTION, Weights()) == []


def test_what_was_found_by_words_alone_stands_beside_what_has_its_rank() -> None:
    near = by_meaning([hit("a", 0.9), hit("b", 0.4)])
    found = beside(near, [hit("x", 8.0), hit("y", 4.0), hit("z", 2.0)])
    assert names(found) == ["a", "x", "b", "y", "z"]
    assert [one.score for one in found] == pytest.approx([0.9, 0.9, 0.4, 0.4, 0.1])
    assert [one.score for one in beside([], [hit("x", 8.0), hit("y", 4.0)])] == [1.0, 0.5]
