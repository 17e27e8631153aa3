"""The mixture: which skill each example trains, and how hard it is at which point."""

import random
from collections.abc import Iterator

from models.recipe.conversation import Conversation
from models.recipe.skills import about, extract, passages, recall, short, story, tools
from models.recipe.world import World

# Shares of examples: at the start of training, from `EASY_UNTIL` of it on, and from `LAST_FROM` on.
START = {
    "copying": 14,
    "passages": 42,
    "recall": 14,
    "json": 8,
    "tools": 10,
    "short": 8,
    "about": 2,
    "story": 2,
    "long": 0,
}
LATER = {
    "copying": 2,
    "passages": 52,
    "recall": 10,
    "json": 16,
    "tools": 12,
    "short": 12,
    "about": 3,
    "story": 2,
    "long": 1.5,
}
# By then looking up is learned, and what is left over goes to what is not.
LAST = LATER | {"passages": 30, "json": 36, "tools": 16, "short": 14}
EASY_UNTIL, LAST_FROM = 0.04, 0.55
# Of the turns with tools, those that ask for one that is not offered.
DECLINED, LAST_DECLINED = 0.08, 0.18
# How often a set has 1, 2, ... 7 passages: at the start, and from `WIDE_AT` of the training on.
NARROW, WIDE = (6, 3, 1, 0.5, 0.3, 0.2, 0), (1, 3, 4, 4, 3, 2, 0.5)
WIDE_AT = 0.3
# More often than in tests: another passage about the same thing, and questions without an answer.
AGAIN, NOT_TOLD = 0.3, 0.26


def shares(progress: float) -> dict[str, float]:
    """The mixture at `progress` (0 to 1) of the training."""
    if progress >= LAST_FROM:
        return LAST
    blend = min(1.0, progress / EASY_UNTIL)
    return {skill: START[skill] * (1 - blend) + LATER[skill] * blend for skill in START}


def example(rng: random.Random, progress: float) -> Conversation:
    """One training conversation, harder as `progress` goes from 0 to 1."""
    world = World(rng)
    mixture = shares(progress)
    skill = rng.choices(list(mixture), list(mixture.values()))[0]
    easy = rng.random() < 0.7 * (1 - 2 * progress)
    if skill == "copying":
        return short.copying(world)
    if skill == "passages":
        # Looking up is learned where there is little to look through: few passages, all asked.
        blend = min(1.0, progress / WIDE_AT)
        weights = [n * (1 - blend) + w * blend for n, w in zip(NARROW, WIDE, strict=True)]
        count = rng.choices(range(1, 8), weights)[0]
        most = 6 if count == 1 else 4
        return looked_up(world, count, 12, most)
    if skill == "recall":
        facts = rng.randint(1, 3) if easy else rng.randint(1, 7)
        return recall.recall(
            world, facts, rng.randint(3, 5), 0 if easy else rng.choice((0, 0, 1, 2, 3))
        )
    if skill == "json":
        return extract.extract(world, 1 if easy else rng.randint(1, 4), rng.randint(2, 4))
    if skill == "tools":
        if rng.random() < 0.06:
            return tools.beside(world, looked_up(world, rng.randint(1, 3), 4))
        declined = DECLINED if progress < LAST_FROM else LAST_DECLINED
        return tools.calls(world, rng.randint(2, 5), share_declined=declined, share_other=0.08)
    if skill == "short":
        made = short.task(world)
        for _ in range(rng.randint(2, 5)):
            made.messages += short.task(world).messages
        return made
    if skill == "about":
        return about.about(world, rng.randint(2, 5))
    if skill == "story":
        return story.story(world)
    if skill == "long":
        return long_example(world)
    raise KeyError(skill)


def looked_up(world: World, count: int, questions: int, most_facts: int = 4) -> Conversation:
    """Questions over `count` passages, with more of what is hard than tests have."""
    return passages.answered(
        world, count, questions, most_facts, again=AGAIN, share_not_told=NOT_TOLD
    )


def long_example(world: World) -> Conversation:
    """350-2,000 tokens: many passages, or a conversation that goes on for long before it asks."""
    rng = world.rng
    if rng.random() < 0.6:
        return looked_up(world, rng.randint(8, 18), 16)
    return recall.recall(world, rng.randint(3, 8), 8, rng.randint(10, 40))


def graded(rng: random.Random, skill: str) -> Conversation:
    """One test conversation over held-out names; its last message is what a test compares with."""
    world = World(rng, held_out=True)
    if skill == "passages":
        return passages.answered(world, rng.randint(2, 6), 1)
    if skill == "not_told":
        return passages.not_told(world, rng.randint(2, 6))
    if skill == "recall":
        return recall.recall(world, rng.randint(1, 5), 1, rng.randint(0, 2))
    if skill == "not_stated":
        return recall.not_stated(world, rng.randint(1, 5))
    if skill == "json":
        return extract.extract(world, rng.randint(1, 4), 1)
    if skill == "tools":
        return tools.calls(world, 1, with_results=False)
    if skill == "no_tool":
        return tools.declined(world)
    if skill == "tool_result":
        return tools.calls(world, 1)
    if skill == "short":
        return short.task(world)
    if skill == "about":
        return about.about(world, 1)
    if skill == "long":
        return passages.answered(world, rng.randint(10, 16), 1)
    if skill == "story":
        return story.story(world)
    raise KeyError(skill)


def training(seed: int, first: int, progress: float) -> Iterator[Conversation]:
    """Training examples from number `first` on; each depends on (seed, number, progress)."""
    while True:
        yield example(random.Random(f"{seed}/{first}"), progress)
        first += 1
