"""What a store adds to the time until a chat's answer begins.

Starts `penstock up` with a data directory and one worker of its own, and asks each question twice,
with a store to search, and then with the passages that a search finds given by the client. So both
prompts are alike, and the difference is the search's. No chat's search was made before.

Tells what each of the search's stages took, by the records of requests, and the processor time that
each of the platform's processes spent on either kind of chat: on a busy machine that holds, where
times by the wall do not.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from bench.platform import MOST, ROOT, client_of, cpu_s, platform_up
from bench.result_file import checkpoint_folder
from bench.retrieval.made import made
from bench.retrieval.stores import Upload, filled, post
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
    return {kind: vars(one) for kind, one in found.items()}, [*_table(found)]


@dataclass
class Measured:
    first_s: list[float] = field(default_factory=list)  # to the first token
    stages_ms: dict[str, list[float]] = field(default_factory=dict)  # "service name", of each chat
    cpu_s: Counter[str] = field(default_factory=Counter)  # by process, of all

    def take(self, first_s: float, stages: Mapping[str, float], cpu: Mapping[str, float]) -> None:
        self.first_s.append(first_s)
        for name, took_ms in stages.items():
            self.stages_ms.setdefault(name, []).append(took_ms)
        self.cpu_s.update(cpu)


async def _measure(running: Running, given: argparse.Namespace) -> dict[str, Measured]:
    """The first question of each kind is not counted."""
    asked = made()
    documents = asked.documents[: given.documents]
    held = {one.id for one in documents}
    questions = [one.text for one in asked.questions if one.document in held]
    found = {WITH: Measured(), WITHOUT: Measured()}
    async with client_of(running) as (http, model):
        uploads = (Upload(f"{one.id}.md", f"# {one.title}\n\n{one.text}") for one in documents)
        store = await filled(http, uploads)
        for number, question in enumerate(questions[: given.questions + 1]):
            tool = {"type": "file_search", "vector_store_ids": [store]}
            # Of two prompts with one beginning the second would find its KV: each has its own.
            measured = await _chat(running, http, model, f"A{number}.", question, {"tools": [tool]})
            passages = {"documents": await _search(http, store, question)}
            beside = await _chat(running, http, model, f"B{number}.", question, passages)
            if number:
                found[WITH].take(*measured)
                found[WITHOUT].take(*beside)
    return found


async def _chat(
    running: Running, http: aiohttp.ClientSession, *asked: Any
) -> tuple[float, dict[str, float], Counter[str]]:
    before = _by_process(running)
    first_s, id = await _ttft(http, *asked)
    spent = _by_process(running)
    spent.subtract(before)
    return first_s, await _stages(http, id), spent


def _by_process(running: Running) -> Counter[str]:
    return Counter({name: spent for (_, name), spent in cpu_s(running).items()})


async def _stages(http: aiohttp.ClientSession, id: str) -> dict[str, float]:
    """Milliseconds by the wall, of the search and of what it is made of."""
    while True:  # it is kept a moment after the answer's end
        async with http.get(f"requests/{id}") as answer:
            told = await answer.json()
        if answer.status == 200:
            break
        await asyncio.sleep(_LOOK_S)
    return {
        f"{one['service']} {one['name']}": one["duration_ms"]
        for one in told["spans"]
        if one["service"] == "retrieval" or one["name"] == "retrieve"
    }


async def _search(http: aiohttp.ClientSession, store: str, question: str) -> list[dict[str, Any]]:
    body = {"query": question, "max_num_results": 4}
    found = await post(http, f"vector_stores/{store}/search", json=body)
    return [{"title": one["title"], "text": one["content"][0]["text"]} for one in found["data"]]


async def _ttft(
    http: aiohttp.ClientSession, model: str, system: str, question: str, extra: dict[str, Any]
) -> tuple[float, str]:
    """Seconds, and the request's id."""
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
    return first, answer.headers["x-request-id"]


def _table(found: Mapping[str, Measured]) -> Iterator[str]:
    searched, brought = found[WITH], found[WITHOUT]
    chats = len(searched.first_s)
    yield f"| to the first token, ms | {WITH} | {WITHOUT} | added |"
    yield "| --- " + "| ---: " * 3 + "|"
    for percent in (50, 90):
        its, given = (float(np.percentile(one.first_s, percent)) for one in (searched, brought))
        yield f"| p{percent} | {its * 1e3:.0f} | {given * 1e3:.0f} | {(its - given) * 1e3:.0f} |"
    pairs = np.subtract(searched.first_s, brought.first_s) * 1e3
    yield ""
    yield f"{chats} questions; of the pairs' differences the median is {np.median(pairs):.0f} ms"
    yield ""
    yield "| stage of the search | ms, p50 | p90 |"
    yield "| --- | ---: | ---: |"
    for name, took in searched.stages_ms.items():
        yield f"| {name} | {np.percentile(took, 50):.1f} | {np.percentile(took, 90):.1f} |"
    yield ""
    yield f"| CPU of a chat, ms | {WITH} | {WITHOUT} |"
    yield "| --- | ---: | ---: |"
    for name, spent in searched.cpu_s.most_common(MOST):
        yield f"| {name} | {spent / chats * 1e3:.1f} | {brought.cpu_s[name] / chats * 1e3:.1f} |"
    its, given = (sum(one.cpu_s.values()) / chats * 1e3 for one in (searched, brought))
    yield f"| all | {its:.1f} | {given:.1f} |"
