"""`penstock bench serve`: a workload through the front door of a running server.

    penstock bench serve --url http://127.0.0.1:8000 --workload W.jsonl --json OUT.json --key K

Speaks the OpenAI streaming API, so peers can be measured by the same client. A request is sent at
its `arrival_s`, or as soon as `--concurrency` lets it (`send_delay_s` tells by how much later).
Prompts of text or token ids go to /v1/completions, messages to /v1/chat/completions.

OUT holds {"run": …, "totals": …, "requests": […]}; latencies count from when the request was sent.
ITL is the time between two pieces of text as they arrive; a piece may hold several tokens, so TPOT
((end - first piece) / (tokens - 1)) stands beside it.

Exit code: 0, 1 when a request failed, 2 when nothing could be run.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import aiohttp

from bench.openai_stream import Outcome, perform
from bench.serve_arguments import add_arguments
from bench.totals import Slo, totals
from bench.workload import WorkloadRequest, load
from services.cli.client import trusting
from services.cli.running import find_running
from services.common.config import Settings

_LAG_TICK_S = 0.02


class SetupError(Exception):
    """The run cannot begin; the message says why."""


def main(args: argparse.Namespace) -> int:
    slo = Slo(args.slo_ttft_ms, args.slo_tpot_ms, args.slo_e2e_ms)
    try:
        workload = load(args.workload)
        report = asyncio.run(_run(args, workload, slo))
    except (SetupError, OSError, ValueError) as error:
        print(f"bench serve: {error}", file=sys.stderr)
        return 2
    args.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print(summary(report["totals"]))
    print(f"results: {args.json}")
    return 1 if report["totals"]["failed"] else 0


async def _run(
    args: argparse.Namespace, workload: list[WorkloadRequest], slo: Slo
) -> dict[str, Any]:
    key = args.key or os.environ.get("PENSTOCK_API_KEY") or _local_key(args.url)
    async with aiohttp.ClientSession(
        base_url=_base(args.url),
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
        connector=aiohttp.TCPConnector(limit=0, ssl=trusting(args.ca) if args.ca else True),
    ) as http:
        model = args.model or await _first_model(http)
        began_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        outcomes, lag_s = await _replay(http, workload, model, args.concurrency, args.timeout_s)
    run = {
        "url": args.url,
        "model": model,
        "workload": args.workload.name,
        "concurrency": args.concurrency,
        "began_at": began_at,
    }
    requests = [asdict(o) | {"tpot_s": o.tpot_s} for o in outcomes]
    return {"run": run, "totals": totals(outcomes, slo, lag_s), "requests": requests}


def _local_key(url: str) -> str:
    """Of the Penstock that runs with this data directory, if `url` is its own: a key is told to
    nobody else."""
    running = find_running(Settings())
    same = running is not None and _base(running.url) == _base(url)
    return running.key if running is not None and same else ""


async def _first_model(http: aiohttp.ClientSession) -> str:
    """Also the proof that the server is there and takes the key."""
    try:
        async with asyncio.timeout(10.0), http.get("models") as answer:
            if answer.status != 200:
                raise SetupError(f"{answer.url} answers {answer.status}")
            return str((await answer.json(content_type=None))["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError) as error:
        raise SetupError(f"the server cannot be reached: {error or 'no answer'}") from None
    except (ValueError, LookupError, TypeError):
        raise SetupError("the server lists no models; name one with --model") from None


async def _replay(
    http: aiohttp.ClientSession,
    workload: list[WorkloadRequest],
    model: str,
    concurrency: int | None,
    timeout_s: float,
) -> tuple[list[Outcome], list[float]]:
    """The outcomes in the order of arrival, and the lags of the client's own event loop."""
    slots = asyncio.Semaphore(concurrency or len(workload))
    progress = _Progress(len(workload))
    start = time.perf_counter()

    async def one(request: WorkloadRequest) -> Outcome:
        await asyncio.sleep(max(0.0, request.arrival_s - (time.perf_counter() - start)))
        async with slots:
            progress.sent += 1
            outcome = await perform(http, request, model, start, timeout_s)
        progress.ended(outcome)
        return outcome

    lag_s: list[float] = []
    watch = asyncio.create_task(_watch(progress, lag_s))
    try:
        return await asyncio.gather(*map(one, workload)), lag_s
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        progress.show(last=True)


class _Progress:
    """A line on standard error: rewritten on a terminal, every five seconds otherwise."""

    def __init__(self, requests: int) -> None:
        self._requests = requests
        self._tty = sys.stderr.isatty()
        self._period_s = 0.5 if self._tty else 5.0
        self._shown = self._start = time.monotonic()
        self.sent = self._done = self._failed = self._tokens = 0

    def ended(self, outcome: Outcome) -> None:
        self._done += 1
        self._failed += outcome.error is not None
        self._tokens += outcome.completion_tokens

    def show(self, last: bool = False) -> None:
        now = time.monotonic()
        if not last and now - self._shown < self._period_s:
            return
        self._shown = now
        line = (
            f"{self._done}/{self._requests} done, {self.sent - self._done} running, "
            f"{self._failed} failed, {self._tokens} tokens, {now - self._start:.0f} s"
        )
        end = "\n" if last or not self._tty else ""
        print(f"\r{line:<78}" if self._tty else line, file=sys.stderr, end=end, flush=True)


async def _watch(progress: _Progress, lag_s: list[float]) -> None:
    """Shows progress, and measures how late this loop wakes: a slow client, not a slow server."""
    while True:
        due = time.perf_counter() + _LAG_TICK_S
        await asyncio.sleep(_LAG_TICK_S)
        lag_s.append(max(0.0, time.perf_counter() - due))
        progress.show()


def summary(figures: dict[str, Any]) -> str:
    """The totals as a table for people."""
    lines = [
        f"requests      {figures['requests']}, {figures['failed']} failed, "
        f"in {figures['wall_s']:.1f} s ({figures['requests_per_s']:.2f}/s)",
        f"tokens        {figures['prompt_tokens']} in ({figures['cached_tokens']} cached), "
        f"{figures['output_tokens']} out ({figures['output_tok_per_s']:.1f}/s)",
    ]
    if "goodput_share" in figures:
        lines.append(
            f"goodput       {figures['goodput_requests_per_s']:.2f} requests/s, "
            f"{figures['goodput_share']:.1%} within the objectives"
        )
    columns: Sequence[str] = ("mean", "p50", "p90", "p95", "p99", "max")
    lines += ["", "ms".ljust(14) + "".join(column.rjust(10) for column in columns)]
    for name in ("ttft", "itl", "tpot", "e2e", "send_delay", "client_lag"):
        if spread := figures[f"{name}_s"]:
            lines.append(name.ljust(14) + "".join(f"{spread[c] * 1000:10.1f}" for c in columns))
    lines += [f"failed {count}×: {error}" for error, count in figures["errors"].items()]
    return "\n".join(lines)


def _base(url: str) -> str:
    trimmed = url.rstrip("/")
    return (trimmed if trimmed.endswith("/v1") else f"{trimmed}/v1") + "/"


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(prog="penstock bench serve")
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
