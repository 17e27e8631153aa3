"""One order out of two searches."""

from uuid import UUID

import numpy as np
import pytest

from services.retrieval.index.fusing import Place, fused, worth_reading
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


def test_the_best_of_both_are_left() -> None:
    dense, sparse = {"a": 0.9, "b": 0.8, "c": 0.1, "d": 0.0}, {"c": 7.0, "b": 3.0}
    assert ids(dense, sparse, question(limit=2)) == ["b", "a", "c"]
    assert ids(dense, sparse, question(Weights(1.0, 9.0), limit=1)) == ["c"]


def test_of_an_earlier_model_s_points_the_words_are_the_score() -> None:
    by_words = Question(ALL, ALL, 1)
    (place,) = fused({}, {"a": 2.0, "b": 5.0}, by_words)
    assert place == ("b", 5.0, 0.0, 5.0)


TEXT, OTHER = 7 << 32, 9 << 32  # the ids of two texts' first chunks


def places(*numbers: int) -> list[Place]:
    """Best first."""
    return [Place(UUID(int=n), 1 - rank / 99, 0.0, 0.0) for rank, n in enumerate(numbers)]


def read(found: list[Place], limit: int = 40) -> list[int]:
    return [place.id.int for place in worth_reading(found, question(limit=limit))]


def test_the_best_are_read_and_what_goes_on_beside_them() -> None:
    best = [TEXT + 10 * n for n in range(24)]
    deeper = [TEXT + 12, TEXT + 11, OTHER + 1, TEXT + 229, TEXT + 5]
    assert read(places(*best, *deeper)) == [*best, TEXT + 12, TEXT + 11, TEXT + 229]


def test_what_is_read_stays_in_its_order_and_few_are_read_whole() -> None:
    best = [TEXT + 10 * n for n in range(24)]
    found = places(*best, OTHER, best[3] + 1, best[0] + 1)
    assert worth_reading(found, question(limit=40)) == [*found[:24], *found[25:]]
    assert worth_reading(found[:24], question(limit=24)) == found[:24]


def test_more_are_read_for_who_asks_for_more() -> None:
    found = places(*(TEXT + 2 * n for n in range(200)))
    assert len(read(found, limit=200)) == 120
    assert len(read(found, limit=8)) == 24


def test_a_server_tells_ids_as_words() -> None:
    found = places(*(TEXT + 10 * n for n in range(24)), TEXT + 1, OTHER)
    told = [place._replace(id=str(place.id)) for place in found]
    assert [place.id for place in worth_reading(told, question(limit=40))] == [
        str(place.id) for place in found[:25]
    ]
