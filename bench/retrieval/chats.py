"""What a store adds to the time until a chat's answer begins.

Starts `penstock up` with a data directory and one worker of its own, and asks each question twice,
with a store to search, and then with the passages that a search finds given by the client. So both
prompts are alike, and the difference is the search's. No chat's search was made before.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from bench.platform import ROOT, client_of, platform_up
from bench.result_file import checkpoint_folder
from bench.retrieval.made import made
from bench.retrieval.sets import Document
from services.cli.running import Running

WITH, WITHOUT = "with a store", "passages given"
_LOOK_S = 0.2
_OUTPUT = 8  # tokens of an answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=checkpoint_folder, default=ROOT / "models" / "demo")
    add("--questions", type=int, default=60)
    add("--documents", type=int, default=60, help="in the store")


def run(given: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    with (
        tempfile.TemporaryDirectory() as folder,
        platform_up(given.model, Path(folder), "ngram") as running,
    ):
        found = asyncio.run(_measure(running, given))
    return found, _table(found)


async def _measure(running: Running, given: argparse.Namespace) -> dict[str, list[float]]:
    """Times to the first token, in seconds; the first question of each kind is not counted."""
    asked = made()
    documents = asked.documents[: given.documents]
    held = {one.id for one in documents}
    questions = [one.text for one in asked.questions if one.document in held]
    found: dict[str, list[float]] = {WITH: [], WITHOUT: []}
    async with client_of(running) as (http, model):
        store = await _store(http, documents)
        for number, question in enumerate(questions[: given.questions + 1]):
            tool = {"type": "file_search", "vector_store_ids": [store]}
            # Of two prompts with one beginning the second would find its KV: each has its own.
            searched = await _ttft(http, model, f"A{number}.", question, {"tools": [tool]})
            passages = await _search(http, store, question)
            brought = await _ttft(http, model, f"B{number}.", question, {"documents": passages})
            if number:
                found[WITH].append(searched)
                found[WITHOUT].append(brought)
    return found


async def _store(http: aiohttp.ClientSession, documents: Sequence[Document]) -> str:
    ids = []
    for one in documents:
        form = aiohttp.FormData({"purpose": "assistants"})
        form.add_field("file", f"# {one.title}\n\n{one.text}", filename=f"{one.id}.md")
        ids.append((await _post(http, "files", data=form))["id"])
    store = (await _post(http, "vector_stores", json={"name": "bench", "file_ids": ids}))["id"]
    while True:
        async with http.get(f"vector_stores/{store}") as answer:
            counts = (await answer.json())["file_counts"]
        if counts["failed"]:
            raise RuntimeError(f"files were not indexed: {counts}")
        if counts["completed"] == len(ids):
            return str(store)
        await asyncio.sleep(_LOOK_S)


async def _search(http: aiohttp.ClientSession, store: str, question: str) -> list[dict[str, Any]]:
    body = {"query": question, "max_num_results": 4}
    found = await _post(http, f"vector_stores/{store}/search", json=body)
    return [{"title": one["title"], "text": one["content"][0]["text"]} for one in found["data"]]


async def _post(http: aiohttp.ClientSession, path: str, **sent: Any) -> Any:
    async with http.post(path, **sent) as answer:
        told = await answer.json()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {told}")
        return told


async def _ttft(
    http: aiohttp.ClientSession, model: str, system: str, question: str, extra: dict[str, Any]
) -> float:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"model": model, "messages": messages, "max_tokens": _OUTPUT, "stream": True, **extra}
    began, first = time.perf_counter(), 0.0
    async with http.post("chat/completions", json=body) as answer:
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            choices = json.loads(line.removeprefix(b"data: ")).get("choices") or []
            if not first and any(one["delta"].get("content") for one in choices):
                first = time.perf_counter() - began
    if not first:
        raise RuntimeError(f"no answer to {question!r}: {answer.status}")
    return first


def _table(found: dict[str, list[float]]) -> list[str]:
    rows = [
        f"| to the first token, ms | {WITH} | {WITHOUT} | added |",
        "| --- " + "| ---: " * 3 + "|",
    ]
    for percent in (50, 90):
        its, given = (float(np.percentile(found[kind], percent)) for kind in (WITH, WITHOUT))
        rows.append(
            f"| p{percent} | {its * 1e3:.0f} | {given * 1e3:.0f} | {(its - given) * 1e3:.0f} |"
        )
    pairs = np.subtract(found[WITH], found[WITHOUT]) * 1e3
    return [
        *rows,
        "",
        f"{len(pairs)} questions; of the pairs' differences the median is "
        f"{np.median(pairs):.0f} ms",
    ]
