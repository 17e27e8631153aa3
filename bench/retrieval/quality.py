"""How often the right passage is found, and how high up, by each way of ranking.

Over 2,000 questions made up here (made.py), or over those of files of one's own (sets.py says how
they are written), each set in a collection of its own.
"""

import argparse
import asyncio
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from bench.retrieval import sets
from bench.retrieval.made import QUESTIONS, made
from bench.retrieval.served import Served, file_of, served
from bench.retrieval.sets import Question, QuestionSet, holds
from protos.common_pb2 import Passage
from protos.retrieval_pb2 import Ranking

ALL = "all"
_SHOWN = 10  # passages of a search; what lies deeper counts as not found
_AT_ONCE = 4

# As a search request has them.
RANKINGS: dict[str, dict[str, Any]] = {
    "dense": {"ranking": Ranking(ranker=Ranking.NONE)},
    "sparse": {"ranking": Ranking(text_weight=1.0)},
    "hybrid": {"ranking": Ranking(embedding_weight=1.0, text_weight=0.3)},
    "late": {},  # hybrid, and late interaction: the service's own choice
}


class Figures(NamedTuple):
    questions: int
    recall_1: float  # of the questions, those whose first passage answers
    recall_5: float
    mrr: float  # the mean of 1/rank; of what is not among ten, 0
    characters: float  # of a first passage, on average: a long one holds an answer more easily


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--set", type=Path, action="append", default=[], help="JSON lines, instead of the made one")
    add("--rankings", nargs="+", choices=RANKINGS, default=list(RANKINGS), help="default: all")
    add("--questions", type=int, default=QUESTIONS, help="of the made set")


def run(given: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    found = asyncio.run(_run(given))
    return found, _table(found)


async def _run(given: argparse.Namespace) -> list[dict[str, Any]]:
    chosen = [sets.read(path) for path in given.set] or [made(questions=given.questions)]
    found = []
    async with served() as service:
        for asked in chosen:
            chunks, seconds = await service.index(asked.name, map(file_of, asked.documents))
            documents = len(asked.documents)
            _say(f"{asked.name}: {documents} documents, {chunks} chunks, {seconds:.0f} s")
            for ranking in given.rankings:
                told = await measured(service, asked, ranking)
                figures = {sort: one._asdict() for sort, one in told.items()}
                found.append({"set": asked.name, "ranking": ranking, "figures": figures})
                _say(f"{asked.name}, {ranking}: recall@1 {told[ALL].recall_1:.3f}")
    return found


async def measured(service: Served, asked: QuestionSet, ranking: str) -> dict[str, Figures]:
    """By sort of question, and of all. The set's documents are indexed, in its collection."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(question: Question) -> tuple[int, int]:
        async with places:
            found = await service.search(asked.name, question.text, _SHOWN, **RANKINGS[ranking])
        first = len(found.passages[0].text) if found.passages else 0
        return rank(found.passages, question), first

    by_sort: dict[str, list[tuple[int, int]]] = defaultdict(list)
    told = await asyncio.gather(*map(one, asked.questions))
    for question, its in zip(asked.questions, told, strict=True):
        by_sort[ALL].append(its)
        if question.sort:
            by_sort[question.sort].append(its)
    return {sort: figures(by_sort[sort]) for sort in sorted(by_sort, key=lambda s: (s != ALL, s))}


def rank(passages: Iterable[Passage], question: Question) -> int:
    """Of the first that answers, from 1 on; 0: none does."""
    for number, passage in enumerate(passages, 1):
        if passage.source_id == question.document and holds(passage.text, question.told):
            return number
    return 0


def figures(searches: list[tuple[int, int]]) -> Figures:
    """Of searches, at least one: the answer's rank, and the first passage's characters."""
    ranks, lengths = zip(*searches, strict=True)
    count = len(ranks)
    return Figures(
        count,
        sum(its == 1 for its in ranks) / count,
        sum(1 <= its <= 5 for its in ranks) / count,
        sum(1 / its for its in ranks if its) / count,
        sum(lengths) / count,
    )


def _table(found: list[dict[str, Any]]) -> list[str]:
    rows = [
        "| set | questions | ranking | n | recall@1 | recall@5 | MRR | first passage, characters |",
        "| --- | --- | --- " + "| ---: " * 5 + "|",
    ]
    for one in found:
        for sort, its in one["figures"].items():
            rows.append(
                f"| {one['set']} | {sort} | {one['ranking']} | {its['questions']} "
                f"| {its['recall_1']:.1%} | {its['recall_5']:.1%} | {its['mrr']:.3f} "
                f"| {its['characters']:.0f} |"
            )
    return rows


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
