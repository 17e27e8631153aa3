"""Greetings, thanks, and what no document is needed for: one honest sentence each."""

from models.recipe.bank.render import Bindings, render
from models.recipe.bank.store import side
from models.recipe.bank.text import definitions
from models.recipe.bank.wording import varied
from models.recipe.conversation import Conversation, assistant, user
from models.recipe.world import World


def smalltalk(world: World, turns: int) -> Conversation:
    """Some turns of talk."""
    rng = world.rng
    made = Conversation("talk", [])
    for _ in range(turns):
        one = rng.choice(side(world.held_out).talk)
        asked, answered = rng.choice(one.asks), rng.choice(one.answers)
        bindings = Bindings(rng, definitions(asked, answered), world.held_out)
        said = varied(rng, render(asked, bindings).text)
        made.messages += [user(said), assistant(render(answered, bindings).text)]
    return made
