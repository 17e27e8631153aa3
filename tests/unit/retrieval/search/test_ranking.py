"""One order out of two searches."""

import numpy as np
import pytest

from services.retrieval.index.points import Found, Hit
from services.retrieval.search.ranking import (
    Ranked,
    Weights,
    beside,
    by_both,
    by_meaning,
    by_tokens,
)
from services.retrieval.token_vectors import packed

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


def ranked(name: str, score: float, *axes: int) -> Ranked:
    """Its tokens, which are not paired where there is one, lie along these axes."""
    payload = {"name": name, "tokens": packed(AXES[[*axes]]) if axes else ""}
    return Ranked(payload, score, score, 0.0)


AXES = np.eye(8, dtype=np.float32)


def test_tokens_change_the_places_and_keep_scores_as_a_whole() -> None:
    before = [ranked("a", 0.8, 3), ranked("b", 0.6, 1), ranked("c", 0.4, 2)]
    question = AXES[[1, 1, 2]]
    after = by_tokens(before, question, Weights(1, 0, 1e9))
    assert names(after) == ["b", "c", "a"]
    scores = np.array([one.score for one in after])
    assert scores.mean() == pytest.approx(0.6, abs=1e-5)
    assert scores.std() == pytest.approx(np.std([0.8, 0.6, 0.4]), abs=1e-5)
    late = [one.late for one in after]
    assert None not in late
    assert late == sorted(late, reverse=True)
    assert late[2] == pytest.approx(0)
    assert [one.dense for one in after] == [0.6, 0.4, 0.8], "what it was found by stays"
    half = by_tokens(before, question, Weights(1, 0, 1))
    other = {one.payload["name"]: one.score for one in after}
    for one in half:
        mean = (one.dense + other[one.payload["name"]]) / 2
        assert one.score == pytest.approx(mean, abs=1e-5)


def test_what_has_no_tokens_keeps_its_place_among_the_rest() -> None:
    before = [
        ranked("a", 0.8, 3),
        ranked("old", 0.7),
        ranked("b", 0.6, 1),
        Ranked({"name": "older"}, 0.1, 0.1, 0.0),
    ]
    after = by_tokens(before, AXES[[1]], Weights(1, 0, 1e9))
    assert names(after) == ["b", "old", "a", "older"]
    assert {one.payload["name"]: one.score for one in after} == pytest.approx(
        {"b": 0.8, "old": 0.7, "a": 0.6, "older": 0.1}, abs=1e-5
    )
    assert [one.late is None for one in after] == [False, True, False, True]
    without = [one for one in before if "old" in one.payload["name"]]
    assert by_tokens(without, AXES[[1]], Weights()) == without


@pytest.mark.parametrize(
    "broken", [None, 7, "not base64", "AAAA", packed(AXES[[1]])[:-4], packed(np.eye(3)[[1]])]
)
def test_tokens_that_are_broken_are_none(broken: object) -> None:
    before = [Ranked({"name": "x", "tokens": broken}, 0.9, 0.9, 0.0), ranked("a", 0.5, 1)]
    after = by_tokens(before, AXES[[1]], Weights())
    assert [(one.payload["name"], one.score) for one in after] == [("x", 0.9), ("a", 0.5)]
    assert after[0].late is None


def test_tokens_that_tell_nothing_apart_change_nothing() -> None:
    before = [ranked("a", 0.8, 1, 1), ranked("b", 0.6, 1)]
    for question in (AXES[[1]], AXES[[5, 6]]):
        assert [one.score for one in by_tokens(before, question, Weights())] == pytest.approx(
            [0.8, 0.6], abs=1e-5
        )
    assert by_tokens([], AXES[[1]], Weights()) == []


def test_a_token_of_the_question_counts_as_much_as_it_tells_passages_apart() -> None:
    both = [ranked("a", 0.51, 1, 1, 2, 2), ranked("b", 0.5, 1, 1, 3, 3)]
    common, rare = 1, 3
    (first, second) = by_tokens(both, AXES[[common, common, common, rare]], Weights(1, 0, 9))
    assert (first.payload["name"], second.payload["name"]) == ("b", "a")
    assert first.late == pytest.approx(1)
    assert second.late == pytest.approx(0, abs=1e-3), "what both have does not count"


def test_only_the_best_are_looked_at_by_their_tokens() -> None:
    before = [ranked(str(n), 0.9 - n / 100, 1 + n % 2) for n in range(30)]
    after = by_tokens(before, AXES[[1]], Weights())
    assert [
        one.late is None for one in sorted(after, key=lambda one: int(one.payload["name"]))
    ] == [n >= 24 for n in range(30)]


def test_a_score_stays_between_0_and_1() -> None:
    before = [ranked("a", 0.99, 1), *(ranked(f"b{n}", 0.98 - n / 50, 2) for n in range(20))]
    scores = [one.score for one in by_tokens(before, AXES[[1]], Weights(1, 0, 9))]
    assert max(scores) == 1.0
    assert min(scores) >= 0


def test_what_was_found_by_words_alone_stands_beside_what_has_its_rank() -> None:
    near = by_meaning([hit("a", 0.9), hit("b", 0.4)])
    found = beside(near, [hit("x", 8.0), hit("y", 4.0), hit("z", 2.0)])
    assert names(found) == ["a", "x", "b", "y", "z"]
    assert [one.score for one in found] == pytest.approx([0.9, 0.9, 0.4, 0.4, 0.1])
    assert [one.score for one in beside([], [hit("x", 8.0), hit("y", 4.0)])] == [1.0, 0.5]
