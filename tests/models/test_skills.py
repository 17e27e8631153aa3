"""What the small skills ask and answer."""

import json
import random
from typing import Any

import pytest
from tokenizers import Tokenizer

from models.recipe.evaluate import cases
from models.recipe.skills import about, recall, short, story, tools
from models.recipe.skills.toolbox import FAMILIES, SERVES
from models.recipe.world import World


def worlds(count: int, held_out: bool = False) -> list[World]:
    return [World(random.Random(i), held_out) for i in range(count)]


def function(message: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    called = message["tool_calls"][0]["function"]
    return called["name"], json.loads(called["arguments"])


def test_a_call_is_of_a_tool_that_is_offered_and_says_what_the_question_gives() -> None:
    for world in worlds(300):
        made = tools.calls(world, 1, with_results=False)
        names = [one["function"]["name"] for one in made.tools]
        assert len({*names}) == len(names)
        question, (name, arguments) = made.messages[-2]["content"], function(made.messages[-1])
        schema = made.tools[names.index(name)]["function"]["parameters"]
        assert [*arguments] == schema["required"]
        assert {*arguments} <= {*schema["properties"]}
        assert all(str(value) in question for value in arguments.values())


def test_no_two_arguments_of_a_tool_have_one_key() -> None:
    for world in worlds(60):
        for family in FAMILIES:
            keys = tools.tool(world, family).arguments
            assert len({*keys}) == len(keys) == len(family.arguments)


def test_tools_of_tests_have_names_that_no_training_sees() -> None:
    sides = []
    for held_out in (False, True):
        some = [tools.tool(one, f).name for one in worlds(30, held_out) for f in FAMILIES]
        sides.append({*some})
    assert min(map(len, sides)) > 300
    assert not sides[0] & sides[1]


def test_what_an_offered_tool_would_do_is_not_declined() -> None:
    first = {family.names[0]: family for family in FAMILIES}
    assert {*SERVES, *(name for some in SERVES.values() for name in some)} <= {*first}
    search = first["search"]
    declined = {tools._declined(world, [search])[0]["content"] for world in worlds(300)}
    assert not [said for said in declined if "weather" in said or said.startswith("Search for")]


def test_what_nobody_said_is_not_what_somebody_said_in_other_words() -> None:
    """Often it is of the kind of what somebody said: the cat, where they tell of a dog."""
    beside = 0
    kinds = recall.NAMED | recall.VALUED
    for world in worlds(400):
        items, _ = recall._statements(world, 3)
        question = recall._unknown(world, items)[0]["content"].lower()
        assert not any(f" {key}" in question for key in items if key in kinds), question
        for same in recall.SAME:
            if same & items.keys():
                assert not any(f"my {key}" in question for key in same), question
        said = {kinds.get(key) for key in items}
        beside += any(f"my {key}" in question for key, kind in kinds.items() if kind in said)
    assert beside > 60


def test_a_story_names_its_hero_from_its_first_sentence_on() -> None:
    openings = set()
    for world in worlds(80):
        made = story.story(world)
        asked, told = (made.messages[at]["content"] for at in (-2, -1))
        first = told.split(".")[0]
        openings.add(first.split(" by the sea")[0].rsplit(" ", 2)[1])
        if "that lived" in first:
            hero = first.removeprefix("Once there was ").split(" ", 1)[1].split(" that ")[0]
            assert hero.split()[-1].lower()[:4] in asked.lower()
            assert told.count(f"he {hero}") > 5
    assert openings == {"who", "that"}


def test_a_story_is_long(tokenizer: Tokenizer) -> None:
    case = cases("story", 1)[0]
    assert len(tokenizer.encode(case.messages[-1]["content"]).ids) >= 300


@pytest.mark.parametrize("kind", short.ASKS)
def test_every_short_task_is_answered(kind: str) -> None:
    for world in worlds(30):
        given, answer = short._given(world, kind)
        assert given
        assert answer


def test_short_tasks_are_right() -> None:
    answers = {}
    for world in worlds(3000):
        asked, answered = (one["content"] for one in short.task(world).messages)
        answers[asked.lower().removesuffix(".")] = answered
    assert answers["count to 5"] == "1, 2, 3, 4, 5"
    counts = [(a, q.split()[2::2]) for q, a in answers.items() if q.startswith("count from")]
    assert len(counts) > 20
    for counted, (first, last) in counts:
        assert counted == ", ".join(map(str, range(int(first), int(last) + 1)))
    assert answers["list 2 days"] == "- Monday\n- Tuesday"
    assert answers["repeat: hello"] == "hello"


def test_a_question_about_penstock_has_one_answer() -> None:
    answers: dict[str, str] = {}
    for world in worlds(400):
        made = about.about(world, 3).messages
        for asked, answer in zip(made[-6::2], made[-5::2], strict=True):
            said = answers.setdefault(asked["content"].lower(), answer["content"])
            assert said == answer["content"]
