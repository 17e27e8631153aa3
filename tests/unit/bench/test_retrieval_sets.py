"""What retrieval is measured with: the made set, sets of files, and what counts as found."""

import json
from collections import Counter
from functools import cache
from hashlib import sha256

import pytest

from bench.retrieval import sets
from bench.retrieval.made import made
from bench.retrieval.quality import figures, rank
from bench.retrieval.sets import Question, QuestionSet
from protos.common_pb2 import Passage

DIGEST = "855424dbbd3e5c6d"


@cache
def whole() -> QuestionSet:
    return made()


def test_the_made_set_is_the_same_on_every_machine() -> None:
    """Figures of it are compared over time: whoever changes it measures anew."""
    text = json.dumps(whole(), ensure_ascii=False).encode()
    assert sha256(text).hexdigest()[:16] == DIGEST


def test_each_answer_stands_in_its_document_and_in_no_other() -> None:
    texts = {one.id: one for one in whole().documents}
    assert len(texts) == len(whole().documents)
    assert len(whole().questions) == 2_000
    for asked in whole().questions:
        own = texts[asked.document]
        assert sets.holds(own.text, asked.told), asked
    told = Counter(its for asked in whole().questions for its in asked.told)
    by_name = [asked for asked in whole().questions if asked.sort == "names"]
    assert len(by_name) > 30
    for asked in by_name:  # the name is told of nobody else
        assert told[asked.told[0]] == 1
        holders = [one for one in texts.values() if sets.holds(one.text, asked.told)]
        assert [one.id for one in holders] == [asked.document]


def test_words_alone_do_not_find_the_answer() -> None:
    """Of what is asked in words, questions share few words with their answers but the subject's
    name, and most share more with another document."""
    asked = [one for one in whole().questions if one.sort == "words"]
    words = {one.id: set(one.text.casefold().split()) for one in whole().documents}
    beaten = 0
    for one in asked[:200]:
        own = set(one.text.casefold().strip("?").split())
        shared = {id: len(own & its) for id, its in words.items()}
        beaten += max(shared.values()) > shared[one.document]
    assert beaten > 100


def test_documents_are_of_many_lengths() -> None:
    lengths = sorted(len(one.text.split()) for one in whole().documents)
    assert lengths[len(lengths) // 10] < 60
    assert lengths[-len(lengths) // 10] > 250
    assert lengths[-1] > 1_000


def test_a_set_of_a_file(tmp_path) -> None:
    asked = [
        {"question": "When?", "answer": "at  Noon", "also": ["12"]},
        {"question": "Who?", "answer": None},
    ]
    line = {"title": "T", "kind": "note", "text": "Come at noon.", "questions": asked}
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps(line))
    told = sets.read(file)
    assert told.name == "own"
    assert [one.text for one in told.documents] == ["Come at noon."]
    assert told.questions == [Question("When?", "own-1", ("at  Noon",), "")]
    file.write_text(json.dumps(line | {"text": "Never."}))
    with pytest.raises(ValueError, match=r"own\.jsonl:1: the text holds no answer"):
        sets.read(file)


def test_found_is_what_answers_from_the_right_document() -> None:
    asked = Question("When?", "d1", ("at noon", "twelve o'clock"), "note")
    passages = [
        Passage(source_id="d2", text="At noon."),
        Passage(source_id="d1", text="Bring tea."),
        Passage(source_id="d1", text="Come at\nNoon."),
    ]
    assert rank(passages, asked) == 3
    assert rank(passages[:2], asked) == 0


def test_figures_count_what_is_not_found() -> None:
    told = figures([(1, 40), (2, 60), (0, 0), (6, 20)])
    assert (told.questions, told.recall_1, told.recall_5) == (4, 0.25, 0.5)
    assert told.characters == 30
    assert told.mrr == pytest.approx((1 + 1 / 2 + 1 / 6) / 4)
