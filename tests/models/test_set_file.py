"""Files of documents and questions: whatever is wrong in one is named."""

import json
from pathlib import Path

import pytest

from models.recipe.set_file import documents_of

ASKED = {"question": "Who?", "answer": "Ada"}
GOOD = {"title": "T", "kind": "note", "text": "Ada did.", "questions": [ASKED]}


def line(**others: object) -> bytes:
    return json.dumps(GOOD | others, ensure_ascii=False).encode()


def asking(**others: object) -> bytes:
    return line(questions=[ASKED, ASKED | others])


def test_a_set_is_read(tmp_path: Path) -> None:
    """Whatever signs its texts have, and with the wordings of its answers."""
    path = tmp_path / "set.jsonl"
    path.write_bytes(line(title="a\u2028b") + b"\n" + asking(also=["her"], answer=None) + b"\n")
    first, second = documents_of(path)
    assert (first.title, first.text) == ("a\u2028b", "Ada did.")
    assert [one.answers for one in second.questions] == [["Ada"], []]
    path.write_bytes(asking(also=["Ada L."]))
    assert documents_of(path)[0].questions[1].answers == ["Ada", "Ada L."]


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (b"{", "the line: Invalid JSON"),
        (b"[1]", "the line: .* object"),
        (b"\x00\xff\xfe", "the line: Invalid JSON"),
        (b'{"title": "\xe9"}', "the line: Invalid JSON"),
        (b"[" * 100_000, "the line: .*recursion"),
        (b'{"title": "\\ud800"}', "the line: Invalid JSON"),
        (b'{"title": "T", "questions": []}', "text: .*required"),
        (line(title=3), "title: .*string"),
        (line(text=None), "text: .*string"),
        (line(questions={}), "questions: .*array"),
        (line(questions=["Who?"]), r"questions\.0: .*object"),
        (line(questions=[{"question": "Who?"}]), r"questions\.0\.answer: .*required"),
        (asking(question=1), r"questions\.1\.question: .*string"),
        (asking(answer=12), r"questions\.1\.answer: .*string"),
        (asking(answer=""), r"questions\.1\.answer: "),
        (asking(also="her"), r"questions\.1\.also: .*array"),
        (asking(also=[None]), r"questions\.1\.also\.0: .*string"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, second: bytes, why: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(line() + b"\n" + second + b"\n")
    with pytest.raises(ValueError, match=rf"set\.jsonl:2: {why}"):
        documents_of(path)


def test_an_empty_file_is_no_set(tmp_path: Path) -> None:
    (tmp_path / "set.jsonl").touch()
    with pytest.raises(ValueError, match=r"set\.jsonl holds no document"):
        documents_of(tmp_path / "set.jsonl")
