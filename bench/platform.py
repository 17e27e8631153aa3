"""What the way through the platform costs: a workload through gateway, tokenizer, router and
worker, against the same engine in-process, in turn.

    python -m bench.platform [--model DIR] [--workload w1 | --streams 1 8 32] [--repetitions 3]

Starts `penstock up` with a data directory and one worker of its own and sends the workload's token
ids to /v1/completions, all streams at once, from a client on the same cores: what that takes counts
as the platform's loss. The engine in-process stands still meanwhile. Tells the processor time of
each of the platform's processes, too.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from bench import workload
from bench.openai_stream import Outcome, perform
from bench.peers import workloads
from bench.peers.comparison import OURS, Comparison, Repetition, turns
from bench.peers.contestant import Contestant
from bench.peers.drivers.line import Answer
from bench.peers.workloads import Asked
from bench.result_file import checkpoint_folder, result_file
from services.cli.running import Running, find_running
from services.common.config import Settings

ROOT = Path(__file__).resolve().parents[1]
THREADS = len(os.sched_getaffinity(0))
PLATFORM = "platform"
START_S, LIMIT_S = 240.0, 600.0
MOST = 8
"""Processes whose time is told."""
STREAM_PROMPT, STREAM_OUTPUT = 64, 256
SAME = {"KV_CACHE_BYTES": str(2**31), "MAX_RUNNING": "32", "THREADS": str(THREADS)}
"""Of the worker, as bench/peers/drivers/run_penstock.py has them."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", type=checkpoint_folder, default=ROOT / "models" / "demo")
    add("--workload", choices=workloads.WORKLOADS, help="default: streams")
    add("--streams", type=int, nargs="+", default=[1, 8, 32], help="of 64 tokens, 256 generated")
    add("--repetitions", type=int, default=3)
    guesses = "who guesses tokens ahead, on both sides; default: as workers on a CPU do"
    add("--speculation", choices=["off", "ngram"], default="ngram", help=guesses)
    add("--json", type=result_file, help="where every repetition's figures go")
    given = parser.parse_args()
    if given.workload:
        asked = {given.workload: workloads.make(given.workload)}
    else:
        asked = {f"{count} streams": _streams(count) for count in given.streams}
    vocabulary = json.loads((given.model / "config.json").read_text())["vocab_size"]
    with (
        tempfile.TemporaryDirectory() as folder,
        _both(given.model, Path(folder), given.speculation) as both,
    ):
        found = list(_measure(asked, given.repetitions, vocabulary, *both))
    if given.json:
        given.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    print(*_table(found, list(asked)), sep="\n")
    return 0


def _streams(count: int) -> list[Asked]:
    """So many requests of one size."""
    ids = [token for asked in workloads.make("w1") for token in asked.prompt]
    starts = range(0, count * STREAM_PROMPT, STREAM_PROMPT)
    return [Asked(ids[start : start + STREAM_PROMPT], STREAM_OUTPUT) for start in starts]


@contextmanager
def _both(model: Path, folder: Path, speculation: str) -> Iterator[tuple[Contestant, Running]]:
    """The engine in-process, stopped, and a running platform."""
    driver = [sys.executable, "-m", "bench.peers.drivers.run_penstock", str(model), str(THREADS)]
    driver += [str(folder / "data" / "packed"), speculation]
    environment = {"PYTHONPATH": str(ROOT)}
    ours = Contestant(OURS, driver, folder / "engine.log", environment)
    with platform_up(model, folder, speculation) as running:
        try:
            ours.start()
            ours.freeze()
            yield ours, running
        finally:
            ours.stop()


@contextmanager
def platform_up(model: Path, folder: Path, speculation: str) -> Iterator[Running]:
    """`penstock up`, ended as Ctrl-C ends it."""
    data = folder / "data"
    environment = {f"PENSTOCK_WORKER__{name}": value for name, value in SAME.items()}
    environment["PENSTOCK_WORKER__SPECULATION"] = speculation
    environment |= {"PENSTOCK_DATA_DIR": str(data), "PENSTOCK_GATEWAY__GRPC_PORT": "0"}
    command = [sys.executable, "-m", "services.cli", "up", "--port", "0", "--model", str(model)]
    # One engine, which does prompts and decodes, as the one in-process.
    command += ["--prefill", "0", "--decode", "1"]
    log = folder / "up.log"
    with log.open("wb") as output:
        up = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | environment
        )
    try:
        deadline = time.monotonic() + START_S
        while b"Penstock is up." not in log.read_bytes():
            if up.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"penstock up: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        running = find_running(Settings(data_dir=data))
        assert running is not None
        yield running
    finally:
        up.send_signal(signal.SIGINT)
        up.wait()


def _measure(
    asked: dict[str, list[Asked]],
    repetitions: int,
    vocabulary: int,
    ours: Contestant,
    running: Running,
) -> Iterator[Repetition]:
    path = ours.log.with_name("requests.jsonl")
    for name, requests in asked.items():
        # The first of each warms both up and is not counted.
        for turn, who in turns([OURS, PLATFORM], repetitions + 1):
            workloads.write(workloads.turned(requests, turn, vocabulary), path)
            if who == OURS:
                ours.thaw()
                answer = ours.run(path)
                ours.freeze()
            else:
                before = cpu_s(running)
                answer = asyncio.run(_replay(running, workload.load(path)))
                used = {
                    process: s - before.get(process, 0) for process, s in cpu_s(running).items()
                }
            found = Repetition.of(who, "", name, answer, 0.0)
            print(f"{name} {who}: {found.output_tok_per_s:.0f} tok/s", file=sys.stderr, flush=True)
            if who == PLATFORM:
                most = sorted(used.items(), key=lambda item: -item[1])[:MOST]
                told = ", ".join(f"{words} {seconds:.2f}" for (_, words), seconds in most)
                print(f"  processor seconds: {told}", file=sys.stderr, flush=True)
            if turn:
                yield found


def cpu_s(running: Running) -> dict[tuple[int, str], float]:
    """Processor seconds of the client and of each of the platform's processes, so far."""
    found = {(os.getpid(), "client"): sum(os.times()[:2])}
    up = psutil.Process(running.pid)
    for process in [up, *up.children(recursive=True)]:
        with suppress(psutil.Error):
            times, words = process.cpu_times(), " ".join(process.cmdline()).strip()
            found[process.pid, words[-40:]] = times.user + times.system
    return found


@asynccontextmanager
async def client_of(running: Running) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """One without a bound on connections, and the name of the first model that is served."""
    async with aiohttp.ClientSession(
        base_url=running.url + "/v1/",
        headers={"Authorization": f"Bearer {running.key}"},
        connector=aiohttp.TCPConnector(limit=0),
    ) as http:
        async with http.get("models") as listed:
            model = (await listed.json())["data"][0]["id"]
        yield http, model


async def _replay(running: Running, requests: list[workload.WorkloadRequest]) -> Answer:
    """All requests at once, over HTTP. Raises RuntimeError where one failed or came short."""
    async with client_of(running) as (http, model):
        start = time.perf_counter()
        sent = (perform(http, request, model, start, LIMIT_S) for request in requests)
        outcomes = await asyncio.gather(*sent)
    return _answer(requests, outcomes, time.perf_counter() - start)


def _answer(
    requests: list[workload.WorkloadRequest], outcomes: list[Outcome], wall_s: float
) -> Answer:
    for request, outcome in zip(requests, outcomes, strict=True):
        if outcome.error or outcome.completion_tokens != request.max_tokens:
            came = f"{outcome.completion_tokens} of {request.max_tokens} tokens came"
            raise RuntimeError(f"request {request.id}: {outcome.error or came}")
    return {"wall_s": wall_s, "requests": [_times(outcome) for outcome in outcomes]}


def _times(outcome: Outcome) -> dict[str, Any]:
    """A token without a piece of its own, as within a character, came with the next one."""
    pieces = outcome.itl_s
    missing = outcome.completion_tokens - 1 - len(pieces)
    return {"ttft_s": outcome.ttft_s, "itl_s": [*pieces, *[0.0] * missing]}


def _table(found: list[Repetition], names: list[str]) -> Iterator[str]:
    yield "| | in-process tok/s | through the platform | share |"
    yield "| --- | ---: | ---: | ---: |"
    comparison = Comparison(found)
    for name in names:
        ours, through = (
            comparison.median(who, "", name, "output_tok_per_s") or 0.0 for who in (OURS, PLATFORM)
        )
        yield f"| {name} | {ours:.0f} | {through:.0f} | {through / ours:.1%} |"


if __name__ == "__main__":
    sys.exit(main())
