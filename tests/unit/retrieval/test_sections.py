"""Which headings open sections, how long their names may be, and how long parsing may take."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.retrieval.documents.sections import MAX_HEADING_CHARS, MAX_PATH_CHARS, sections


def named(text: str) -> list[tuple[list[str], str]]:
    return [(names, text[start:end]) for names, start, end in sections(text)]


MARKS = "# |## |---|...|===|\n|\r|\r\n|    |> |- |1. |```|~~~|<div>|<!--|a b|\t|\\|\0|\u2028|\x0b|é"


@given(st.lists(st.sampled_from(MARKS.split("|")), max_size=40).map("".join))
def test_sections_tile_any_text(text: str) -> None:
    at = 0
    for _, start, end in sections(text):
        assert start == at <= end
        at = end
    assert at == len(text)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_headings_of_both_kinds_and_their_depth(end: str) -> None:
    text = end.join(["top", "# A #", "x", "", "Second", "------", "y", "### C", "z", "# D", "w"])
    assert [names for names, _ in named(text)] == [
        [],
        ["A"],
        ["A", "Second"],
        ["A", "Second", "C"],
        ["D"],
    ]
    assert [body.split(end)[0] for _, body in named(text)] == [
        "top",
        "# A #",
        "Second",
        "### C",
        "# D",
    ]


def test_a_heading_without_a_body_opens_the_next_ones_section() -> None:
    assert named("# A\n\n## B\nx\n## C\n") == [
        (["A", "B"], "# A\n\n## B\nx\n"),
        (["A", "C"], "## C\n"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "```sh\n# no\n```\n",
        "~~~~\n# no\n~~~\n# no\n~~~~\n",
        "- ```\n  # no\n  ```\n",
        "> # of the quotation\n",
        "    # code\n",
        "#no\n",
        "<!--\n# no\n-->\n",
        "---\ntitle: no\n---\nx\n",
    ],
)
def test_what_is_no_heading_of_the_document(text: str) -> None:
    assert named(text) == [([], text)]


def test_long_headings_are_cut_and_of_long_paths_the_inner_ones_stay() -> None:
    text = "".join(f"{'#' * n} {n} {'long ' * 50_000}\n" for n in range(1, 7)) + "body"
    ((names, _),) = named(text)
    assert [name[0] for name in names] == ["5", "6"]
    assert all(len(name) <= MAX_HEADING_CHARS and name.endswith("…") for name in names)
    assert sum(map(len, names)) <= MAX_PATH_CHARS
