"""How often the right passage is found, and how high up."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from bench.retrieval.served import Served
from bench.retrieval.sets import Question, QuestionSet, holds
from protos.common_pb2 import Passage

ALL = "all"
_SHOWN = 10  # passages of a search; what lies deeper counts as not found
_AT_ONCE = 4

RANKINGS: dict[str, dict[str, Any]] = {"dense": {}}


class Figures(NamedTuple):
    questions: int
    recall_1: float  # of the questions, those whose first passage answers
    recall_5: float
    mrr: float  # the mean of 1/rank; of what is not among ten, 0


async def measured(
    service: Served, collection: str, asked: QuestionSet, ranking: str
) -> dict[str, Figures]:
    """By sort of question, and of all."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(question: Question) -> int:
        async with places:
            found = await service.search(collection, question.text, _SHOWN, **RANKINGS[ranking])
        return rank(found, question)

    ranks: dict[str, list[int]] = defaultdict(list)
    for question, its in zip(
        asked.questions, await asyncio.gather(*map(one, asked.questions)), strict=True
    ):
        ranks[ALL].append(its)
        ranks[question.sort].append(its)
    return {sort: figures(ranks[sort]) for sort in sorted(ranks, key=lambda s: (s != ALL, s))}


def rank(passages: Iterable[Passage], question: Question) -> int:
    """Of the first that answers, from 1 on; 0: none does."""
    for number, passage in enumerate(passages, 1):
        if passage.source_id == question.document and holds(passage.text, question.told):
            return number
    return 0


def figures(ranks: list[int]) -> Figures:
    """Of searches' ranks, at least one."""
    count = len(ranks)
    return Figures(
        count,
        sum(its == 1 for its in ranks) / count,
        sum(1 <= its <= 5 for its in ranks) / count,
        sum(1 / its for its in ranks if its) / count,
    )
