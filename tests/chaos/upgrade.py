"""The whole graph is replaced by a new version under load; not one request may notice.

    python -m tests.chaos.upgrade        (`make chaos` runs it, too)

Two gateways behind one door, two tokenizers, two routers and two workers, each replaced one by one.
Streams and short requests come on connections that stay, on new ones, and over gRPC. The exit code
is 1 when a request failed, a stream was cut or an answer is not what it would have been.
"""

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx

from protos import gateway_pb2, gateway_pb2_grpc
from tests.support.checkpoint import write_checkpoint
from tests.support.laptop import Laptop
from tests.support.streams import Stream, complete
from tests.support.waiting import until

UPGRADE_S = 240.0
CLIENTS = 4  # of each kind
ALL = ("gateway", "retrieval", "tokenizer", "router", "worker")
REPLACED = ("gateway", "tokenizer", "router", "worker")
SHORT = {"model": "tiny", "prompt": "the water", "max_tokens": 20, "temperature": 0}
LONG = {**SHORT, "max_tokens": 300, "ignore_eos": True}


@dataclass
class Load:
    """Clients that ask again and again until `over`."""

    laptop: Laptop
    over: asyncio.Event = field(default_factory=asyncio.Event)
    done: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    async def run(self, kind: str, ask: Callable[[], Awaitable[str]], expected: str) -> None:
        while not self.over.is_set():
            try:
                text = await ask()
            except (AssertionError, httpx.HTTPError, grpc.RpcError, TimeoutError) as error:
                self.failed.append(f"{kind}: {type(error).__name__} {str(error)[:300]}")
            else:
                self.done[kind] += 1
                if text != expected:
                    self.failed.append(f"{kind}: another answer")

    async def kept_short(self, expected: str) -> None:
        async with self.laptop.api() as api:
            await self.run("short, one connection", lambda: complete(api, SHORT), expected)

    async def new_short(self, expected: str) -> None:
        async def ask() -> str:
            async with self.laptop.api() as api:
                return await complete(api, SHORT)

        await self.run("short, new connections", ask, expected)

    async def kept_stream(self, expected: str) -> None:
        async with self.laptop.api() as api:
            await self.run("streams", lambda: Stream(api, LONG).finished(timeout_s=120), expected)

    async def over_grpc(self, expected: str) -> None:
        metadata = (("authorization", f"Bearer {self.laptop.running.key}"),)
        async with grpc.aio.insecure_channel(self.laptop.running.grpc) as channel:
            stub = gateway_pb2_grpc.InferenceStub(channel)
            request = gateway_pb2.CompleteRequest(
                model="tiny",
                text=SHORT["prompt"],
                sampling=gateway_pb2.SamplingOptions(max_tokens=20, temperature=0),
            )

            async def ask() -> str:
                events = stub.Complete(request, metadata=metadata, timeout=120)
                return "".join([event.text async for event in events])

            await self.run("gRPC", ask, expected)


async def replicas(laptop: Laptop, services: tuple[str, ...]) -> dict[str, list[str]]:
    return {name: sorted(r.id for r in await laptop.replicas(name)) for name in services}


async def upgraded(laptop: Laptop) -> float:
    """Replaces everything; returns how long that took."""
    before = await replicas(laptop, ALL)
    assert all(len(before[name]) == 2 for name in REPLACED), before
    began = time.monotonic()
    os.kill(laptop.running.pid, signal.SIGUSR1)

    async def replaced() -> bool:
        now = await replicas(laptop, ALL)
        return all(
            len(now[name]) == len(before[name]) and not set(now[name]) & set(before[name])
            for name in ALL
        )

    await until(replaced, UPGRADE_S, "every replica is another one")
    return time.monotonic() - began


async def run(folder: Path, clients: int = CLIENTS) -> Load:
    write_checkpoint(folder / "tiny", window=1024)
    settings = {
        "GATEWAY__REPLICAS": "2",
        "GATEWAY__LAME_DUCK_S": "5",
        "TOKENIZER__REPLICAS": "2",
        "ROUTER__REPLICAS": "2",
    }
    arguments = ("--model", str(folder / "tiny"), "--prefill", "0", "--decode", "2")
    async with Laptop(folder, *arguments, module="tests.support.upgrading", **settings) as laptop:
        async with laptop.api() as api:
            short, long = await complete(api, SHORT), await complete(api, LONG)
        load = Load(laptop)
        kinds: Any = ((load.kept_short, short), (load.new_short, short), (load.kept_stream, long))
        works = [kind(expected) for kind, expected in kinds for _ in range(clients)]
        asking = [asyncio.create_task(work) for work in (*works, load.over_grpc(short))]
        await until(lambda: len(load.done) == 4, 60, "every kind is answered")
        took_s = await upgraded(laptop)
        load.over.set()
        await asyncio.gather(*asking)
        told = ", ".join(f"{count} {kind}" for kind, count in sorted(load.done.items()))
        print(f"replaced in {took_s:.0f} s; answered: {told}; failed: {len(load.failed)}")
        left = await laptop.stop(60)
        assert not left, left
    return load


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="penstock-upgrade-") as folder:
        load = asyncio.run(run(Path(folder)))
    for line in load.failed:
        print(line)
    return int(bool(load.failed))


if __name__ == "__main__":
    sys.exit(main())
