"""How often a model answers right, the whole way of a user's questions.

Starts `penstock up` with a data directory and one worker of its own, makes a store of a set's
documents, a file each, and asks all its questions. An answer counts that has the right words and
the number of a passage of that document that holds them; a question that no document answers asks
for `The documents do not say.`, as the demonstration model has it. A request that fails is a wrong
answer that did not end.
"""

import argparse
import asyncio
import sys
import tempfile
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.platform import ROOT, client_of, platform_up
from bench.result_file import checkpoint_folder
from bench.retrieval.sets import holds
from bench.retrieval.stores import Upload, filled, post
from models.recipe.ordinary import LONGEST, Score
from models.recipe.set_file import SetDocument, SetQuestion, documents_of
from services.cli.running import Running

SETS = ROOT / "models" / "recipe"
LONGEST_NAME = 200  # bytes of a file's name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=checkpoint_folder, default=ROOT / "models" / "demo")
    add(
        "--set",
        type=Path,
        default=SETS / "development.jsonl",
        help="JSON lines, as in models/recipe/set_file.py; each title once",
    )
    add(
        "--chunks",
        type=int,
        choices=range(1, 51),
        metavar="1-50",
        help="of a search (max_num_results); default: the platform's",
    )


@dataclass
class Told:
    """What came of a set's questions."""

    score: Score = field(default_factory=Score)
    failed: int = 0
    prompt_tokens: int = 0  # of all

    def count(self, reply: Any, asked: SetQuestion, name: str) -> None:
        """`reply`: the response's body; `name`: of the file that the question is about."""
        self.prompt_tokens += reply["usage"]["input_tokens"]
        numbers = telling(reply["output"], name, asked.answers)
        ended = reply["status"] == "completed"
        self.score.count(said_in(reply["output"]), asked.answers, numbers, ended)

    def fail(self, asked: SetQuestion) -> None:
        self.failed += 1
        self.score.count("", asked.answers, set(), False)


def run(given: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    documents = documents_of(given.set)
    names = names_of(documents)
    with (
        tempfile.TemporaryDirectory() as folder,
        platform_up(given.model, Path(folder), "ngram") as running,
    ):
        told = asyncio.run(_asked(running, dict(zip(names, documents, strict=True)), given.chunks))
    questions = told.score.told + told.score.untold
    mean = told.prompt_tokens // max(1, questions - told.failed)
    table = [
        f"{questions} questions on {len(documents)} documents, prompts of {mean} tokens (mean); "
        f"{told.failed} failed",
        *told.score.lines(),
    ]
    figures = {"failed": told.failed, "prompt_tokens": told.prompt_tokens}
    return {**asdict(told.score), **figures}, table


def names_of(documents: Sequence[SetDocument]) -> list[str]:
    """Their files' names, by their titles. Raises ValueError, which names the line, where a title
    gives none, or one that another has.
    """
    names: list[str] = []
    for line, one in enumerate(documents, 1):
        name = f"{one.title.replace('/', '-')}.txt"
        control = any(unicodedata.category(letter) == "Cc" for letter in name)
        if control or not one.title.strip() or len(name.encode()) > LONGEST_NAME:
            raise ValueError(f"line {line}: no file is named by the title {one.title!r}")
        if name in names:
            other = names.index(name) + 1
            raise ValueError(f"line {line}: {one.title!r} names a file as line {other} does")
        names.append(name)
    return names


def telling(output: list[Any], name: str, answers: Sequence[str]) -> set[int]:
    """The numbers, from 1 on, of the passages of a file that hold one of the answers."""
    searches = (item for item in output if item["type"] == "file_search_call")
    passages = [one for item in searches for one in item["results"] or []]
    return {
        number
        for number, one in enumerate(passages, 1)
        if one["filename"] == name and holds(one["text"], tuple(answers))
    }


def said_in(output: list[Any]) -> str:
    """The answer's text, whatever else the model made."""
    messages = (item["content"] for item in output if item["type"] == "message")
    return "".join(part.get("text", "") for content in messages for part in content).strip()


async def _asked(running: Running, documents: dict[str, SetDocument], chunks: int | None) -> Told:
    """`documents`: by their files' names."""
    told = Told()
    async with client_of(running) as (http, model):
        uploads = (Upload(name, one.text) for name, one in documents.items())
        search: dict[str, Any] = {
            "type": "file_search",
            "vector_store_ids": [await filled(http, uploads)],
        }
        if chunks:
            search["max_num_results"] = chunks
        for name, document in documents.items():
            for asked in document.questions:
                try:
                    reply = await _answer(http, model, asked.question, search)
                except (RuntimeError, aiohttp.ClientError, TimeoutError) as why:
                    print(f"{asked.question}: {why!r}", file=sys.stderr, flush=True)
                    told.fail(asked)
                else:
                    told.count(reply, asked, name)
    return told


async def _answer(
    http: aiohttp.ClientSession, model: str, question: str, search: dict[str, Any]
) -> Any:
    body = {
        "model": model,
        "input": question,
        "tools": [search],
        "include": ["file_search_call.results"],
        "max_output_tokens": LONGEST,
        "temperature": 0,
    }
    return await post(http, "responses", json=body)
