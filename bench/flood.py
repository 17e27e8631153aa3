"""What a flood leaves in the memory of each service.

    penstock up                                        (in one terminal, then in another:)
    python -m bench.flood [--seconds 25] [--clients 300] [--after 30 60 180]

Needs the Penstock of this data directory, to itself. One ordinary request of each kind warms it up;
then come floods of --seconds each, one after the other: long chats, chats that are given up, short
chats, embeddings of large inputs, bodies that are refused, searches. A table says the unique memory
(USS) of each process before, at most while it lasted, and some seconds after.
"""

import argparse
import asyncio
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import psutil

from services.cli.running import Running, find_running
from services.common.config import Settings
from services.common.discovery import SERVICES, Directory
from services.common.redis import connect

_MIB = 2**20
_JSON = {"Content-Type": "application/json"}
_WORDS = ["water", "penstock", "turbine", "gate", "river", "valley", "keeper", "dam", "flow"]


@dataclass
class Memory:
    """One process, in MiB."""

    name: str
    process: psutil.Process
    before: float = 0.0
    peak: float = 0.0
    after: list[float] = field(default_factory=list)

    def unique(self) -> float:
        return float(self.process.memory_full_info().uss) / _MIB

    def look(self) -> None:
        self.peak = max(self.peak, self.unique())


class Client:
    """Sends the requests; counts how they ended, by kind."""

    def __init__(self, http: aiohttp.ClientSession, chat: str, embedding: str, store: str) -> None:
        self.outcomes: Counter[tuple[str, int | str]] = Counter()
        self._http = http
        self._chat = chat
        self._embedding = embedding
        self._store = store
        self._random = random.Random(7)

    async def long_chat(self) -> None:
        await self._stream(self._messages(self._random.randint(100, 200) * 1024))

    async def short_chat(self) -> None:
        await self._stream(self._messages(200))

    async def abandoned_chat(self) -> None:
        """The client goes away at some time within a second."""
        try:
            async with asyncio.timeout(self._random.random()):
                await self.long_chat()
        except TimeoutError:
            self.outcomes["completions", "gone"] += 1

    async def embeddings(self) -> None:
        texts = [self._text(600) for _ in range(32)]
        await self._post("embeddings", {"model": self._embedding, "input": texts})

    async def refused(self) -> None:
        """Too large, no JSON, too many messages, or of another shape."""
        size = 6 * _MIB
        one = {"role": "user", "content": "x"}
        bodies: list[Any] = [
            b" " * (9 * _MIB),
            b'{"messages": [' + b'{"role": "user", "content": "x"},' * (size // 33),
            {"model": self._chat, "messages": [one] * 60_000},
            {"model": self._chat, "messages": "x" * size},
        ]
        await self._post("chat/completions", self._random.choice(bodies))

    async def search(self) -> None:
        path = f"vector_stores/{self._store}/search"
        await self._post(path, {"query": self._text(300), "max_num_results": 20})

    def _text(self, size: int) -> str:
        words = self._random.choices(_WORDS, k=size // 6)
        return f"{self._random.random()} {' '.join(words)}"[:size]

    def _messages(self, size: int) -> dict[str, Any]:
        """Of a chat, most of which is told before its last message."""
        sizes = [size // 10] * 10 + [size // 100]
        roles = itertools.cycle(("user", "assistant"))
        messages = [{"role": next(roles), "content": self._text(n)} for n in sizes]
        return {"model": self._chat, "messages": messages, "max_tokens": 16}

    async def _stream(self, body: dict[str, Any]) -> None:
        await self._post("chat/completions", body | {"stream": True})

    async def _post(self, path: str, body: Any) -> None:
        raw = {"data": body} if isinstance(body, bytes) else {"json": body}
        kind = path.rpartition("/")[2]
        try:
            async with self._http.post(path, headers=_JSON, **raw) as answer:
                async for _ in answer.content.iter_any():
                    pass
            self.outcomes[kind, answer.status] += 1
            if answer.status == 429:
                await asyncio.sleep(0.2)
        except aiohttp.ClientError as error:
            self.outcomes[kind, type(error).__name__] += 1


async def flood(request: Callable[[], Awaitable[None]], clients: int, seconds: float) -> None:
    """So many clients send one request after the other."""
    until = time.monotonic() + seconds

    async def one() -> None:
        while time.monotonic() < until:
            await request()

    await asyncio.gather(*(one() for _ in range(clients)))


async def processes(running: Running) -> list[Memory]:
    """The replicas and their engines, and what else belongs to the stack."""
    redis = connect(running.redis_url)
    found = {}
    try:
        for service in SERVICES:
            view = Directory(redis, running.namespace, service, lease_s=3.0)
            await view.refresh()
            for replica in view.replicas.values():
                name = f"{replica.facts.get('role', '')} {service}".strip()
                found[replica.pid] = name
    finally:
        await redis.aclose()
    memories = [Memory(name, psutil.Process(pid)) for pid, name in found.items()]
    for memory in list(memories):
        for child in memory.process.children(recursive=True):
            if "services.worker.engine.process.loop" in child.cmdline():
                memories.append(Memory(f"{memory.name}'s engine", child))
    return memories


async def make_store(http: aiohttp.ClientSession, text: str) -> str:
    form = aiohttp.FormData({"purpose": "assistants"})
    form.add_field("file", text.encode(), filename="flood.txt")
    file = (await _json(http.post("files", data=form)))["id"]
    body = {"name": "flood", "file_ids": [file]}
    store = await _json(http.post("vector_stores", json=body))
    while store["status"] != "completed":
        await asyncio.sleep(0.2)
        store = await _json(http.get(f"vector_stores/{store['id']}"))
    return str(store["id"])


async def _json(call: Any) -> dict[str, Any]:
    async with call as answer:
        told: dict[str, Any] = await answer.json()
        assert answer.status == 200, told
        return told


async def watch(memories: list[Memory]) -> None:
    while True:
        for memory in memories:
            memory.look()
        await asyncio.sleep(0.2)


async def run(running: Running, args: argparse.Namespace) -> list[Memory]:
    async with aiohttp.ClientSession(
        base_url=f"{running.url}/v1/",
        headers={"Authorization": f"Bearer {running.key}"},
        timeout=aiohttp.ClientTimeout(total=120.0),
        connector=aiohttp.TCPConnector(limit=0),
    ) as http:
        models = [model["id"] for model in (await _json(http.get("models")))["data"]]
        store = await make_store(http, "The keeper of the gate is Ada.\n\n" * 200)
        client = Client(http, models[0], models[-1], store)
        floods = [
            (client.long_chat, args.clients),
            (client.abandoned_chat, args.clients),
            (client.short_chat, args.clients),
            (client.embeddings, 16),
            (client.refused, 32),
            (client.search, 64),
        ]
        for request, _ in floods:
            await request()
        memories = await processes(running)
        await asyncio.sleep(args.settle)
        for memory in memories:
            memory.before = memory.unique()
        watching = asyncio.create_task(watch(memories))
        for request, clients in floods:
            client.outcomes.clear()
            await flood(request, clients, args.seconds)
            told = ", ".join(
                f"{how}: {n}" for (_, how), n in sorted(client.outcomes.items(), key=str)
            )
            print(f"{request.__name__} ({clients} clients): {told}", file=sys.stderr)
        watching.cancel()
    ended = time.monotonic()
    for seconds in args.after:
        await asyncio.sleep(max(0.0, ended + seconds - time.monotonic()))
        for memory in memories:
            memory.after.append(memory.unique())
    return memories


def table(memories: list[Memory], after: list[int]) -> Iterator[str]:
    yield f"| MiB | before | peak | {' | '.join(f'{s} s after' for s in after)} | of before |"
    yield "| --- " * (len(after) + 4) + "|"
    for m in memories:
        rest = " | ".join(f"{mib:.0f}" for mib in m.after)
        share = m.after[-1] / m.before
        yield f"| {m.name} | {m.before:.0f} | {m.peak:.0f} | {rest} | {share:.2f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=25.0, help="of each flood")
    parser.add_argument("--clients", type=int, default=300, help="of the floods of chats")
    parser.add_argument("--settle", type=float, default=5.0, help="seconds before it begins")
    parser.add_argument("--after", type=int, nargs="+", default=[30, 60, 180], metavar="S")
    args = parser.parse_args()
    running = find_running(Settings())
    if running is None:
        print("bench flood: no Penstock runs with this data directory", file=sys.stderr)
        return 2
    for line in table(asyncio.run(run(running, args)), args.after):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
