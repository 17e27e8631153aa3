"""What two searches found, looked at by its tokens."""

import numpy as np
import pytest

from services.retrieval.index.points import Hit, Weights
from services.retrieval.search.ranking import beside, by_tokens
from services.retrieval.token_vectors import packed


def names(ranked: list) -> list[str]:
    return [one.payload["name"] for one in ranked]


def ranked(name: str, score: float, *axes: int) -> Hit:
    """Its tokens, which are not paired where there is one, lie along these axes."""
    payload = {"name": name, "tokens": packed(AXES[[*axes]]) if axes else ""}
    return Hit(payload, score, score, 0.0)


def by_words(name: str, score: float) -> Hit:
    return Hit({"name": name}, score, 0.0, score)


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
        Hit({"name": "older"}, 0.1, 0.1, 0.0),
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
    before = [Hit({"name": "x", "tokens": broken}, 0.9, 0.9, 0.0), ranked("a", 0.5, 1)]
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
    near = [ranked("a", 0.9), ranked("b", 0.4)]
    found = beside(near, [by_words("x", 8.0), by_words("y", 4.0), by_words("z", 2.0)])
    assert names(found) == ["a", "x", "b", "y", "z"]
    assert [one.score for one in found] == pytest.approx([0.9, 0.9, 0.4, 0.4, 0.1])
    assert [one.score for one in beside([], [by_words("x", 8.0), by_words("y", 4.0)])] == [1.0, 0.5]
