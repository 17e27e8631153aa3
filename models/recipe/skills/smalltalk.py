"""Greetings, thanks, and what no document is needed for: one honest sentence each."""

from models.recipe.bank.render import Bindings, render
from models.recipe.bank.store import side
from models.recipe.bank.talk import Exchange
from models.recipe.bank.text import definitions
from models.recipe.bank.wording import varied
from models.recipe.conversation import Conversation, Message, assistant, user
from models.recipe.world import World


def smalltalk(world: World, turns: int) -> Conversation:
    """Some turns of talk."""
    made = Conversation("talk", [])
    for _ in range(turns):
        made.messages += _turn(world, world.rng.choice(side(world.held_out).talk))
    return made


def beside(world: World, made: Conversation) -> Conversation:
    """Passages were found, but the user only talks."""
    talk = [one for one in side(world.held_out).talk if not one.asks_facts]
    return Conversation("talk", _turn(world, world.rng.choice(talk)), documents=made.documents)


def _turn(world: World, exchange: Exchange) -> list[Message]:
    rng = world.rng
    asked, answered = rng.choice(exchange.asks), rng.choice(exchange.answers)
    bindings = Bindings(rng, definitions(asked, answered), world.held_out)
    said = varied(rng, render(asked, bindings).text)
    return [user(said), assistant(render(answered, bindings).text)]
