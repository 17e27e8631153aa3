"""What must hold for the chunks of any text, and where borders fall."""

import itertools
import time
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.retrieval_pb2 import Section
from services.common.text.titles import name_in
from services.retrieval.documents import chunking
from services.retrieval.documents.chunking import chunk
from services.retrieval.documents.chunks import Chunk, Span
from services.retrieval.documents.sections import sections
from tests.support.documents import chunks
from tests.support.minilm import tokenizer


@cache
def encode(text: str):
    return tokenizer().encode(text, add_special_tokens=False)


def cut(text: str, limit: int = 24, overlap: int = 6, title: str = "Guide") -> list[Chunk]:
    found = [Section(headings=h, text=text[start:end]) for h, start, end in sections(text)]
    return chunks(found, encode, title, limit, overlap)


WORDS = st.sampled_from(
    [
        "harbour",
        "the",
        "opens",
        "antidisestablishmentarianism",
        "naïve",
        "港口",
        "🚢⚓",
        "x" * 150,
        "#",
    ]
)
GLUE = st.sampled_from(
    [" ", ". ", "\n", "\n\n", "! ", "\n# Part\n", "\n- ", "\n## Detail\n", "\t", "。", ""]
)
DOCUMENTS = st.one_of(
    st.text(max_size=400),
    st.lists(st.tuples(WORDS, GLUE), max_size=120).map(lambda parts: "".join(map("".join, parts))),
)


@settings(max_examples=300, deadline=None)
@given(text=DOCUMENTS, limit=st.integers(9, 60), overlap=st.integers(0, 8))
def test_chunks_are_bounded_slices_that_cover_the_text(text: str, limit: int, overlap: int) -> None:
    chunks = cut(text, limit, overlap)
    covered = [False] * len(text)
    for c in chunks:
        assert c.text[c.lead :] == text[c.start : c.end].replace("\f", "\n") != ""
        assert c.tokens <= limit
        assert len(c.text) <= 8 * limit
        covered[c.start : c.end] = [True] * (c.end - c.start)
    assert all(seen or char.isspace() for seen, char in zip(covered, text, strict=True))
    for before, after in itertools.pairwise(chunks):
        assert before.start < after.start
        assert before.end < after.end


def test_a_short_text_is_one_chunk_with_its_tokens_counted() -> None:
    (only,) = cut("  The harbour opens at six.\n")
    assert (only.title, only.text, only.start, only.end) == (
        "Guide",
        "The harbour opens at six.",
        2,
        27,
    )
    assert only.tokens == 6


@pytest.mark.parametrize("text", ["", " \n\n\t "])
def test_nothing_to_say_gives_no_chunk(text: str) -> None:
    assert cut(text) == []


def test_headings_open_chunks_and_name_them() -> None:
    text = (
        "# Harbour guide\n\n## Opening hours\nOpen from six.\n\n## Fees\nTwo coins a day.\n"
        "### Winter\nOne coin.\n# History\nOld.\n"
    )
    chunks = cut(text, title="")
    assert [c.title for c in chunks] == [
        "Harbour guide › Opening hours",
        "Harbour guide › Fees",
        "Harbour guide › Fees › Winter",
        "History",
    ]
    assert chunks[0].text == "# Harbour guide\n\n## Opening hours\nOpen from six."


def test_a_name_that_holds_what_stands_between_is_no_heading() -> None:
    (only,) = cut("# Fees\nTwo coins a day.", title="Policy › 2026.txt")
    assert only.title == "Policy ›› 2026.txt › Fees"
    assert name_in(only.title) == "Policy › 2026.txt"


def test_a_hash_in_a_code_fence_is_no_heading() -> None:
    (only,) = cut("Run this:\n```sh\n# not a heading\nmake\n```\n")
    assert only.title == "Guide"


def test_borders_fall_between_sentences_and_overlap_by_whole_ones() -> None:
    sentences = [f"Boat number {n} sails at dawn." for n in range(12)]
    chunks = cut(" ".join(sentences), limit=24, overlap=8)
    assert len(chunks) > 2
    for c in chunks:
        assert c.text.startswith("Boat number")
        assert c.text.endswith("dawn.")
    for before, after in itertools.pairwise(chunks):
        assert after.start < before.end  # they share a sentence


def test_the_overlap_is_as_many_whole_sentences_as_it_holds_and_no_more() -> None:
    sentence = "Boat sails at dawn."  # 5 tokens
    text = " ".join([sentence] * 12)
    for overlap, shared in ((0, 0), (4, 0), (5, 1), (9, 1), (10, 2)):
        chunks = cut(text, limit=20, overlap=overlap)
        assert {c.tokens for c in chunks[:-1]} == {20}
        for before, after in itertools.pairwise(chunks):
            assert text[after.start : before.end].count(sentence) == shared


def test_chunks_of_different_sections_share_nothing() -> None:
    text = "# A\nBoat sails at dawn. Gate opens.\n# B\nOne coin. Two coins."
    for before, after in itertools.pairwise(cut(text, limit=24, overlap=12)):
        assert before.end <= after.start


def test_a_paragraph_border_within_the_overlap_ends_no_chunk_again() -> None:
    sentence = "Boat sails at dawn. "  # 5 tokens
    text = sentence * 4 + "\n\n" + sentence * 8
    cuts = chunk([Section(text=text)], encode, "", 20, 15)
    chunks = list(itertools.islice(cuts, 50))
    assert chunks[0].end < chunks[1].end
    assert len(chunks) < 12
    assert chunks[-1].end == len(text.rstrip())


def test_a_chunk_is_not_left_half_empty_for_a_paragraph() -> None:
    short, long = "It is six.", "Boat sails at dawn. " * 8
    first = cut(f"{short}\n\n{long}", limit=20, overlap=0)[0]
    assert first.text.startswith(short)
    assert "dawn." in first.text


def test_a_paragraph_border_is_preferred_to_a_sentence_border() -> None:
    first = "The harbour opens at six. The gate closes at nine."  # 12 tokens
    second = "Boats pay two coins. Boats over ten metres pay four coins."
    assert cut(f"{first}\n\n{second}", limit=20, overlap=0)[0].text == first


def test_a_long_sentence_is_cut_between_words() -> None:
    text = "water " * 100
    chunks = cut(text, limit=20, overlap=0)
    assert [c.text for c in chunks] == [" ".join(["water"] * 20)] * 5


def test_a_line_break_ends_a_list_item_but_no_sentence() -> None:
    items = [f"- boat number {n} sails at dawn" for n in range(9)]
    for c in cut("\n".join(items), limit=20, overlap=0):
        assert set(c.text.split("\n")) <= set(items)
    wrapped = "The old harbour of the town\nopens at six in the morning. "
    for c in cut(wrapped * 6, limit=30, overlap=0):
        assert c.text.startswith("The old harbour")
        assert c.text.endswith("morning.")


def test_a_long_text_is_measured_piece_by_piece_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"Boat {n} sails at dawn.\nIt is naïve. " for n in range(200))
    whole = cut(text)
    monkeypatch.setattr(chunking, "_TOKENIZED_AT_ONCE", 100)
    assert cut(text) == whole


def test_the_overlap_must_leave_room() -> None:
    with pytest.raises(ValueError, match="overlap"):
        cut("Some text.", limit=10, overlap=10)


TABLE = "| Boat | Price |\n| --- | --- |\n"


def test_each_chunk_in_a_table_has_its_header_and_no_other_has() -> None:
    rows = [f"| sailing boat {n} | {n} coins |\n" for n in range(20)]
    text = "Prices of this year.\n\n" + TABLE + "".join(rows) + "\nThey hold until May."
    found = cut(text, limit=40, overlap=8)
    assert len(found) > 3
    assert found[0].text.startswith("Prices of this year.\n\n" + TABLE)
    for one in found:
        assert one.text.count(TABLE) == 1, one.text
        assert one.tokens <= 40
        assert one.text[one.lead :] == text[one.start : one.end]
        assert all(line + "\n" in text + "\n" for line in one.text.split("\n"))
    assert {one.lead for one in found[1:]} == {len(TABLE)}
    (after,) = cut("| a | b |\nno table\n\n| c | d |", limit=40)
    assert after.lead == 0


def test_a_header_that_leaves_no_room_is_left_out() -> None:
    wide = "| " + " | ".join(f"column {n}" for n in range(12)) + " |\n| --- |\n"
    found = cut(wide + "| one of many rows |\n" * 30, limit=24, overlap=6)
    assert {one.lead for one in found} == {0}
    assert max(one.tokens for one in found) <= 24


def test_pages_are_those_that_a_chunk_lies_on() -> None:
    pages = ["The gate opens at six. ", "", "Boats pay two coins. It is\n", "so. Bells ring. " * 5]
    (section,) = [Section(text="\f".join(pages), page=7)]
    found = chunks([section], encode, "", 12, 0)
    for one in found:
        first = 7 + section.text.count("\f", 0, one.start)
        assert one.pages == Span(first, first + section.text.count("\f", one.start, one.end))
        assert "\f" not in one.text
    assert found[0].pages == Span(7, 9)
    assert found[-1].pages == Span(10, 10)
    assert cut("No pages.")[0].pages is None


def test_a_row_is_never_parted_from_its_line_while_it_fits() -> None:
    rows = [f"name: Boat {n}. Dr. No; price: {n}" for n in range(5, 30)]
    found = chunks([Section(text="\n".join(rows), row=5)], encode, "", 30, 8)
    assert len(found) > 5
    for one in found:
        first, last = one.rows or (0, 0)
        assert one.text.split("\n") == rows[first - 5 : last - 4]
    assert [after.rows.first for after in found[1:]] == [one.rows.last + 1 for one in found[:-1]]


HOSTILE = {
    "rows of a table": lambda n: "| a |\n|---|\n" + "|" * n,
    "a table's line": lambda n: "| a |\n|" + "-" * n,
    "tables": lambda n: "| a |\n|-|\n| b |\n\n" * (n // 18),
    "page turns": lambda n: "a\f" * (n // 2),
    "a heading that does not end": lambda n: "# a" + " " * n + "x",
    "a heading's closing": lambda n: "# a" + " #" * (n // 2) + "x",
    "one word": lambda n: "x" * n,
    "one accent": lambda n: "a" + "\u0301" * n,
    "no space": lambda n: "。" * n,
    "spaces": lambda n: "a" + " " * n + "b",
    "blank lines": lambda n: "a" + "\n \t" * (n // 3) + "b",
    "closing quotes": lambda n: "." + '"' * n + "x",
    "dots": lambda n: "." * n,
    "digits": lambda n: "\n" + "1" * n + "x",
    "quotations": lambda n: ">" * n,
    "lists": lambda n: "- " * (n // 2) + "x",
    "steps": lambda n: "".join("  " * (i % 50) + "- a\n" for i in range(n // 54)),
    "brackets": lambda n: "[" * n + "](" * n,
    "emphasis": lambda n: "*a **b " * (n // 7),
    "fences": lambda n: "".join("`" * (3 + i % 300) + "\n" for i in range(n // 154)),
    "tags": lambda n: "<a " * (n // 3),
    "references": lambda n: "[a]: b 'c\n" * (n // 10),
    "underlines": lambda n: "a\n=\n" * (n // 4),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_text_takes_more_time_than_its_length(name: str) -> None:
    """64,000 characters take 0.1 to 0.5 s; where the time grows as the square, half a minute."""
    text = HOSTILE[name](64_000)
    began = time.process_time()
    chunks = cut(text, limit=96, overlap=16)
    assert time.process_time() - began < 10
    assert sum(len(c.text) for c in chunks) < 2 * len(text) + 1000
    assert max((len(c.title) for c in chunks), default=0) < 500
