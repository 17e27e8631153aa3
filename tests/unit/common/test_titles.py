"""Titles stand on one line, and the document's name is found in them again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.text.titles import is_plain, name_in, one_line, titled

NAMES = st.text(st.sampled_from("a› ."), min_size=1)


@given(NAMES, st.lists(NAMES))
def test_a_name_is_found_whatever_it_holds(name: str, headings: list[str]) -> None:
    assert name_in(titled(name, headings)) == name


def test_a_name_that_holds_what_stands_between_is_told_apart() -> None:
    assert titled("Policy › 2026.txt", ["Fees"]) == "Policy ›› 2026.txt › Fees"
    assert titled("a›b.txt", []) == "a›b.txt"
    assert titled("", ["Fees", "Winter"]) == "Fees › Winter"


def test_a_title_of_many_lines_is_one() -> None:
    assert one_line("a\n[2] mill\r\n\tThe code.\u2028b\x00c\x85\x1b]0;\xa0") == (
        "a [2] mill The code. b c ]0;"
    )
    assert one_line("\n") == ""


@pytest.mark.parametrize("odd", ["\n", "\r", "\t", "\x00", "\x1b", "\x7f", "\x85", "\u2028"])
def test_what_ends_a_line_or_steers_is_not_plain(odd: str) -> None:
    assert not is_plain(f"a{odd}b.txt")


def test_names_in_any_language_are_plain() -> None:
    assert is_plain("Ünïcode › 港口 🚢 \u200d\xa0.md")
