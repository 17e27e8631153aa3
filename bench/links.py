"""What it costs to move tokens from a worker to SSE clients, over links and over other transports.

    python -m bench.links                              # all variants, printed as a table
    python -m bench.links --variants services --ramp   # and the highest rate held

A fake worker emits one token per sequence and step; router, tokenizer, gateway and the clients are
a process each (bench/link_hops.py). The variants:

- services: the real router, tokenizer and gateway, which do all their work, over links;
- links, plain, serve: hops that only pass tokens on, over links, over a gRPC stream per request and
  hop, and over Ray Serve handles.

For each, over a window after a warm-up:

- latency: from the worker's step to the arrival of the token's SSE event at the client; on a noisy
  machine the p99 of the median second tells more than that of all;
- CPU: user and system seconds of each service per million tokens, from /proc;
- rate held: the highest of rising step rates at which at least 95 % of the tokens asked for arrive
  and p99 stays below 250 ms.

Requests are short (`--tokens`), and each is followed by the next, so that their opening and ending
is in the figures.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

SERVICES = ("router", "tokenizer", "gateway")
RAMP = (10, 25, 50, 75, 100, 150, 200, 250, 300, 400, 500, 600, 800)  # steps a second
RAMP_S = 4.0
HELD_SHARE = 0.95
HELD_P99_MS = 250.0
SETTLE_S = 1.0  # after a change of rate


@dataclass
class Window:
    """What was seen between two moments."""

    rate: float  # steps a second asked for
    start_ns: int
    end_ns: int
    cpu_s: dict[str, float]  # by service
    tokens: int = 0  # arrived
    p50_ms: float = math.nan
    p99_ms: float = math.nan
    p99_of_a_second_ms: float = math.nan  # the median over the seconds of the window

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / ((self.end_ns - self.start_ns) / 1e9)

    def cpu_per_million(self, service: str) -> float:
        return self.cpu_s[service] / self.tokens * 1e6 if self.tokens else math.nan

    @property
    def total_cpu_per_million(self) -> float:
        return sum(self.cpu_per_million(service) for service in self.cpu_s)

    def held(self, sequences: int) -> bool:
        asked = self.rate * sequences
        return self.tokens_per_s >= HELD_SHARE * asked and self.p99_ms < HELD_P99_MS


class Child:
    """A process of the measurement. Its first line of output says where it serves."""

    def __init__(
        self, stack: ExitStack, *arguments: str, variables: dict[str, str] | None = None
    ) -> None:
        command = [sys.executable, "-m", *arguments]
        pipe = subprocess.PIPE
        self.process = stack.enter_context(
            subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=variables)
        )
        stack.callback(self.stop)
        ready = json.loads(self._stdout().readline() or "null")
        if ready is None:
            raise RuntimeError(f"{' '.join(arguments)} did not start")
        self.address: str = ready["address"]
        self.pid: int = ready["pid"]
        self.pids: dict[str, int] = ready.get("pids", {})

    def _stdout(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def cpu_s(pid: int) -> float:
    """User and system time of a process so far, all its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Measured:
    """A running chain: rates are set, windows taken; the tokens are counted after it has ended."""

    def __init__(
        self, worker: Child, client: Child, pids: dict[str, int], windows: list[Window]
    ) -> None:
        self._worker = worker
        self._client = client
        self._pids = pids
        self.windows = windows

    def window(self, rate: float, seconds: float, settle_s: float = SETTLE_S) -> None:
        self._worker.tell(str(rate))
        time.sleep(settle_s)
        before = {name: cpu_s(pid) for name, pid in self._pids.items()}
        start = time.monotonic_ns()
        time.sleep(seconds)
        if self._client.process.poll() is not None:
            raise RuntimeError("the client ended early")
        used = {name: cpu_s(pid) - before[name] for name, pid in self._pids.items()}
        self.windows.append(Window(rate, start, time.monotonic_ns(), used))


def measure(
    variant: str, args: argparse.Namespace, drive: Callable[[Measured], None]
) -> list[Window]:
    """Starts a variant's processes, lets `drive` take windows, stops them, and counts."""
    windows: list[Window] = []
    with tempfile.TemporaryDirectory() as folder:
        left, arrived = Path(folder, "left.json"), Path(folder, "arrived.json")
        with ExitStack() as stack:
            chain = start_chain(stack, variant, Path(folder), left)
            client = Child(
                stack,
                *("bench.link_hops", "client", "--upstream", chain.address, "--out", str(arrived)),
                *("--sequences", str(args.sequences), "--tokens", str(args.tokens)),
                *chain.client_arguments,
            )
            drive(Measured(chain.worker, client, chain.pids, windows))
            client.stop()
        count(windows, json.loads(left.read_text()), json.loads(arrived.read_text()))
    return windows


@dataclass
class Chain:
    """A variant's running processes."""

    worker: Child  # the one that steps
    address: str  # the gateway's
    pids: dict[str, int]  # by service
    client_arguments: tuple[str, ...] = ()


def start_chain(stack: ExitStack, variant: str, folder: Path, left: Path) -> Chain:
    if variant == "serve":
        worker = Child(stack, "bench.link_serve", "--out", str(left))
        return Chain(worker, worker.address, {name: worker.pids[name] for name in SERVICES})
    if variant == "services":
        return start_services(stack, folder, left)
    hop = ("bench.link_hops", "--variant", variant)
    worker = Child(stack, *hop, "--out", str(left), "worker")
    address, pids = worker.address, {}
    for service in SERVICES:
        child = Child(stack, *hop, "--upstream", address, service)
        address, pids[service] = child.address, child.pid
    return Chain(worker, address, pids)


def start_services(stack: ExitStack, folder: Path, left: Path) -> Chain:
    from bench import link_services

    token_id = link_services.make_checkpoint(folder)
    variables = stack.enter_context(link_services.environment(folder))
    worker = Child(
        stack,
        *("bench.link_hops", "worker", "--variant", "services", "--out", str(left)),
        *("--token-ids", f"[{token_id}]"),
        variables=variables,
    )
    replicas = link_services.start(stack, variables)
    url, key = replicas["gateway"].facts["url"], link_services.make_key(variables)
    link_services.wait_until_answering(url, key)
    pids = {name: replicas[name].pid for name in SERVICES}
    fields = json.dumps(link_services.fields())
    said = ("--fields", fields, "--header", f"Authorization: Bearer {key}")
    return Chain(worker, url.removeprefix("http://"), pids, said)


def count(windows: list[Window], left: dict[str, list[int]], arrived: dict[str, list[int]]) -> None:
    """Fills in what the windows saw, from when each request's tokens left and arrived."""
    for window in windows:
        by_second: dict[int, list[float]] = defaultdict(list)
        for key, times in arrived.items():
            for left_ns, arrived_ns in zip(left.get(key, ()), times, strict=False):
                if window.start_ns <= arrived_ns < window.end_ns:
                    latency_ms = (arrived_ns - left_ns) / 1e6
                    by_second[(arrived_ns - window.start_ns) // 10**9].append(latency_ms)
        latencies_ms = [latency for second in by_second.values() for latency in second]
        window.tokens = len(latencies_ms)
        if latencies_ms:
            window.p50_ms = percentile(latencies_ms, 50)
            window.p99_ms = percentile(latencies_ms, 99)
            seconds = [percentile(second, 99) for second in by_second.values()]
            window.p99_of_a_second_ms = statistics.median(seconds)


def percentile(values: list[float], percent: float) -> float:
    """The smallest value that at least `percent` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def rate_held(windows: Iterable[Window], sequences: int) -> float:
    """Tokens a second of the last rate held before the first that was not; 0 when none was."""
    best = 0.0
    for window in windows:
        if not window.held(sequences):
            break
        best = window.tokens_per_s
    return best


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--variants", default="services,links,plain,serve", help="comma-separated")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--rate", type=float, default=100.0, help="steps a second")
    parser.add_argument("--tokens", type=int, default=256, help="of each request")
    parser.add_argument("--seconds", type=float, default=20.0, help="measured, per variant")
    parser.add_argument("--ramp", action="store_true", help="then look for the highest rate held")
    parser.add_argument("--json", default="", help="write the figures to this file, too")


def main(args: argparse.Namespace) -> None:
    results: dict[str, list[Window]] = {}

    def steady(measured: Measured) -> None:
        measured.window(args.rate, args.seconds, settle_s=3.0)

    def ramp(measured: Measured) -> None:
        for rate in RAMP:
            measured.window(rate, RAMP_S)

    for variant in args.variants.split(","):
        print(f"measuring {variant} …", file=sys.stderr, flush=True)
        results[variant] = measure(variant, args, steady)
        if args.ramp:  # on a fresh chain: no backlog of the other
            results[variant] += measure(variant, args, ramp)
    print(table(results, args))
    if args.json:
        figures = {name: [asdict(w) for w in windows] for name, windows in results.items()}
        Path(args.json).write_text(json.dumps(figures, indent=1))


def table(results: dict[str, list[Window]], args: argparse.Namespace) -> str:
    lines = [
        f"{args.sequences} sequences x {args.rate:g} steps/s for {args.seconds:g} s, requests of "
        f"{args.tokens} tokens; {os.cpu_count()} CPUs, Python {platform.python_version()}; "
        "CPU in seconds per million tokens",
        "",
        "| variant | tokens/s | p50 ms | p99 ms | p99 of a median second | router | tokenizer "
        "| gateway | all three | rate held, tokens/s |",
        "| --- |" + " ---: |" * 9,
    ]
    for name, (window, *ramp) in results.items():
        cpu = " | ".join(f"{window.cpu_per_million(service):.0f}" for service in SERVICES)
        held = f"{rate_held(ramp, args.sequences):,.0f}" if ramp else "-"
        lines.append(
            f"| {name} | {window.tokens_per_s:,.0f} | {window.p50_ms:.1f} | {window.p99_ms:.1f} "
            f"| {window.p99_of_a_second_ms:.1f} | {cpu} | {window.total_cpu_per_million:.0f} | {held} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_arguments(parser)
    main(parser.parse_args())
