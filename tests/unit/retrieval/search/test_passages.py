"""Passages: none twice, neighbours as one, within an answer's bytes."""

from typing import Any

import pytest

from services.retrieval.index.points import Hit
from services.retrieval.search import passages as module
from services.retrieval.search.passages import passages_of

TEXT = "".join(f"Word{n:02} " for n in range(60))  # 7 characters each


def ranked(score: float, first: int, last: int, position: int, **other: Any) -> Hit:
    """TEXT's words from `first` to before `last`."""
    start, end = first * 7, last * 7
    payload = {
        "collection": "c",
        "source_id": "s",
        "revision": 1,
        "title": "Doc",
        "text": TEXT[start:end],
        "start": start,
        "end": end,
        "position": position,
    }
    return Hit(payload | other, score, score, 0.0)


def told(chunks: list[Hit], limit: int = 9, threshold: float = 0.0) -> list[tuple[str, float]]:
    return [(one.text, one.score) for one in passages_of(chunks, threshold, limit)]


def words(first: int, last: int) -> str:
    return TEXT[first * 7 : last * 7]


def test_neighbours_are_one_passage_and_what_they_share_stands_once() -> None:
    chunks = [ranked(0.9, 8, 18, 1), ranked(0.8, 30, 40, 3), ranked(0.7, 0, 10, 0)]
    assert told(chunks) == [(words(0, 18), 0.9), (words(30, 40), 0.8)]
    (first, _) = passages_of(chunks, 0, 9)
    assert (first.position, first.scores.dense) == (0, 0.9)
    chunks.append(ranked(0.1, 16, 32, 2))
    assert told(chunks) == [(words(0, 40), 0.9)]


@pytest.mark.parametrize(
    "other",
    [
        {"source_id": "other"},
        {"collection": "other"},
        {"revision": 2},
        {"title": "Doc › Fees"},
        {"text": "Another text whose places only look alike"},
    ],
)
def test_what_does_not_go_on_there_stays_apart(other: dict[str, Any]) -> None:
    assert len(told([ranked(0.9, 0, 10, 0), ranked(0.8, 8, 18, 1, **other)])) == 2
    assert len(told([ranked(0.9, 0, 10, 0), ranked(0.8, 8, 18, 2)])) == 2


def test_without_overlap_a_neighbour_stands_in_a_new_line() -> None:
    chunks = [ranked(0.9, 0, 10, 0), ranked(0.8, 10, 12, 1)]
    assert told(chunks) == [(f"{words(0, 10)}\n{words(10, 12)}", 0.9)]


def test_a_table_s_header_is_not_repeated_and_its_rows_go_on() -> None:
    row = ranked(0.8, 8, 18, 1, text="Head\n" + words(8, 18), lead=5, rows=[3, 5], pages=[2, 2])
    (one,) = passages_of([ranked(0.9, 0, 10, 0, rows=[1, 3], pages=[1, 2]), row], 0, 9)
    assert one.text == words(0, 18)
    assert (one.rows.first, one.rows.last, one.pages.first, one.pages.last) == (1, 5, 1, 2)
    assert not passages_of([ranked(0.9, 0, 10, 0)], 0, 9)[0].HasField("pages")


def test_a_long_run_becomes_several_passages() -> None:
    chunks = [ranked(0.9 - 0.1 * n, 5 * n, 5 * n + 6, n) for n in range(6)]
    assert [text for text, _ in told(chunks)] == [words(0, 21), words(20, 31)]


def test_of_what_says_the_same_word_for_word_the_best_is_left() -> None:
    copy = ranked(0.8, 0, 10, 4, source_id="copy", text=words(0, 10).upper().replace(" ", "\n- "))
    number = ranked(0.7, 0, 10, 4, source_id="other", text=words(0, 10).replace("03", "04"))
    found = passages_of([ranked(0.9, 0, 10, 0), copy, number], 0, 9)
    assert [one.source_id for one in found] == ["s", "other"]


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("The cold room has -5 degrees.", "The cold room has 5 degrees."),
        ("The cold room has -5 degrees.", "The cold room has +5 degrees."),
        ("The audit: ✅", "The audit: ❌"),
        ("It costs $100.", "It costs €100."),
        ("It rose by 10%.", "It rose by 10€."),
        ("Where x > 3", "Where x < 3"),
        ("Written in C++.", "Written in C."),
        ("The name is a.b here", "The name is a-b here"),
        ("पति का है", "पता की है"),
    ],
)
def test_what_differs_by_a_sign_is_told_both(text: str, other: str) -> None:
    chunks = [ranked(0.9, 0, 10, 0, text=text), ranked(0.8, 0, 10, 0, source_id="b", text=other)]
    assert [one.text for one in passages_of(chunks, 0, 9)] == [text, other]


def test_the_limit_is_of_chunks_and_the_threshold_of_scores() -> None:
    chunks = [ranked(0.9 - n / 10, 10 * n, 10 * n + 5, 2 * n) for n in range(5)]
    assert [score for _, score in told(chunks, limit=3)] == pytest.approx([0.9, 0.8, 0.7])
    assert len(told(chunks, threshold=0.65)) == 3
    assert not told(chunks, threshold=0.95)
    copy = ranked(0.85, 0, 5, 7, source_id="copy")
    assert len(told([chunks[0], copy, *chunks[1:]], limit=3)) == 3, "a copy takes no place"
    next_one = ranked(0.1, 4, 10, 1)
    assert len(told([*chunks, next_one], limit=5)) == 5, "it is the sixth"
    assert len(told([*chunks, next_one], limit=6)) == 4, "it joins two"
    assert len(told([chunks[0], next_one, chunks[2]], limit=2)) == 1, "two chunks, one passage"


def test_an_answer_ends_where_its_bytes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [ranked(0.9 - n / 10, 10 * n, 10 * n + 5, 2 * n) for n in range(3)]
    whole = passages_of(chunks, 0, 9)
    monkeypatch.setattr(module, "MAX_PASSAGE_BYTES", sum(p.ByteSize() for p in whole[:2]))
    assert passages_of(chunks, 0, 9) == whole[:2]
    monkeypatch.setattr(module, "MAX_PASSAGE_BYTES", 1)
    assert passages_of(chunks, 0, 9) == whole[:1]
