"""What must hold for the chunks of any text, and where borders fall."""

import itertools
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.retrieval.chunking import Chunk, chunk
from tests.support.minilm import tokenizer


@cache
def encode(text: str):
    return tokenizer().encode(text, add_special_tokens=False)


def cut(text: str, limit: int = 24, overlap: int = 6, title: str = "Guide") -> list[Chunk]:
    return chunk(text, encode(text), title, limit, overlap)


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
        assert c.text == text[c.start : c.end] != ""
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


def test_the_overlap_must_leave_room() -> None:
    with pytest.raises(ValueError, match="overlap"):
        cut("Some text.", limit=10, overlap=10)
