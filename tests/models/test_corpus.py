"""The corpus: the same from the same seed, test names apart, answers grounded."""

import random
import re
import zlib
from typing import Any

import pytest

from models.recipe import corpus
from models.recipe.evaluate import SKILLS, cases
from models.recipe.names import Names, is_held_out
from models.recipe.relations import OF_PEOPLE, OF_THINGS
from models.recipe.skills import passages
from models.recipe.template import render
from models.recipe.world import World, capital


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
    assert zlib.crc32("".join(made).encode()) == 2573479798, (
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


def test_training_never_meets_a_value_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: set[str] = set()
    for method in ("_draw", "number"):
        real = getattr(Names, method)

        def spy(names: Names, *args: Any, real: Any = real) -> str:
            value: str = real(names, *args)
            drawn.add(value)
            return value

        monkeypatch.setattr(Names, method, spy)
    for skill in SKILLS:
        cases(skill, 100)
    monkeypatch.undo()
    # Numbers of one and two digits are on both sides, and so are the single words of wares.
    tested = {v for v in drawn if " " not in v and not (v.isdigit() and len(v) < 3)}
    assert len(tested) > 2000
    trained: set[str] = set()
    for progress in (0.1, 0.7):
        source = corpus.training(1, 0, progress)
        for _ in range(750):
            trained |= set(re.findall(r"[A-Za-z]+|\d+", render(next(source))))
    assert not tested & trained


@pytest.mark.parametrize("skill", [*SKILLS, "story"])
def test_test_conversations_end_in_one_answer(skill: str) -> None:
    for case in cases(skill, 10):
        assert case.messages[-1]["role"] == "assistant"
        assert case.prompt()[-1]["role"] in ("user", "tool")


UNKNOWN = "|".join(sorted((r.unknown for r in OF_THINGS + OF_PEOPLE), key=len, reverse=True))


def bare(text: str) -> str:
    """The text without white space, which passages may be wrapped at, and without citations."""
    return re.sub(r"\s|\[\d+\]", "", text)


def begins(answer: str, subject: str) -> bool:
    return answer.startswith((f"At {subject}", capital(subject)))


def test_an_answer_is_told_by_the_passage_it_cites_or_by_none() -> None:
    told = untold = unknown = 0
    for seed in range(150):
        world = World(random.Random(seed))
        made = passages.passage_set(world, 1 + seed % 6, 4, again=0.5)
        facts = [(number, fact) for number, p in enumerate(made, 1) for fact in p.facts]
        texts = [bare(p.document["text"]) for p in made]
        right = {fact.answered(number): (number, fact) for number, fact in facts}
        first = {fact.entity.name: number for number, fact in reversed(facts)}
        for message in passages.turns(world, made, 12, 0.5)[1::2]:
            answer = message["content"]
            if answer in right:
                told += 1
                number, fact = right[answer]
                assert bare(fact.value) in texts[number - 1]
                continue
            stem = re.sub(rf"({UNKNOWN})\.$", "", answer)
            assert stem != answer
            assert not any(bare(stem) in text for text in texts)
            assert answer not in {f.unanswered(first[f.entity.name]) for _, f in facts}
            if "[" in answer:
                untold += 1
                assert any(begins(answer, f"{name}[{n}]") for name, n in first.items())
            else:
                unknown += 1
                assert not any(begins(answer, name + end) for name in first for end in ", ")
    assert min(told, untold, unknown) > 50


@pytest.mark.parametrize("progress", [0.0, 0.05, 1.0])
def test_no_placeholder_is_left(progress: float) -> None:
    source = corpus.training(5, 0, progress)
    for _ in range(200):
        assert not re.search(r"\{(E|v|it|its|kind|[a-z])\}", render(next(source)))
