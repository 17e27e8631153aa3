"""Sets of documents by other hands: how questions are put, and what counts as right."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from models.recipe import ordinary
from models.recipe.conversation import Conversation
from models.recipe.skills.passages import NOT_TOLD
from models.recipe.tokenizer import END

ASKED = [
    {"question": "Who runs it?", "answer": "Ada Finch"},
    {"question": "Where is it?", "answer": "the mill", "also": ["at the mill"]},
    {"question": "What does it cost?", "answer": None},
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A set of six documents; the first has questions."""
    lines = [
        {"title": f"Note {n}", "text": f"Text {n}.", "kind": "note", "questions": []}
        for n in range(6)
    ]
    lines[0]["text"] = "The shop at the mill is run by Ada Finch, who bakes."
    lines[0]["questions"] = ASKED
    file = tmp_path / "set.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return file


class Says:
    """Answers each question with a fixed text; `N` in it is the right passage's number."""

    def __init__(self, answers: list[str], ends: bool = True) -> None:
        self.answers = dict(zip((one["question"] for one in ASKED), answers, strict=True))
        self.tokenizer: Any = self
        self.ends = ends

    def prompt(self, case: Conversation) -> list[int]:
        titles = [document["title"] for document in case.documents]
        self.text = self.answers[case.messages[0]["content"]]
        self.text = re.sub("N", str(titles.index("Note 0") + 1), self.text)
        return []

    def write(self, prompt: list[int], longest: int) -> list[int]:
        return [END if self.ends else END + 1]

    def decode(self, ids: list[int]) -> str:
        return self.text


def test_each_question_has_its_document_and_three_others(path: Path) -> None:
    cases = ordinary.among_others(path)
    assert len(cases) == len(ASKED)
    for case in cases:
        titles = [document["title"] for document in case.conversation.documents]
        assert len(set(titles)) == 1 + ordinary.OTHERS
        assert {titles[number - 1] for number in case.numbers} <= {"Note 0"}
    assert cases[0].numbers
    assert cases[1].answers == ["the mill", "at the mill"]
    assert cases[2].conversation.messages[1]["content"] == NOT_TOLD


@pytest.mark.parametrize(
    ("answers", "told", "untold"),
    [
        (["Ada Finch [N].", "At the mill [N].", NOT_TOLD], "100.0 % right with", "100.0 % right"),
        (["Ada Finch [N].", "The dam [N].", NOT_TOLD], "50.0 % right with", "100.0 % right"),
        (["Ada Finch [9].", "Mill [8].", "£3 [N]."], "0.0 % right with", "0.0 % right"),
        (["Ada Finch", NOT_TOLD, NOT_TOLD], "0.0 % right with", "100.0 % right"),
        (["Ada Finch [²].", "The mill [0N].", NOT_TOLD], "0.0 % right with", "100.0 % right"),
        (["Ada Finch [N].", "The mill [٤].", NOT_TOLD], "50.0 % right with", "100.0 % right"),
    ],
)
def test_what_counts_as_right(path: Path, answers: list[str], told: str, untold: str) -> None:
    first, second, third = ordinary.measure(Says(answers), ordinary.among_others(path)).splitlines()
    assert first.startswith(f"told (2): {told}")
    assert second == f"not told (1): {untold}"
    assert third == "ended by itself: 100.0 %"


def test_an_article_is_left_out_where_more_is_said() -> None:
    """An answer may be a letter, and another is no answer to it."""
    for said, answer, right in (
        ("The grade", "grade", True), ("A", "a", True), ("B", "A", False), ("", "A", False),
        ("A", "the", False),
    ):  # fmt: skip
        assert ordinary.Score().count(f"{said} [1].", [answer], {1}, True) is right, said


def test_wrong_answers_are_shown(path: Path) -> None:
    shown = ordinary.measure(
        Says(["Ada Finch [N].", "Ada [N].", "£3 [N]."], ends=False),
        ordinary.among_others(path),
        True,
    )
    lines = shown.splitlines()
    assert [line.split(" = ")[0] for line in lines[:2]] == ["Where is it?", "What does it cost?"]
    assert lines[-1] == "ended by itself: 0.0 %"


def test_a_question_brings_passages_from_all_documents_with_the_one_that_tells(path: Path) -> None:
    cases = ordinary.brought(path)
    assert len(cases) == len(ASKED)
    for case in cases[:2]:
        assert 1 < len(case.conversation.documents) <= 4
        (number,) = case.numbers
        assert case.answers[0] in case.conversation.documents[number - 1]["text"]
    assert not cases[2].numbers


def test_a_document_needs_three_others(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(True)[:3]))
    with pytest.raises(ValueError, match=r"set\.jsonl has 3 documents, none with 3 others"):
        ordinary.among_others(path)


def test_a_line_that_is_no_json_is_named(path: Path) -> None:
    one = json.dumps({"title": "a\u2028b", "text": "c", "questions": []}, ensure_ascii=False)
    path.write_text(f"{one}\n{{\n")
    with pytest.raises(ValueError, match=r"set\.jsonl:2: "):
        ordinary.among_others(path)
