"""The corpus: the same from the same seed, test names apart, answers grounded."""

import random
import re
import zlib

import pytest

from models.recipe import corpus
from models.recipe.evaluate import SKILLS, cases
from models.recipe.names import Names, is_held_out
from models.recipe.relations import OF_PEOPLE, OF_THINGS
from models.recipe.template import render


def draws(seed: int, held_out: bool) -> set[str]:
    names = Names(random.Random(seed), held_out)
    return {names.word() for _ in range(2000)} | {names.year() for _ in range(200)}


def test_same_seed_makes_the_same_corpus() -> None:
    def some(seed: int) -> list[str]:
        source = corpus.training(seed, 17, 0.6)
        return [render(next(source)) for _ in range(40)]

    assert some(3) == some(3)
    assert some(3) != some(4)


def test_the_corpus_is_the_one_that_the_weights_saw() -> None:
    made = (render(corpus.example(random.Random(f"{i}"), i / 200)) for i in range(200))
    assert zlib.crc32("".join(made).encode()) == 4280247352, (
        "retrain the models, then change this number"
    )


def test_examples_do_not_depend_on_those_before_them() -> None:
    source = corpus.training(3, 0, 0.6)
    for _ in range(5):
        next(source)
    assert render(next(source)) == render(next(corpus.training(3, 5, 0.6)))


def test_held_out_names_are_never_trained_on() -> None:
    trained, tested = draws(1, held_out=False), draws(2, held_out=True)
    assert not trained & tested
    assert all(is_held_out(name) for name in tested)


UNKNOWN = {relation.unknown for relation in OF_THINGS + OF_PEOPLE}
NAMES = re.compile(r"\b[A-Z][a-z]{3,}\b|\b\d{3,}\b")


def test_training_never_meets_a_name_of_the_tests() -> None:
    source = corpus.training(1, 0, 0.7)
    trained = {name for _ in range(1500) for name in NAMES.findall(render(next(source)))}
    tested = {name for case in cases("passages", 200) for name in NAMES.findall(render(case))}
    assert all(is_held_out(name) for name in tested - trained)
    assert not any(name.isdigit() for name in tested & trained)
    assert not draws(3, held_out=True) & trained
    assert len(tested & trained) < 200  # words of the grammars


@pytest.mark.parametrize("skill", [*SKILLS, "story"])
def test_test_conversations_end_in_one_answer(skill: str) -> None:
    for case in cases(skill, 10):
        assert case.messages[-1]["role"] == "assistant"
        assert case.prompt()[-1]["role"] in ("user", "tool")


def test_answers_from_passages_are_told_by_the_passage_they_cite() -> None:
    for case in cases("passages", 60):
        answer = case.messages[-1]["content"]
        cited = re.search(r"\[(\d+)\]\.$", answer)
        assert cited
        value = answer[: cited.start()].split()[-1]
        assert value in case.documents[int(cited[1]) - 1]["text"]


def test_what_passages_do_not_tell_is_said_so() -> None:
    for case in cases("not_told", 60):
        answer = case.messages[-1]["content"]
        assert answer.endswith("not told.")
        assert "[" not in answer
        stated = answer.removesuffix(".")
        for unknown in sorted(UNKNOWN, key=len, reverse=True):
            stated = stated.removesuffix(unknown)
        assert stated not in " ".join(document["text"] for document in case.documents)


@pytest.mark.parametrize("progress", [0.0, 0.05, 1.0])
def test_no_placeholder_is_left(progress: float) -> None:
    source = corpus.training(5, 0, progress)
    for _ in range(200):
        assert not re.search(r"\{(E|v|it|its|kind|[a-z])\}", render(next(source)))
