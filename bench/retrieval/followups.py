"""How often a chat's next question finds its passage, as it was asked and as the rule rewrites it.

The set beside this file has two halves over different documents. Look at what fails in the first
as you like; the second is held out: run it to report, not to learn from.
"""

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from bench.retrieval.quality import Figures, measured
from bench.retrieval.served import file_of, served
from bench.retrieval.sets import Document, Question, QuestionSet
from services.gateway.runs.rewriting.rule import Rewritten, Turn, rewrite

SET = Path(__file__).with_suffix(".yaml")
HALVES = ("development", "held_out")


class FollowUp(NamedTuple):
    style: str
    turns: Sequence[Turn]
    question: str
    finds: str  # document/passage

    def rewritten(self) -> Rewritten:
        return rewrite(self.turns, self.question)


def documents(half: str) -> list[Document]:
    """Each passage is one, with its document's name as title, so that none is joined to others."""
    told: dict[str, dict[str, str]] = yaml.safe_load(SET.read_text())["documents"][half]
    return [
        Document(f"{title}/{key}", title, text)
        for title, passages in told.items()
        for key, text in passages.items()
    ]


def follow_ups(half: str) -> list[FollowUp]:
    told: list[dict[str, Any]] = yaml.safe_load(SET.read_text())["questions"][half]
    return [FollowUp(**one | {"turns": [Turn(*turn) for turn in one["turns"]]}) for one in told]


def question_set(half: str, rewritten: bool) -> QuestionSet:
    texts = {one.id: one.text for one in documents(half)}
    questions = [
        Question(
            one.rewritten().query if rewritten else one.question,
            one.finds,
            (texts[one.finds],),
            one.style,
        )
        for one in follow_ups(half)
    ]
    return QuestionSet(half, documents(half), questions)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--half", choices=HALVES, default=HALVES[0], help="default: the first")


def run(given: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    found = asyncio.run(_measured(given.half))
    figures = {
        how: {style: one._asdict() for style, one in its.items()} for how, its in found.items()
    }
    return {"half": given.half, "figures": figures}, _table(found)


async def _measured(half: str) -> dict[str, dict[str, Figures]]:
    """By how it was asked, and by style; ranked as a chat's search is."""
    ways = {"as asked": question_set(half, False), "rewritten": question_set(half, True)}
    async with served() as service:
        await service.index(half, map(file_of, documents(half)))
        return {how: await measured(service, asked, "late") for how, asked in ways.items()}


def _table(found: Mapping[str, Mapping[str, Figures]]) -> list[str]:
    rows = ["| style | n | as asked: recall@1 | @5 | rewritten: recall@1 | @5 |"]
    rows.append("| --- " + "| ---: " * 5 + "|")
    for style, asked in found["as asked"].items():
        by_rule = found["rewritten"][style]
        shares = [asked.recall_1, asked.recall_5, by_rule.recall_1, by_rule.recall_5]
        told = " | ".join(f"{share:.0%}" for share in shares)
        rows.append(f"| {style} | {asked.questions} | {told} |")
    return rows
