"""The mixture: which skill each example trains, and how hard it is at which point."""

import random

from models.recipe.conversation import Conversation
from models.recipe.skills import about, extract, passages, recall, short, smalltalk, story, tools
from models.recipe.world import World

# Shares of examples: at the start of training, and from `MIXED_AT` of it on. Reading comes first:
# it takes longest, and the rest is learned soon by a model that can compare and copy.
START = {
    "copying": 1, "passages": 92, "recall": 2, "json": 1.5, "tools": 1.5, "short": 1, "about": 0.5,
    "talk": 0.5, "story": 0,
}  # fmt: skip
LATER = {
    "copying": 1, "passages": 40, "recall": 11, "json": 19, "tools": 16, "short": 10, "about": 5,
    "talk": 12, "story": 4,
}  # fmt: skip
MIXED_AT = 0.3
# How often a set has 1, 2, … 7 passages: at the start, and from `WIDE_AT` of the training on.
NARROW, WIDE = (4, 6, 1.5, 0.3, 0, 0, 0), (4, 3, 2.5, 4, 1, 0.4, 0.1)
WIDE_AT = 0.4
NOT_TOLD = (0.05, 0.25)  # shares of the questions, at the start and from `WIDE_AT` on
# Shares of the passages that are composed of relations, at the start and from `TEXTS_AT` on: these
# teach soon to compare and to copy, but to tell things of one kind apart. In ordinary texts it is
# words of like meaning that lead to the answer, and only documents teach that.
RELATIONS = (0.5, 0.25)
TEXTS_AT = 0.25
# Of the questions, those over whole documents, two in a passage, at the start and from `WIDE_AT`
# on; and how many passages. Prompts are some four times as long as the others then.
LONG = (0.0, 0.3)
LONG_COUNTS = (2, 3, 3, 4)
FACTS = (1, 4)  # the most that a composed passage tells
RECORDS = 0.6  # of the texts that JSON is filled from
SILENT = 0.35  # of the requests for JSON, those for a key that is not told
TALKED = 0.25  # of the questions over passages, those with others before them
BARE = 0.25  # of the talk, questions that documents answer, beside none
DECLINED = 0.25  # of the turns with tools, those that ask for one that is not offered


def _between(ends: tuple[float, float], progress: float, until: float) -> float:
    """From the first of the ends to the second, which is reached at `until`."""
    blend = min(1.0, progress / until)
    return ends[0] * (1 - blend) + ends[1] * blend


def shares(progress: float) -> dict[str, float]:
    """The mixture at `progress` (0 to 1) of the training."""
    return {s: _between((START[s], LATER[s]), progress, MIXED_AT) for s in START}


def example(rng: random.Random, progress: float) -> Conversation:
    """One training conversation, harder as `progress` goes from 0 to 1."""
    world = World(rng)
    mixture = shares(progress)
    skill = rng.choices(list(mixture), list(mixture.values()))[0]
    if skill == "passages":
        made = looked_up(rng, progress)
        if rng.random() < 0.04:
            made = tools.beside(world, made)
        return _behind_others(world, made, progress) if rng.random() < TALKED else made
    if skill == "copying":
        return short.copying(world)
    if skill == "recall":
        facts, between = rng.randint(1, 7), rng.choice((0, 0, 1, 2, 3))
        return recall.recall(world, facts, rng.randint(3, 5), between)
    if skill == "json":
        return extract.extract(world, rng.randint(1, 3), rng.random() < RECORDS, SILENT)
    if skill == "tools":
        return tools.calls(world, rng.randint(2, 5), share_declined=DECLINED, share_other=0.08)
    if skill == "short":
        return short.task_of(world, rng.randint(2, 6))
    if skill == "about":
        return about.about(world, rng.randint(2, 5))
    if skill == "talk" and rng.random() < 0.3:
        made = smalltalk.beside(world, looked_up(rng, progress))
        return _behind_others(world, made, progress) if rng.random() < 0.5 else made
    if skill == "talk" and rng.random() < BARE:
        return smalltalk.without_documents(looked_up(rng, progress), rng.random() < 0.5)
    if skill == "talk":
        return smalltalk.smalltalk(world, rng.randint(1, 4))
    if skill == "story":
        return story.story(world)
    raise KeyError(skill)


def _behind_others(world: World, made: Conversation, progress: float) -> Conversation:
    """With some turns before it, as where a user goes on asking: questions, whose passages are
    shown no more, and talk. These are read, not learned."""
    rng = world.rng
    at = 1 if made.messages[0]["role"] == "system" else 0
    for _ in range(rng.choice((1, 1, 2, 3, 5, 8))):
        if rng.random() < 0.7:
            earlier = looked_up(rng, progress)
        else:
            earlier = rng.choice((smalltalk.smalltalk, short.task_of))(world, 1)
        made.messages[at:at] = [one for one in earlier.messages if one["role"] != "system"]
    return made


def looked_up(rng: random.Random, progress: float) -> Conversation:
    """A question over passages: few and short ones at first."""
    told = rng.random() >= _between(NOT_TOLD, progress, WIDE_AT)
    if rng.random() < _between(LONG, progress, WIDE_AT):
        return passages.looked_up_in_long(rng, rng.choice(LONG_COUNTS), told)
    weights = [_between(ends, progress, WIDE_AT) for ends in zip(NARROW, WIDE, strict=True)]
    return passages.looked_up(
        rng,
        rng.choices(range(1, 8), weights)[0],
        told,
        most_facts=round(_between(FACTS, progress, WIDE_AT)),
        relations=_between(RELATIONS, progress, TEXTS_AT),
    )


def graded(rng: random.Random, skill: str) -> Conversation:
    """One test conversation over held-out material; its last message is the right answer."""
    world = World(rng, held_out=True)
    if skill in ("passages", "not_told"):
        told = skill == "passages"
        return passages.looked_up(rng, rng.randint(1, 5), told, held_out=True)
    if skill == "large":
        return passages.looked_up_in_long(rng, rng.choice(LONG_COUNTS), True, held_out=True)
    if skill == "recall":
        return recall.recall(world, rng.randint(1, 5), 1, rng.randint(0, 2))
    if skill == "not_stated":
        return recall.not_stated(world, rng.randint(1, 5))
    if skill in ("json", "json_of_prose"):
        return extract.extract(world, rng.randint(1, 3), skill == "json")
    if skill == "tools":
        return tools.calls(world, 1, with_results=False)
    if skill == "no_tool":
        return tools.declined(world)
    if skill == "tool_result":
        return tools.calls(world, 1)
    if skill == "short":
        return short.task_of(world, 1)
    if skill == "about":
        return about.about(world, 1)
    if skill == "talk":
        return smalltalk.smalltalk(world, 1)
    if skill in ("bare", "vain"):
        asked = passages.looked_up(rng, 1, True, held_out=True)
        return smalltalk.without_documents(asked, searched=skill == "vain")
    if skill == "long":
        return passages.looked_up(rng, rng.randint(7, 9), True, held_out=True, relations=1)
    if skill == "story":
        return story.story(world)
    raise KeyError(skill)
