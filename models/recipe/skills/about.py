"""A small fixed set of facts about Penstock itself, asked in several ways."""

from models.recipe.bank.wording import varied
from models.recipe.conversation import Conversation, Message, assistant, system, user
from models.recipe.world import World, capital

SERVICES = {
    "gateway": "The gateway authenticates requests, checks them against limits, and streams "
    "the answer to the client.",
    "tokenizer": "The tokenizer assembles the prompt, turns it into tokens, checks policy, and "
    "turns tokens back into text.",
    "router": "The router admits requests, chooses a model and a worker, and merges their tokens.",
    "worker": "The worker runs the model: it schedules, prefills, and decodes tokens.",
    "retrieval service": "The retrieval service finds passages in the tenant's documents and "
    "names their sources.",
    "prefill worker": "A prefill worker reads the whole prompt, fills the KV cache, and makes "
    "the first token.",
    "decode worker": "A decode worker makes the tokens after the first, one step at a time.",
    "draft model": "The draft model guesses tokens ahead so that the demo model can check "
    "several at once.",
    "KV cache": "The KV cache keeps the keys and values of past tokens in blocks so that they "
    "are not computed again.",
}
FACTS = [
    (["Which services does Penstock have?", "What services are in Penstock?",
      "List the services of Penstock.", "What are the services of Penstock called?",
      "Name Penstock's services.", "Which services make up Penstock?"],
     "Penstock has a gateway, a tokenizer, a router, workers, and a retrieval service."),
    (["What does Penstock use Redis for?", "Why does Penstock need Redis?",
      "What is Redis for?", "What is in Redis?", "Why is there a Redis?"],
     "Penstock uses Redis for the registry of replicas, admission order, limits, caches, and "
     "durable jobs."),
    (["What does Ray do in Penstock?", "What is Ray Serve used for in Penstock?",
      "What is Ray for?", "Why does Penstock use Ray?", "Does Ray carry tokens?"],
     "Ray Serve places, checks, and scales the services, but it carries no tokens."),
    (["How do Penstock's services talk to each other?", "What joins the services of Penstock?",
      "Which protocol do the services of Penstock speak?", "How are the services connected?"],
     "Penstock's services talk over long-lived gRPC streams, one frame per engine step."),
]  # fmt: skip
ASKS = [
    "what does the {} do?", "what is the {} for?", "what does the {} of Penstock do?",
    "explain the {}.", "tell me about the {}.", "what is the {}?", "what is a {}?", "{}?",
    "what's a {}?", "what is Penstock's {}?", "why does Penstock have a {}?", "what are {}s?",
    "what do {}s do?", "how does the {} work?", "what happens in the {}?", "the {}?",
    "can you explain what a {} is?", "why is there a {}?",
]  # fmt: skip


def about(world: World, turns: int) -> Conversation:
    """Questions on what Penstock's parts do."""
    rng = world.rng
    messages: list[Message] = [system("You are a helpful assistant.")] if rng.random() < 0.4 else []
    for _ in range(turns):
        if rng.random() < 0.55:
            name = rng.choice(list(SERVICES))
            asked = capital(rng.choice(ASKS).format(name))
            messages += [user(varied(rng, asked)), assistant(SERVICES[name])]
        else:
            asks, answer = rng.choice(FACTS)
            messages += [user(varied(rng, rng.choice(asks))), assistant(answer)]
    rote = {*SERVICES.values(), *(answer for _, answer in FACTS)}
    return Conversation("about", messages, rote=rote)
