"""Chunks become passages: neighbours as one, however many searches brought them."""

from collections.abc import Sequence
from typing import Any

import pytest

from protos.common_pb2 import Passage, Range, Scores
from protos.retrieval_pb2 import SearchReply, Stretch
from services.gateway.stores.retrieval.joining import Chunk, best_of, chunks_of, joined, put

TEXT = "".join(f"Word{n:02} " for n in range(60))  # 7 characters each


def words(first: int, last: int) -> str:
    return TEXT[first * 7 : last * 7]


def chunk(score: float, first: int, last: int, position: int, **other: Any) -> Chunk:
    """TEXT's words from `first` to before `last`."""
    passage = Passage(
        title=other.get("title", "Doc"),
        text=other.get("text", words(first, last)),
        score=score,
        source_id=other.get("source_id", "s"),
        position=position,
        pages=other.get("pages"),
        rows=other.get("rows"),
        scores=Scores(dense=score),
    )
    stretch = Stretch(
        collection=other.get("collection", "c"),
        revision=other.get("revision", 1),
        start=first * 7,
        end=last * 7,
        lead=other.get("lead", 0),
    )
    return Chunk(passage, stretch)


def reply(*chunks: Chunk) -> SearchReply:
    made = SearchReply()
    put(chunks, made)
    return made


def told(chunks: Sequence[Chunk]) -> list[tuple[str, float]]:
    return [(one.text, one.score) for one in joined(chunks)]


def test_neighbours_are_one_passage_and_what_they_share_stands_once() -> None:
    chunks = [chunk(0.9, 8, 18, 1), chunk(0.8, 30, 40, 3), chunk(0.7, 0, 10, 0)]
    assert told(chunks) == [(words(0, 18), 0.9), (words(30, 40), 0.8)]
    (first, _) = joined(chunks)
    assert (first.position, first.scores.dense) == (0, 0.9)
    assert told([*chunks, chunk(0.1, 16, 32, 2)]) == [(words(0, 40), 0.9)]
    assert chunks[2].passage.text == words(0, 10), "chunks stay as they are"


def test_passages_stand_in_their_best_chunks_order_whatever_their_scores_are_of() -> None:
    chunks = [chunk(0.2, 30, 40, 4), chunk(0.9, 8, 18, 1), chunk(0.1, 28, 32, 3)]
    assert told(chunks) == [(words(28, 40), 0.2), (words(8, 18), 0.9)]


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
    assert len(joined([chunk(0.9, 0, 10, 0), chunk(0.8, 8, 18, 1, **other)])) == 2
    assert len(joined([chunk(0.9, 0, 10, 0), chunk(0.8, 8, 18, 2)])) == 2


def test_of_what_nothing_is_known_nothing_is_joined() -> None:
    apart = [chunk(0.9, 0, 10, 0), chunk(0.8, 8, 18, 1)]
    without = SearchReply(passages=[one.passage for one in apart])
    assert len(joined(chunks_of(without))) == 2
    changed = reply(*apart)
    changed.stretches[0].Clear()
    assert len(joined(chunks_of(changed))) == 2


def test_a_word_that_was_cut_is_whole_and_what_stood_between_is_a_new_line() -> None:
    assert told([chunk(0.9, 0, 10, 0), chunk(0.8, 10, 12, 1)]) == [(words(0, 12), 0.9)]
    after = chunk(0.8, 11, 12, 1)
    assert told([chunk(0.9, 0, 10, 0), after]) == [(f"{words(0, 10)}\n{words(11, 12)}", 0.9)]


def test_a_table_s_header_is_not_repeated_and_its_rows_go_on() -> None:
    pages, rows = (Range(first=1, last=2), Range(first=2, last=2)), (Range(first=3, last=5),)
    first = chunk(0.9, 0, 10, 0, pages=pages[0], rows=Range(first=1, last=3))
    row = chunk(0.8, 8, 18, 1, text="Head\n" + words(8, 18), lead=5, rows=rows[0], pages=pages[1])
    (one,) = joined([first, row])
    assert one.text == words(0, 18)
    assert (one.rows.first, one.rows.last, one.pages.first, one.pages.last) == (1, 5, 1, 2)
    assert not joined([chunk(0.9, 0, 10, 0)])[0].HasField("pages")


def test_a_long_run_becomes_several_passages() -> None:
    chunks = [chunk(0.9 - 0.1 * n, 5 * n, 5 * n + 6, n) for n in range(6)]
    assert [text for text, _ in told(chunks)] == [words(0, 21), words(20, 31)]


def test_several_queries_chunks_are_told_once_and_joined_across_them() -> None:
    first = reply(chunk(0.9, 8, 18, 1), chunk(0.5, 0, 10, 0))
    second = reply(chunk(0.8, 16, 26, 2), chunk(0.7, 8, 18, 1))
    best = best_of([first, second], 9)
    assert [one.passage.score for one in best] == [0.9, 0.8, 0.5]
    assert told(best) == [(words(0, 26), 0.9)]
    assert told(best_of([first, second], 2)) == [(words(8, 26), 0.9)], "a limit is of chunks"
    assert told(best_of([first], 2)) == [(words(0, 18), 0.9)]


def test_of_copies_that_several_queries_found_the_best_is_told() -> None:
    copy = chunk(0.6, 0, 10, 0, source_id="copy", text=words(0, 10).upper() + ".")
    assert [
        one.passage.source_id for one in best_of([reply(copy), reply(chunk(0.9, 0, 10, 0))], 9)
    ] == ["s"]
