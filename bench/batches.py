"""What a batch costs those who wait: times to the first token of interactive requests with a batch
running and without, in turns, in one run.

    python -m bench.batches [--model DIR] [--requests 25] [--turns 4] [--gap 0.5]

Starts `penstock up` with a data directory and one worker of its own. Interactive requests of a
prompt of their own each come at random (exponential gaps, the same in each turn); in every second
turn a batch is under way that is larger than the turn is long, which is cancelled at its end. The
first turn of each kind warms up and is not counted.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from bench.openai_stream import Outcome, perform
from bench.platform import ROOT, client_of, platform_up
from bench.result_file import checkpoint_folder, result_file
from bench.workload import WorkloadRequest
from services.cli.running import Running

LIMIT_S = 300.0
PROMPT, OUTPUT = 256, 24  # tokens of an interactive request
LINES, LINE_PROMPT, LINE_OUTPUT = 2000, 64, 96
_LOOK_S = 0.2
_ENDED = ("completed", "failed", "expired", "cancelled")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", type=checkpoint_folder, default=ROOT / "models" / "demo")
    add("--requests", type=int, default=25, help="interactive ones in a turn")
    add("--turns", type=int, default=4, help="of each kind, that count")
    add("--gap", type=float, default=0.5, help="seconds between two, on average")
    add("--json", type=result_file, help="where all figures go")
    given = parser.parse_args()
    vocabulary = json.loads((given.model / "config.json").read_text())["vocab_size"]
    with (
        tempfile.TemporaryDirectory() as folder,
        platform_up(given.model, Path(folder), "ngram") as running,
    ):
        found = asyncio.run(_measure(running, given, vocabulary))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    print(*_table(found), sep="\n")
    return 0


async def _measure(
    running: Running, given: argparse.Namespace, vocabulary: int
) -> list[dict[str, Any]]:
    found = []
    random_ids = random.Random(7)
    async with client_of(running) as (http, model):
        for turn in range(given.turns + 1):
            for batch in (False, True):
                told: dict[str, Any] = {"turn": turn, "batch": batch}
                id = await _begin(http, model, random_ids, vocabulary) if batch else ""
                requests = _interactive(given, random_ids, vocabulary)
                began = time.perf_counter()
                outcomes = await _ask(http, model, requests, began)
                told["seconds"] = time.perf_counter() - began
                if batch:
                    told["lines"] = await _end(http, id)
                told["ttft_s"] = [one.ttft_s for one in outcomes]
                found.append(told)
                p95 = np.percentile(told["ttft_s"], 95)
                print(
                    f"turn {turn} {'with' if batch else 'without'}: p95 {p95 * 1e3:.0f} ms, "
                    f"{told.get('lines', 0)} lines in {told['seconds']:.0f} s",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
    return found


def _interactive(
    given: argparse.Namespace, ids: random.Random, vocabulary: int
) -> list[WorkloadRequest]:
    gaps, at = random.Random(1), 0.0
    requests = []
    for number in range(given.requests):
        at += gaps.expovariate(1 / given.gap)
        prompt = [ids.randrange(10, vocabulary) for _ in range(PROMPT)]
        requests.append(
            WorkloadRequest(
                id=str(number), arrival_s=at, prompt_token_ids=prompt, prompt=None, messages=None,
                max_tokens=OUTPUT, ignore_eos=True, temperature=0.0, seed=None,
            )
        )  # fmt: skip
    return requests


async def _ask(
    http: aiohttp.ClientSession, model: str, requests: list[WorkloadRequest], began: float
) -> list[Outcome]:
    """Each when it comes. Raises RuntimeError where one failed."""

    async def one(request: WorkloadRequest) -> Outcome:
        await asyncio.sleep(began + request.arrival_s - time.perf_counter())
        outcome = await perform(http, request, model, began, LIMIT_S)
        if outcome.error or outcome.ttft_s is None:
            raise RuntimeError(f"request {request.id}: {outcome.error}")
        return outcome

    return await asyncio.gather(*map(one, requests))


async def _begin(
    http: aiohttp.ClientSession, model: str, ids: random.Random, vocabulary: int
) -> str:
    """A batch, of which some lines have been answered."""
    lines = []
    for number in range(LINES):
        prompt = [ids.randrange(10, vocabulary) for _ in range(LINE_PROMPT)]
        body = {"model": model, "prompt": prompt, "max_tokens": LINE_OUTPUT, "ignore_eos": True}
        line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        lines.append(json.dumps(line))
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", "\n".join(lines), filename="batch.jsonl")
    async with http.post("files", data=form) as answer:
        file = (await answer.json())["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    async with http.post("batches", json=asked) as answer:
        id = str((await answer.json())["id"])
    await _until(http, id, lambda batch: batch["request_counts"]["completed"] >= 4)
    return id


async def _end(http: aiohttp.ClientSession, id: str) -> int:
    """How many lines were answered by the turn's end."""
    batch = await _batch(http, id)
    if batch["status"] != "in_progress":
        raise RuntimeError(f"the batch did not last: {batch['status']}, {batch['errors']}")
    async with http.post(f"batches/{id}/cancel"):
        pass
    told = await _until(http, id, lambda batch: batch["status"] in _ENDED)
    for file in (told["input_file_id"], told["output_file_id"], told["error_file_id"]):
        async with http.delete(f"files/{file}"):
            pass
    return int(batch["request_counts"]["completed"])


async def _until(
    http: aiohttp.ClientSession, id: str, holds: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    while True:
        batch = await _batch(http, id)
        if holds(batch):
            return batch
        await asyncio.sleep(_LOOK_S)


async def _batch(http: aiohttp.ClientSession, id: str) -> dict[str, Any]:
    async with http.get(f"batches/{id}") as answer:
        found: dict[str, Any] = await answer.json()
        return found


def _table(found: list[dict[str, Any]]) -> list[str]:
    times = {
        batch: [
            s for told in found if told["turn"] and told["batch"] is batch for s in told["ttft_s"]
        ]
        for batch in (False, True)
    }
    rows = [
        "| to the first token, ms | without | with a batch | ratio |",
        "| --- | ---: | ---: | ---: |",
    ]
    for percent in (50, 95):
        alone, beside = (float(np.percentile(times[batch], percent)) for batch in (False, True))
        rows.append(
            f"| p{percent} | {alone * 1e3:.0f} | {beside * 1e3:.0f} | {beside / alone:.2f} |"
        )
    with_batch = [told for told in found if told["turn"] and told["batch"]]
    rate = sum(told["lines"] for told in with_batch) / sum(told["seconds"] for told in with_batch)
    return [*rows, "", f"{len(times[True])} requests each; {rate:.2f} lines/s beside them"]


if __name__ == "__main__":
    sys.exit(main())
