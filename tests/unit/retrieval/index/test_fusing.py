"""One order out of two searches."""

import numpy as np
import pytest

from services.retrieval.index.fusing import fused
from services.retrieval.index.points import BOTH, Every, Question, Weights

ALL = Every(())


def question(weights: Weights = BOTH, limit: int = 9) -> Question:
    return Question(ALL, ALL, limit, np.ones(2, np.float32), None, weights)


def ids(dense: dict[str, float], sparse: dict[str, float], asked: Question) -> list[str]:
    return [place.id for place in fused(dense, sparse, asked)]


def test_a_score_is_the_mean_of_cosine_and_of_the_words_share() -> None:
    dense = {"meant": 0.8, "both": 0.7, "far": -0.2, "said": 0.5}
    places = fused(dense, {"said": 10.0, "both": 5.0}, question(Weights(1.0, 1.0)))
    assert [place.id for place in places] == ["said", "both", "meant", "far"]
    assert [place.score for place in places] == pytest.approx([0.75, 0.6, 0.4, 0.0])
    assert [(place.dense, place.sparse) for place in places] == [
        (0.5, 10.0),
        (0.7, 5.0),
        (0.8, 0.0),
        (-0.2, 0.0),
    ]


def test_the_weights_say_what_counts() -> None:
    dense, sparse = {"meant": 0.9, "said": 0.1}, {"said": 3.0}
    assert ids(dense, sparse, question()) == ["meant", "said"]
    assert ids(dense, sparse, question(Weights(0.0, 2.0))) == ["said", "meant"]
    assert fused(dense, sparse, question(Weights(0.0, 2.0)))[0].score == 1.0


def test_without_words_a_score_is_the_cosine() -> None:
    places = fused({"a": -0.4, "b": 0.9}, {}, question(Weights(3.0, 0.0)))
    assert [(place.id, place.score, place.dense) for place in places] == [
        ("b", 0.9, 0.9),
        ("a", -0.4, -0.4),
    ]


def test_without_shared_words_the_meaning_decides() -> None:
    assert ids({"a": 0.9, "b": 0.4}, {}, question()) == ["a", "b"]
    assert ids({}, {}, question()) == []


def test_the_best_of_both_come_first() -> None:
    dense, sparse = {"a": 0.9, "b": 0.8, "c": 0.1, "d": 0.0}, {"c": 7.0, "b": 3.0}
    assert ids(dense, sparse, question(limit=2))[:3] == ["b", "a", "c"]
    assert ids(dense, sparse, question(Weights(1.0, 9.0), limit=1))[0] == "c"


def test_of_an_earlier_model_s_points_the_words_are_the_score() -> None:
    by_words = Question(ALL, ALL, 1)
    place, _ = fused({}, {"a": 2.0, "b": 5.0}, by_words)
    assert place == ("b", 5.0, 0.0, 5.0)


def test_of_many_the_best_are_read_and_more_for_who_asks_for_more() -> None:
    dense = {str(n): 1 - n / 999 for n in range(300)}
    assert ids(dense, {}, question(limit=8)) == [str(n) for n in range(24)]
    assert ids(dense, {}, question(limit=200)) == [str(n) for n in range(120)]
