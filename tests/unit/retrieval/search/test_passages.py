"""Chunks that a reply holds: none twice, within its bytes, and where they stand."""

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
    return [(one.text, one.score) for one in passages_of(chunks, threshold, limit).passages]


def words(first: int, last: int) -> str:
    return TEXT[first * 7 : last * 7]


def test_of_what_says_the_same_word_for_word_the_best_is_left() -> None:
    copy = ranked(0.8, 0, 10, 4, source_id="copy", text=words(0, 10).upper().replace(" ", "\n- "))
    number = ranked(0.7, 0, 10, 4, source_id="other", text=words(0, 10).replace("03", "04"))
    found = passages_of([ranked(0.9, 0, 10, 0), copy, number], 0, 9).passages
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
    assert [said for said, _ in told(chunks)] == [text, other]


def test_the_limit_is_of_chunks_and_the_threshold_of_scores() -> None:
    chunks = [ranked(0.9 - n / 10, 10 * n, 10 * n + 5, 2 * n) for n in range(5)]
    assert [score for _, score in told(chunks, limit=3)] == pytest.approx([0.9, 0.8, 0.7])
    assert len(told(chunks, threshold=0.65)) == 3
    assert not told(chunks, threshold=0.95)
    copy = ranked(0.85, 0, 5, 7, source_id="copy")
    assert len(told([chunks[0], copy, *chunks[1:]], limit=3)) == 3, "a copy takes no place"


def test_where_a_chunk_stands_is_told_beside_it() -> None:
    table = ranked(0.8, 8, 18, 1, lead=5, rows=[3, 5], pages=[2, 2])
    reply = passages_of([ranked(0.9, 0, 10, 0), table], 0, 9)
    assert [(one.start, one.end, one.lead) for one in reply.stretches] == [(0, 70, 0), (56, 126, 5)]
    assert [(one.collection, one.revision) for one in reply.stretches] == [("c", 1)] * 2
    bare, second = reply.passages
    assert (second.rows.first, second.rows.last, second.pages.first, second.pages.last) == (
        3,
        5,
        2,
        2,
    )
    assert (second.position, second.scores.dense, bare.HasField("pages")) == (1, 0.8, False)


def test_an_answer_ends_where_its_bytes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [ranked(0.9 - n / 10, 10 * n, 10 * n + 5, 2 * n) for n in range(3)]
    whole = list(passages_of(chunks, 0, 9).passages)
    monkeypatch.setattr(module, "MAX_PASSAGE_BYTES", sum(p.ByteSize() for p in whole[:2]))
    reply = passages_of(chunks, 0, 9)
    assert (list(reply.passages), len(reply.stretches)) == (whole[:2], 2)
    monkeypatch.setattr(module, "MAX_PASSAGE_BYTES", 1)
    assert list(passages_of(chunks, 0, 9).passages) == whole[:1]
