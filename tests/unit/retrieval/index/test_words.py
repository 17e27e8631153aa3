"""Texts as bags of words: what makes a question and a passage share one."""

import pytest

from services.retrieval.index import words


def shared(question: str, passage: str) -> int:
    return len({*words.of_question(question).indices} & {*words.of_passage(passage).indices})


@pytest.mark.parametrize(
    ("question", "passage", "count"),
    [
        ("opening", "OPENING", 1),
        ("Überprüfungen", "eine uberprufung", 1),
        ("regulations", "the regulation says", 1),
        ("harbour", "harvest", 0),
        ("4417", "the code is 4417.", 1),
        ("4417", "the code is 44170.", 0),
        ("E-4417", "error E-4417", 2),
        ("+49 30 901820", "ring +49 30 901820 now", 3),
        ("港口几点开放", "这个港口六点开放", 3),
        ("ท่าเรือ", "ท่าเรือเปิดหกโมง", 6),
        ("Часы", "часы работы", 1),
        ("?!", "nothing", 0),
    ],
)
def test_words_meet(question: str, passage: str, count: int) -> None:
    assert shared(question, passage) == count


def test_a_word_counts_once_in_a_question_and_more_in_a_passage() -> None:
    assert words.of_question("boat boat") == words.of_question("boat")
    assert words.of_passage("boat boat").values[0] > words.of_passage("boat").values[0]
    assert words.of_question(" … ") == ([], [])
