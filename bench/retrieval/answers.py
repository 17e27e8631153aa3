"""How often a model answers right, the whole way of a user's questions.

Starts `penstock up` with a data directory and one worker of its own, makes a store of a set's
documents, a file each, and asks all its questions. An answer counts that has the right words and
the number of a passage of that document that holds them; a question that no document answers asks
for `The documents do not say.`, as the demonstration model has it.
"""

import argparse
import asyncio
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp

from bench.platform import ROOT, client_of, platform_up
from bench.result_file import checkpoint_folder
from bench.retrieval.sets import holds
from bench.retrieval.stores import Upload, filled, post
from models.recipe.ordinary import LONGEST, Score, answers_of, documents_of
from services.cli.running import Running

SETS = ROOT / "models" / "recipe"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=checkpoint_folder, default=ROOT / "models" / "demo")
    add(
        "--set",
        type=Path,
        default=SETS / "ordinary.jsonl",
        help="JSON lines, as in ordinary.py; each title once",
    )
    add("--chunks", type=int, help="of a search (max_num_results); default: the platform's")


def run(given: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    documents = documents_of(given.set)
    with (
        tempfile.TemporaryDirectory() as folder,
        platform_up(given.model, Path(folder), "ngram") as running,
    ):
        score, tokens = asyncio.run(_asked(running, documents, given.chunks))
    questions = score.told + score.untold
    mean = tokens // max(1, questions)
    table = [
        f"{questions} questions on {len(documents)} documents, prompts of {mean} tokens (mean)",
        *score.lines(),
    ]
    return {**asdict(score), "prompt_tokens": tokens}, table


async def _asked(
    running: Running, documents: list[dict[str, Any]], chunks: int | None
) -> tuple[Score, int]:
    """The score, and all prompts' tokens."""
    score, tokens = Score(), 0
    names = [f"{one['title'].replace('/', '-')}.txt" for one in documents]
    async with client_of(running) as (http, model):
        uploads = (Upload(name, one["text"]) for name, one in zip(names, documents, strict=True))
        search: dict[str, Any] = {
            "type": "file_search",
            "vector_store_ids": [await filled(http, uploads)],
        }
        if chunks:
            search["max_num_results"] = chunks
        for name, document in zip(names, documents, strict=True):
            for asked in document["questions"]:
                told = await _answer(http, model, asked["question"], search)
                answers, tokens = answers_of(asked), tokens + told["usage"]["input_tokens"]
                found, message = told["output"]
                numbers = {
                    number
                    for number, one in enumerate(found["results"], 1)
                    if one["filename"] == name and holds(one["text"], tuple(answers))
                }
                said = message["content"][0]["text"].strip()
                score.count(said, answers, numbers, told["status"] == "completed")
    return score, tokens


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
