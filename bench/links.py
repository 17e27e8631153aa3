"""What it costs to move tokens from a worker to SSE clients, over links and over other transports.

    python -m bench.links                           # all variants, printed as a table
    python -m bench.links --variants links --ramp   # and the highest rate held

A fake worker emits one token per sequence and step; router, tokenizer, gateway and the clients are
a process each (bench/link_hops.py), which only pass tokens on: over links, over a gRPC stream per
request and hop (plain), and over Ray Serve handles (serve). What the real services cost is
bench/front_door's to tell.

For each, over a window after a warm-up:

- latency: from the worker's step to the arrival of the token's SSE event at the client; on a noisy
  machine the p99 of the median second tells more than that of all;
- CPU: user and system seconds of each service per million tokens, from /proc;
- rate held: the highest of rising step rates at which at least 95 % of the tokens asked for arrive,
  with a p99 (of the median second) below 250 ms.

Requests are short (`--tokens` on average), and each is followed by the next, so that their opening
and ending is in the figures.
"""

import argparse
import json
import math
import os
import platform
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.result_file import result_file
from services.common.children import dying_with_parent

SERVICES = ("router", "tokenizer", "gateway")
WARM_UP_S = 3.0
RAMP = (10, 25, 50, 75, 100, 150, 200, 250, 300, 350, 400, 500, 600, 800)  # steps a second
RAMP_S = 5.0
HELD_SHARE = 0.95
HELD_P99_MS = 250.0


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
        enough = self.tokens_per_s >= HELD_SHARE * asked
        return enough and self.p99_of_a_second_ms < HELD_P99_MS


class Child:
    """A process of the measurement. Its first line of output says where it serves."""

    def __init__(
        self, stack: ExitStack, *arguments: str, variables: dict[str, str] | None = None
    ) -> None:
        command = [*dying_with_parent(), sys.executable, "-m", *arguments]
        pipe = subprocess.PIPE
        self.process = stack.enter_context(
            subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=variables)
        )
        stack.callback(self.stop)
        assert self.process.stdout is not None
        ready = json.loads(self.process.stdout.readline() or "null")
        if ready is None:
            raise RuntimeError(f"{' '.join(arguments)} did not start")
        self.address: str = ready["address"]
        self.pid: int = ready["pid"]
        self.pids: dict[str, int] = ready.get("pids", {})

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()  # Ray's processes end so, the others by the signal
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


@dataclass
class Chain:
    """A variant's running processes."""

    address: str  # the gateway's
    pids: dict[str, int]  # by service


def measure(variant: str, args: argparse.Namespace, rate: float, seconds: float) -> Window:
    """Starts a variant's processes, watches them for a while, stops them, and counts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ExitStack() as stack:
            chain = start_chain(stack, variant, rate, folder)
            client = Child(
                stack,
                *("bench.link_hops", "client", "--upstream", chain.address),
                *("--sequences", str(args.sequences), "--tokens", str(args.tokens)),
                *("--out", str(folder / "arrived")),
            )
            time.sleep(WARM_UP_S)
            before = {service: cpu_s(pid) for service, pid in chain.pids.items()}
            start_ns = time.monotonic_ns()
            time.sleep(seconds)
            if client.process.poll() is not None:
                raise RuntimeError("the client ended early")
            used = {service: cpu_s(pid) - before[service] for service, pid in chain.pids.items()}
            window = Window(rate, start_ns, time.monotonic_ns(), used)
            client.stop()
        left = json.loads((folder / "left").read_text())
        count(window, left, json.loads((folder / "arrived").read_text()))
    return window


def start_chain(stack: ExitStack, variant: str, rate: float, folder: Path) -> Chain:
    steps = ("--rate", str(rate), "--out", str(folder / "left"))
    if variant == "serve":
        serve = Child(stack, "bench.link_serve", *steps)
        return Chain(serve.address, {service: serve.pids[service] for service in SERVICES})
    hop = ("bench.link_hops", "--variant", variant)
    address, pids = Child(stack, *hop, *steps, "worker").address, {}
    for service in SERVICES:
        child = Child(stack, *hop, "--upstream", address, service)
        address, pids[service] = child.address, child.pid
    return Chain(address, pids)


def cpu_s(pid: int) -> float:
    """User and system time of a process so far, all its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def count(window: Window, left: dict[str, list[int]], arrived: dict[str, list[int]]) -> None:
    """Fills in what the window saw, from when each request's tokens left and arrived, in ns."""
    by_second: dict[int, list[float]] = defaultdict(list)
    for key, times in arrived.items():
        for left_ns, arrived_ns in zip(left.get(key, ()), times, strict=False):
            if window.start_ns <= arrived_ns < window.end_ns:
                second = (arrived_ns - window.start_ns) // 10**9
                by_second[second].append((arrived_ns - left_ns) / 1e6)
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


def ramp(variant: str, args: argparse.Namespace) -> list[Window]:
    """Rising rates, each on a fresh chain, the last one not held."""
    windows: list[Window] = []
    for rate in RAMP:
        windows.append(measure(variant, args, rate, RAMP_S))
        if not windows[-1].held(args.sequences):
            break
    return windows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--variants", default="links,plain,serve", help="comma-separated")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--rate", type=float, default=100.0, help="steps a second")
    parser.add_argument("--tokens", type=int, default=256, help="of a request, on average")
    parser.add_argument("--seconds", type=float, default=20.0, help="measured, per variant")
    parser.add_argument("--ramp", action="store_true", help="then look for the highest rate held")
    parser.add_argument("--json", type=result_file, help="write the figures to this file, too")


def main(args: argparse.Namespace) -> None:
    os.environ["PENSTOCK_INTERNAL_SECRET"] = secrets.token_urlsafe(32)  # of all child processes
    results: dict[str, list[Window]] = {}
    for variant in args.variants.split(","):
        print(f"measuring {variant} …", file=sys.stderr, flush=True)
        results[variant] = [measure(variant, args, args.rate, args.seconds)]
        if args.ramp:
            results[variant] += ramp(variant, args)
    print(table(results, args))
    if args.json:
        figures = {name: [asdict(w) for w in windows] for name, windows in results.items()}
        args.json.write_text(json.dumps(figures, indent=1))


def table(results: dict[str, list[Window]], args: argparse.Namespace) -> str:
    lines = [
        f"{args.sequences} sequences x {args.rate:g} steps/s for {args.seconds:g} s, requests of "
        f"about {args.tokens} tokens; {os.cpu_count()} CPUs, Python {platform.python_version()}; "
        "CPU in seconds per million tokens",
        "",
        "| variant | tokens/s | p50 ms | p99 ms | p99 of a median second | router | tokenizer "
        "| gateway | all three | rate held, tokens/s |",
        "| --- |" + " ---: |" * 9,
    ]
    for name, (window, *rising) in results.items():
        cpu = [window.cpu_per_million(service) for service in SERVICES]
        cells = [
            name,
            f"{window.tokens_per_s:,.0f}",
            f"{window.p50_ms:.1f}",
            f"{window.p99_ms:.1f}",
            f"{window.p99_of_a_second_ms:.1f}",
            *(f"{seconds:.0f}" for seconds in [*cpu, window.total_cpu_per_million]),
            f"{rate_held(rising, args.sequences):,.0f}" if rising else "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def rate_held(rising: list[Window], sequences: int) -> float:
    """Tokens a second; 0 when not even the first rate was held."""
    return max((w.tokens_per_s for w in rising if w.held(sequences)), default=0.0)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(arguments)
    main(arguments.parse_args())
