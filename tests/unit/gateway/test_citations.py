"""What of an answer its passages bear out: marks that name one, quotations that stand in it."""

import time

import pytest

from protos.common_pb2 import Passage
from services.gateway.runs.citations import Checked, Quotation, check

PASSAGES = [
    Passage(
        title="guide.md › Opening hours",
        text="The harbour opens at *six* in the morning — and closes at nine. On feast days it’s "
        "shut until noon.",
    ),
    Passage(title="fees.md", text="A boat shorter than ten metres pays two coins a night."),
]
IN_FIRST = "The harbour opens at six in the morning"


@pytest.mark.parametrize(
    "text",
    [
        f'It says "{IN_FIRST}" [1].',
        f'It says "{IN_FIRST}." [1]',
        f'It says "{IN_FIRST}.[1]"[1]',
        f"As “{IN_FIRST.upper()}”, so says the guide [1].",
        f"„{IN_FIRST}“ [1]",
        f"«{IN_FIRST}» [1]",
        f'According to [1], "{IN_FIRST}".',
        'The guide: "opens at six in the morning - and closes\u00a0at nine" [1]',
        'The guide: "The harbour opens at six ... it\'s shut until noon" [1]',
        'The guide: "The harbour opens at six […] shut until noon" [1]',
        f'Both say "{IN_FIRST}" [2][1].',
        '"guide.md › Opening hours" is the title [1]',
    ],
)
def test_a_quotation_that_is_in_its_passage(text):
    checked = check(text, PASSAGES)
    assert (checked.quoted, checked.unfounded) == (1, ())


@pytest.mark.parametrize(
    ("text", "quote", "passages"),
    [
        ('It "opens at five in the morning" [1].', "opens at five in the morning", (1,)),
        (f'It says "{IN_FIRST}" [2].', IN_FIRST, (2,)),
        ('[1] has "closes at nine … opens at six in".', "closes at nine … opens at six in", (1,)),
        ("“two coins a night and a penny” [1, sic] [2]", "", ()),
        ('So "two coins a night and a penny" [1], [2].', "two coins a night and a penny", (1, 2)),
        ('é "two coins a night and a penny" [9] [2]', "two coins a night and a penny", (2,)),
    ],
)
def test_one_that_is_not(text, quote, passages):
    wanted = (Quotation(text.index(quote), len(quote), passages),) if quote else ()
    assert check(text, PASSAGES).unfounded == wanted


@pytest.mark.parametrize(
    "text",
    [
        'He said "this is nobody\'s, and not checked".',
        'He said "this is nobody\'s, and not checked". Then it closes [1].',
        'It closes [1]. He said "this is nobody\'s, and not checked".',
        'A "short name" [1]',
        'So `x = "not a quotation but a text in code" [1]` it is',
        '```\n"not a quotation but a text in code" [1]\n```',
        'This "runs\nover two lines of the text" [1]',
    ],
)
def test_what_is_no_passages_is_not_checked(text):
    assert check(text, PASSAGES).quoted == 0


def test_marks_name_passages_that_there_are():
    checked = check("[1] [2] [3] [1] [0] [17] [3] a[9] x_[8] `[7]` [n]", PASSAGES)
    assert (checked.cited, checked.unknown) == (3, (3, 0, 17))


def test_a_mark_right_behind_a_word_is_one():
    checked = check(
        "At the harbour[1], since 1871[2], in Zürich[2] a boat[9] of type B[1] [4]", PASSAGES
    )
    assert (checked.cited, checked.unknown) == (4, (9, 4))


def test_without_passages_a_mark_may_be_anything():
    assert check('[1] "and a quotation of nobody\'s words" [2]', []) == Checked()


@pytest.mark.parametrize("unit", ['"', "“", "«„", '"a', "[1]", "`", "```", '" [1] ', "x. ", "…"])
def test_no_answer_takes_long(unit):
    began = time.thread_time()
    check(unit * (200_000 // len(unit)), PASSAGES)
    assert time.thread_time() - began < 2


def test_no_passage_takes_long() -> None:
    """Whose marks were put in order one by one, in seconds."""
    marks = "a" + "\u0301" * 30_000 + "\u0316" * 30_000
    began = time.process_time()
    checked = check(f'It says "{IN_FIRST}" [1].', [Passage(title="t", text=marks)])
    assert time.process_time() - began < 2.0
    assert len(checked.unfounded) == 1
