"""Answering from retrieved passages: the words of the passage that answer, and its number."""

import random

from models.recipe.bank.wording import varied
from models.recipe.conversation import Conversation, Message, Span, assistant, system, user
from models.recipe.lookup import of_documents, of_relations
from models.recipe.lookup.of_documents import Size
from models.recipe.lookup.passage import Passage

NOT_TOLD = "The documents do not say."
PROMPTS = [
    "You are a helpful assistant.", "Answer from the documents.", "Use only the documents.",
    "Answer the question from the passages and cite them.", "You answer questions about documents.",
    "Answer briefly, with the number of the passage.", "If the documents do not tell, say so.",
    "You are a careful assistant. Do not make things up.", "Be brief.",
    "You are Penstock's demonstration model.",
]  # fmt: skip


def looked_up(
    rng: random.Random,
    count: int,
    told: bool,
    *,
    most_facts: int = 5,
    relations: float = 0.45,
    held_out: bool = False,
) -> Conversation:
    """A question over up to `count` passages, which they answer or do not.

    `relations` is how often they are composed of relations rather than taken from documents.
    """
    if rng.random() < relations:
        question, passages = of_relations.asked(rng, held_out, count, most_facts, told)
    else:
        question, passages = of_documents.asked(rng, held_out, Size(count), told)
    return conversation(rng, varied(rng, question, documents=True), passages)


def looked_up_in_long(
    rng: random.Random, count: int, told: bool, held_out: bool = False
) -> Conversation:
    """A question over up to `count` passages of two whole documents each."""
    size = Size(count, whole=0.9, others_whole=0.9, paired=True)
    question, passages = of_documents.asked(rng, held_out, size, told)
    return conversation(rng, varied(rng, question, documents=True), passages)


def conversation(rng: random.Random, question: str, passages: list[Passage]) -> Conversation:
    """The question over the passages, with its answer."""
    head: list[Message] = [system(rng.choice(PROMPTS))] if rng.random() < 0.2 else []
    return Conversation(
        "passages" if any(one.tells for one in passages) else "not_told",
        [*head, user(question), assistant(answer(passages))],
        documents=[{"title": one.title, "text": one.text} for one in passages],
        tells=[Span(n, *span) for n, one in enumerate(passages) for span in one.tells],
    )


def answer(passages: list[Passage]) -> str:
    """The words of the first passage that answers, and its number; or that none does."""
    for number, one in enumerate(passages, 1):
        if one.tells:
            start, end = one.tells[0]
            return f"{' '.join(one.text[start:end].split())} [{number}]."
    return NOT_TOLD
