"""What counts as a right answer through the platform, and which sets can be asked there."""

from typing import Any

import pytest

from bench.retrieval.answers import Told, names_of, said_in, telling
from models.recipe.set_file import SetDocument, SetQuestion

ASKED = SetQuestion(question="Who runs it?", answer="Ada Finch")
UNTOLD = SetQuestion(question="Since when?", answer=None)
SEARCH = {
    "type": "file_search_call",
    "results": [
        {"filename": "Other.txt", "text": "Ada Finch likes it, too."},
        {"filename": "Shop.txt", "text": "It is at the mill."},
        {"filename": "Shop.txt", "text": "It is run by ada\nFinch."},
    ],
}


def message(text: str) -> dict[str, Any]:
    return {"type": "message", "content": [{"type": "output_text", "text": text}]}


def reply(*output: dict[str, Any], status: str = "completed") -> dict[str, Any]:
    return {"output": list(output), "status": status, "usage": {"input_tokens": 7}}


def document(title: str) -> SetDocument:
    return SetDocument(title=title, text="x", questions=[])


def test_a_number_is_right_whose_passage_is_of_the_file_and_tells() -> None:
    assert telling([SEARCH], "Shop.txt", ASKED.answers) == {3}
    assert telling([SEARCH], "Other.txt", ASKED.answers) == {1}
    assert telling([SEARCH], "Shop.txt", UNTOLD.answers) == set()
    assert telling([message("Ada Finch [3].")], "Shop.txt", ASKED.answers) == set()
    assert telling([{**SEARCH, "results": None}], "Shop.txt", ASKED.answers) == set()


def test_an_answer_is_what_the_model_says_whatever_else_it_makes() -> None:
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    assert said_in([SEARCH, thought, message(" Ada Finch [3]. ")]) == "Ada Finch [3]."
    assert said_in([thought]) == ""


def test_questions_are_counted_also_those_that_fail() -> None:
    told = Told()
    told.count(reply(SEARCH, message("Ada Finch [3].")), ASKED, "Shop.txt")
    told.count(reply(SEARCH, message("Ada Finch [1].")), ASKED, "Shop.txt")
    told.count(reply(message("Ada Finch [3]."), status="incomplete"), ASKED, "Shop.txt")
    told.count(reply(SEARCH, message("The documents do not say.")), UNTOLD, "Shop.txt")
    told.fail(ASKED)
    told.fail(UNTOLD)
    assert (told.score.told, told.score.exact, told.score.value) == (4, 1, 3)
    assert (told.score.untold, told.score.silent) == (2, 1)
    assert (told.score.ended, told.failed, told.prompt_tokens) == (3, 2, 28)


def test_files_are_named_by_titles() -> None:
    assert names_of([document("Tea/coffee"), document("Ünter")]) == ["Tea-coffee.txt", "Ünter.txt"]


@pytest.mark.parametrize("title", ["", "  ", "a\nb", "a\0b", "ü" * 100])
def test_a_title_that_names_no_file_is_refused(title: str) -> None:
    with pytest.raises(ValueError, match="line 2: no file is named by the title"):
        names_of([document("a"), document(title)])


@pytest.mark.parametrize("titles", [("a", "b", "a"), ("a/b", "c", "a-b")])
def test_two_titles_of_one_name_are_refused(titles: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"line 3: .* names a file as line 1 does"):
        names_of(list(map(document, titles)))
