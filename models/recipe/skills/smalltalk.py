"""Greetings, thanks, and what no document is needed for: one honest sentence each."""

from dataclasses import replace

from models.recipe.bank.render import Bindings, render
from models.recipe.bank.store import side
from models.recipe.bank.talk import OFF_TOPIC, Exchange
from models.recipe.bank.text import definitions
from models.recipe.bank.wording import varied
from models.recipe.conversation import Conversation, Message, assistant, user
from models.recipe.skills.passages import NOT_TOLD
from models.recipe.world import World

OFTEN = 5  # times as often is said what many say
VAIN = 0.2  # of the talk beside a search, that beside one which found nothing


def smalltalk(world: World, turns: int) -> Conversation:
    """Some turns of talk."""
    talk = side(world.held_out).talk
    some = world.rng.choices(talk, [OFTEN if one.often else 1 for one in talk], k=turns)
    return _talk([_turn(world, one) for one in some])


def beside(world: World, made: Conversation) -> Conversation:
    """Passages were found, or looked for in vain, but the user only talks."""
    talk = [one for one in side(world.held_out).talk if not one.asks_facts]
    found = [] if world.rng.random() < VAIN else made.documents
    talked = _talk([_turn(world, world.rng.choice(talk))])
    return replace(talked, documents=found, searched=True)


def without_documents(made: Conversation, searched: bool) -> Conversation:
    """A question over passages, put beside none: a search found none, or there was no search."""
    asked = next(one for one in made.messages if one["role"] == "user")
    said = NOT_TOLD if searched else f"{OFF_TOPIC} that I am given."
    return replace(_talk([[asked, assistant(said)]]), searched=searched)


def _talk(turns: list[list[Message]]) -> Conversation:
    answers = {str(answer["content"]) for _, answer in turns}
    return Conversation("talk", [one for turn in turns for one in turn], rote=answers)


def _turn(world: World, exchange: Exchange) -> list[Message]:
    rng = world.rng
    asked, answered = rng.choice(exchange.asks), rng.choice(exchange.answers)
    bindings = Bindings(rng, definitions(asked, answered), world.held_out)
    said = varied(rng, render(asked, bindings).text)
    return [user(said), assistant(render(answered, bindings).text)]
