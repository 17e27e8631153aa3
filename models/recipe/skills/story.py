"""A long templated story on request: 300 tokens and more, to see streaming by."""

from models.recipe import words
from models.recipe.bank.wording import varied
from models.recipe.conversation import Conversation, assistant, system, user
from models.recipe.world import World, articled, capital

ASKS = ["Tell me a story about {hero}.", "Tell me a long story about {hero}.",
        "Write a story about {hero}.", "I would like a story about {hero}.",
        "Please write a long story. The hero is {hero}.", "story about {hero}",
        "Do you know a story about {hero}?", "Write me a tale of {hero}."]  # fmt: skip
CREATURES = ["fox", "bear", "mouse", "hare", "wolf", "frog", "cat", "dog", "horse", "dragon",
             "hen", "bird", "king", "princess", "robot", "giant", "witch", "sailor", "clock",
             "boat", "tree", "cloud", "teacher", "knight", "fish", "bee"]  # fmt: skip
PLAIN = [
    "Tell me a story.",
    "Tell me a long story.",
    "Write a story.",
    "I would like to hear a story.",
]

SCENES = [
    "One {season} morning {hero} found a {adj} {part} by the water and wondered whose it was.",
    "{hero} walked for a whole day, over {adj} hills and along the river, and met nobody but "
    "a {animal}.",
    "The {animal} looked at {hero} for a long time and then said, quite clearly, that the "
    "{part} must be brought home.",
    "So {hero} packed some {thing} and a {colour} coat, and set out before the sun was up.",
    "On the way there was a bridge, and under the bridge there lived an old {job} who knew "
    "every path.",
    "\"Go on past the {adj} mill,\" said the {job}, \"and do not stop before you hear the bells.\"",
    "It rained, and the rain was {adj}, but {hero} sang a song about {thing} and did not mind.",
    "At night there were stars, and {hero} counted them until there were no more numbers left.",
    "In the next village the people were selling {thing}, and everybody asked about the {part}.",
    "A child gave {hero} a {colour} stone and said that it would be useful in the end.",
    "Then the wind turned, and the road grew {adj}, and far away a bell began to ring.",
    "{hero} followed the sound through the {adj} wood until there was light between the trees.",
    "There stood a small house with a {colour} door, and the door was open.",
    "Inside, somebody had laid a table with {thing} and two cups, as if a guest had been expected.",
    "The old woman of the house smiled, took the {part}, and put it back in its place.",
    "\"I have waited for this since last {season},\" she said, \"and now the house is whole "
    "again.\"",
    "{hero} stayed until the {season} was over and learned how to make {thing}.",
    "When it was time to go, the {animal} came along, and the way home seemed only half as long.",
]  # fmt: skip


def tale(world: World, hero: str, opening: str) -> str:
    """A story in five paragraphs; `opening`: who the hero is. Its words depend on the world's
    generator.
    """
    rng = world.rng
    objects = {
        "hero": hero,
        "part": rng.choice(words.PARTS),
        "animal": rng.choice(words.ANIMALS[:14]),
        "job": rng.choice(words.JOBS[:12]),
    }

    def scene(template: str) -> str:
        return articled(capital(template.format(
            **objects, season=rng.choice(words.SEASONS), adj=rng.choice(words.ANY_ADJECTIVE),
            colour=rng.choice(words.COLOURS), thing=rng.choice(words.THINGS),
        )))  # fmt: skip

    sentences = [articled(f"Once there was {opening} by the sea."), *map(scene, SCENES)]
    sentences.append(
        f"And whenever the bells ring in {rng.choice(words.SEASONS)}, "
        f"{hero} still thinks of that day. The end."
    )
    return "\n\n".join(" ".join(sentences[i : i + 4]) for i in range(0, len(sentences), 4))


def story(world: World) -> Conversation:
    """A request for a story of somebody by name, of some creature or thing, or of nobody."""
    rng = world.rng
    roll, ask = rng.random(), rng.choice(ASKS)
    if roll < 0.5:
        hero = named = world.names.word()
        opening = f"the {rng.choice(words.JOBS[:12])}'s child called {hero}, who lived"
    elif roll < 0.8:
        kind = rng.choice(CREATURES) if rng.random() < 0.6 else world.names.of("animal")
        if rng.random() < 0.3:
            kind = f"{rng.choice(words.ANY_ADJECTIVE)} {kind}"
        hero, named = f"the {kind}", rng.choice(("a ", "the ")) + kind
        opening = f"a {kind} that lived"
    else:
        ask = rng.choice(PLAIN)
        hero, named, opening = "a child", "", "a child who lived"
    asked = articled(ask.format(hero=named))
    head = [system("You are a helpful assistant.")] if rng.random() < 0.3 else []
    told = assistant(tale(world, hero, opening))
    return Conversation("story", [*head, user(varied(rng, asked)), told])
