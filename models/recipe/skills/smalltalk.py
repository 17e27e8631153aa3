"""Greetings, thanks, and what no document is needed for: one honest sentence each."""

from dataclasses import replace

from models.recipe.bank.render import Bindings, render
from models.recipe.bank.store import side
from models.recipe.bank.talk import Exchange
from models.recipe.bank.text import definitions
from models.recipe.bank.wording import varied
from models.recipe.conversation import Conversation, Message, assistant, user
from models.recipe.world import World

OFTEN = 5  # times as often is said what many say


def smalltalk(world: World, turns: int) -> Conversation:
    """Some turns of talk."""
    talk = side(world.held_out).talk
    some = world.rng.choices(talk, [OFTEN if one.often else 1 for one in talk], k=turns)
    return _talk([_turn(world, one) for one in some])


def beside(world: World, made: Conversation) -> Conversation:
    """Passages were found, but the user only talks."""
    talk = [one for one in side(world.held_out).talk if not one.asks_facts]
    return replace(_talk([_turn(world, world.rng.choice(talk))]), documents=made.documents)


def _talk(turns: list[list[Message]]) -> Conversation:
    answers = {str(answer["content"]) for _, answer in turns}
    return Conversation("talk", [one for turn in turns for one in turn], rote=answers)


def _turn(world: World, exchange: Exchange) -> list[Message]:
    rng = world.rng
    asked, answered = rng.choice(exchange.asks), rng.choice(exchange.answers)
    bindings = Bindings(rng, definitions(asked, answered), world.held_out)
    said = varied(rng, render(asked, bindings).text)
    return [user(said), assistant(render(answered, bindings).text)]
