"""One process of each class is killed under 16 streams, or hangs; a table says what that cost.

    python -m tests.chaos.kills [CLASS ...]      (`make chaos` runs them all)

One that hangs is stopped by SIGSTOP and goes on after `HANG_S`, if nobody has ended it: what it did
not know of must do no harm.

Each row has a `penstock up` of its own, with a prefill and two decode workers. The exit code is 1
when a row breaks its rule: every stream is as it would have been and counts its tokens once, the
longest pause and the time until new requests are answered stay within `PATIENCE_S`, Ctrl-C ends
everything. A gateway's death cuts its connections; a raylet's is answered with a new start of
everything, within `RESTART_S`. A hang has `HANG_S` more: the only replica of its service may just
have gone on by itself.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.support.checkpoint import write_checkpoint
from tests.support.laptop import Laptop
from tests.support.streams import Stream, complete

STREAMS = 16
PATIENCE_S = 10.0
RESTART_S = 30.0
HANG_S = 20.0
END_S = 30.0  # for Ctrl-C
MAX_TOKENS = 800
Victims = Callable[[Laptop], Awaitable[list[int]]]


def replica(service: str, **facts: str) -> Victims:
    """One replica of a service, by the registry."""

    async def find(laptop: Laptop) -> list[int]:
        found = await laptop.replicas(service)
        return [r.pid for r in found if facts.items() <= r.facts.items()][:1]

    return find


def process(named: str) -> Victims:
    """One process, by its command line."""

    async def find(laptop: Laptop) -> list[int]:
        return [p.pid for p in laptop.processes(named)][:1]

    return find


async def engine(laptop: Laptop) -> list[int]:
    """The engine of a decode worker."""
    (worker,) = await replica("worker", role="decode")(laptop)
    children = psutil.Process(worker).children(recursive=True)
    return [
        c.pid for c in children if "services.worker.engine.process.loop" in " ".join(c.cmdline())
    ]


async def answered(api: httpx.AsyncClient) -> bool:
    body = {"model": "tiny", "prompt": "the water", "max_tokens": 3, "temperature": 0}
    return (await api.post("/v1/completions", json=body)).is_success


async def embedded(api: httpx.AsyncClient) -> bool:
    body = {"model": "all-MiniLM-L6-v2", "input": "the water"}
    return (await api.post("/v1/embeddings", json=body)).is_success


async def listed(api: httpx.AsyncClient) -> bool:
    return (await api.get("/v1/files")).is_success


@dataclass(frozen=True)
class Kill:
    victims: Victims
    probe: Callable[[httpx.AsyncClient], Awaitable[bool]] = answered
    cuts: bool = False  # the streams' own connections end with it
    patience_s: float = PATIENCE_S
    hangs: bool = False


KILLS = {
    "decode worker": Kill(replica("worker", role="decode")),
    "engine": Kill(engine),
    "prefill worker": Kill(replica("worker", role="prefill")),
    "router": Kill(replica("router")),
    "tokenizer": Kill(replica("tokenizer")),
    "gateway": Kill(replica("gateway"), cuts=True),
    "retrieval": Kill(replica("retrieval"), embedded),
    "redis": Kill(process("redis-server"), listed),
    "controller": Kill(process("ray::ServeController")),
    "gcs": Kill(process("gcs_server")),
    "raylet": Kill(process("raylet/raylet"), cuts=True, patience_s=RESTART_S),
}
KILLS |= {
    f"hung {name}": replace(kill, hangs=True, patience_s=kill.patience_s + HANG_S)
    for name, kill in KILLS.items()
}


@dataclass
class Outcome:
    streams: Counter[str] = field(default_factory=Counter)  # "same", "different", "cut", errors
    met: int = 0  # streams that ran when the victim was killed
    pause_s: float = 0.0
    recovered_s: float | None = None  # until the probe was answered again; None: not any more
    failed_probes: int = 0
    well: bool = False  # in the end a request was answered as before
    ended: bool = False  # by itself
    left: list[str] = field(default_factory=list)

    def faults(self, kill: Kill) -> list[str]:
        found = []
        if self.left:
            found.append(f"left behind: {', '.join(self.left)}")
        if self.ended:
            found.append("Penstock ended")
        if not self.well:
            found.append("in the end a request is answered otherwise")
        wrong = {"hung", "different"} if kill.cuts else set(self.streams) - {"same"}
        if self.met < STREAMS:  # the others say nothing of what the kill costs
            found.append(f"it met {self.met} streams")
        if wrong & set(self.streams):
            found.append(f"streams: {dict(self.streams)}")
        if self.pause_s > kill.patience_s and not kill.cuts:
            found.append(f"a pause of {self.pause_s:.1f} s")
        if self.recovered_s is None or self.recovered_s > kill.patience_s:
            found.append(f"new requests are answered after {self.recovered_s} s")
        return found


def bodies() -> list[dict[str, Any]]:
    """Long ones, greedy and sampled, no two alike."""
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "seed": 11}]
    return [
        {
            "model": "tiny",
            "prompt": f"stream {number}: the water at the end of the penstock " * 8,
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            **kinds[number % 2],
        }
        for number in range(STREAMS)
    ]


async def run(kill: Kill, folder: Path, model: Path) -> Outcome:
    outcome = Outcome()
    arguments = ["--model", str(model), "--prefill", "1", "--decode", "2"]
    async with Laptop(folder, *arguments) as laptop, laptop.api() as api:
        victims = await kill.victims(laptop)
        assert victims, "there is no such process"
        expected = await asyncio.gather(*(complete(api, body) for body in bodies()))
        await kill.probe(api)
        streams = [Stream(api, body) for body in bodies()]
        await asyncio.gather(*(stream.reached(chunks=10) for stream in streams))
        fallen = [psutil.Process(pid) for pid in victims]
        for process in fallen:
            process.suspend() if kill.hangs else process.kill()
        killed = time.monotonic()
        outcome.met = sum(stream.running for stream in streams)
        for stream in streams:
            stream.longest_pause_s = 0.0  # one that begins before counts, one that ended does not
        cut = asyncio.Event()
        probing = asyncio.create_task(probe(kill, laptop, killed, cut, outcome))
        waking = asyncio.create_task(wake(fallen if kill.hangs else []))
        for stream, text in zip(streams, expected, strict=True):
            outcome.streams[await how_it_ended(stream, text)] += 1
        cut.set()
        outcome.pause_s = max(stream.longest_pause_s for stream in streams)
        await probing
        await waking
        outcome.well = await same_again(laptop, expected[0])
        outcome.ended = laptop.up.poll() is not None
        outcome.left = [" ".join(p.cmdline())[:80] for p in await laptop.stop(END_S)]
    return outcome


async def same_again(laptop: Laptop, expected: str) -> bool:
    async with laptop.api() as api:  # the connections of before may have been cut
        with suppress(httpx.TransportError, AssertionError):
            return await complete(api, bodies()[0]) == expected
    return False


async def wake(fallen: list[psutil.Process]) -> None:
    """Those that still hang after `HANG_S` go on."""
    if fallen:
        await asyncio.sleep(HANG_S)
    for process in fallen:
        with suppress(psutil.NoSuchProcess):
            process.resume()


async def how_it_ended(stream: Stream, expected: str) -> str:
    try:
        text = await stream.finished(timeout_s=120)
    except TimeoutError:
        return "hung"
    except httpx.TransportError:
        return "cut"
    except AssertionError:
        with suppress(AssertionError):
            return str((await stream.error())["code"])
        return "cut"
    assert stream.usage is not None
    counted = stream.usage["completion_tokens"]
    return "same" if (text, counted) == (expected, MAX_TOKENS) else "different"


async def probe(
    kill: Kill, laptop: Laptop, killed: float, cut: asyncio.Event, outcome: Outcome
) -> None:
    """Asks for what the victim had a part in, until it is answered or nobody is there.

    Where the streams are cut, only from then on: what is on its way down still answers.
    """
    if kill.cuts:
        await cut.wait()
    async with laptop.api(timeout_s=kill.patience_s) as api:
        while laptop.up.poll() is None and time.monotonic() - killed < 4 * kill.patience_s:
            with suppress(httpx.TransportError):
                if await kill.probe(api):
                    outcome.recovered_s = time.monotonic() - killed
                    return
            outcome.failed_probes += 1
            await asyncio.sleep(0.2)


def row(name: str, outcome: Outcome, faults: list[str]) -> str:
    others = [f"{count} {how}" for how, count in outcome.streams.items() if how != "same"]
    recovered = "never" if outcome.recovered_s is None else f"{outcome.recovered_s:.1f}"
    return (
        f"| {name} | {outcome.streams['same']} | {'; '.join(others)} | {outcome.pause_s:.1f} "
        f"| {recovered} | {outcome.failed_probes} | {len(outcome.left)} "
        f"| {'; '.join(faults) or 'as wanted'} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("classes", nargs="*", metavar="CLASS", help=", ".join(KILLS))
    chosen = parser.parse_args().classes or list(KILLS)
    if unknown := [name for name in chosen if name not in KILLS]:
        parser.error(f"no such class: {', '.join(unknown)}; there are: {', '.join(KILLS)}")
    failed = False
    print(
        f"| killed | of {STREAMS} as undisturbed | others | longest pause s "
        "| new requests after s | failed till then | processes left | |\n" + "| --- " * 8 + "|"
    )
    with tempfile.TemporaryDirectory(prefix="penstock-chaos-") as folder:
        # Large enough for streams that last some seconds on the kernels that users run.
        model = write_checkpoint(Path(folder) / "tiny", window=2048, hidden=512, layers=8)
        for name in chosen:
            own = Path(folder) / name.replace(" ", "-")
            own.mkdir()
            outcome = asyncio.run(run(KILLS[name], own, model))
            faults = outcome.faults(KILLS[name])
            failed = failed or bool(faults)
            print(row(name, outcome, faults), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
