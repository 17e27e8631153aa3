"""What a streamed token costs the gateway: CPU microseconds, SSE writing included.

    python -m bench.gateway [--sequences 64] [--rate 100] [--seconds 10]

A gateway process serves `sequences` SSE streams from a scripted tokenizer that sends one token per
sequence `rate` times a second, as decode steps do. The figure is the gateway's user and system time
between the first and the last token, from /proc, over the tokens that arrived at the clients.

Measured on two shared cores, 64 streams: 18 to 22 at 100 steps a second, 27 at 30.
"""

import argparse
import asyncio
import os
import sys
import time
from typing import Any

import grpc
import httpx

from protos import tokenizer_pb2, tokenizer_pb2_grpc
from protos.common_pb2 import FINISH_LENGTH, Usage
from protos.tokenizer_pb2 import PromptPlan, TextDelta
from services.common.children import dying_with_parent
from services.common.config import Settings
from services.common.discovery import Directory
from services.common.embedded_redis import EmbeddedRedis
from services.common.link import LinkCall, LinkServer
from services.common.redis import connect
from services.common.service import Host, Service
from services.gateway.identity.keys import KeyStore

DELTA = TextDelta(text=" token", token_ids=[17]).SerializeToString()
FIRST = TextDelta(text="A", token_ids=[17], plan=PromptPlan(window=512)).SerializeToString()
LAST = TextDelta(finish=FINISH_LENGTH, usage=Usage(completion_tokens=1)).SerializeToString()


class Ticking(Service):
    """A tokenizer whose requests all move in step."""

    name = "tokenizer"
    grpc_services = ("penstock.v1.Tokenizer",)

    async def start(self, server: grpc.aio.Server) -> None:
        self.calls: list[LinkCall] = []
        self.over = asyncio.Event()
        links = LinkServer("/penstock.v1.Tokenizer/Link", self._handle)
        tokenizer_pb2_grpc.add_TokenizerServicer_to_server(_Models(), server)
        links.add_to(server)

    async def _handle(self, call: LinkCall) -> None:
        call.send(FIRST)
        self.calls.append(call)
        await self.over.wait()
        call.send(LAST)

    async def run(self, rate: float, seconds: float) -> None:
        steps, began = int(rate * seconds), time.monotonic()
        for step in range(steps):
            for call in self.calls:
                call.send(DELTA)
            await asyncio.sleep(max(0.0, began + (step + 1) / rate - time.monotonic()))


class _Models(tokenizer_pb2_grpc.TokenizerServicer):
    async def ListModels(self, request: Any, context: Any) -> tokenizer_pb2.ListModelsReply:
        return tokenizer_pb2.ListModelsReply(models=[tokenizer_pb2.ModelInfo(name="m")])


def cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def read(client: httpx.AsyncClient, tokens: list[int]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for piece in answer.aiter_raw():
            tokens[0] += piece.count(b'"content":" token"')


async def measure(sequences: int, rate: float, seconds: float) -> None:
    with EmbeddedRedis() as redis:
        settings = Settings(redis_url=redis.url, namespace="bench", log_level="WARNING")
        client = connect(redis.url)
        key, _ = await KeyStore(client, "bench").create("bench")
        host = Host(Ticking, settings)
        await host.start()
        environment = {**os.environ, "REDIS_URL": redis.url, "PENSTOCK_NAMESPACE": "bench"}
        gateway = await asyncio.create_subprocess_exec(
            *(*dying_with_parent(), sys.executable, "-m", "services.gateway"),
            env={**environment, "PENSTOCK_GATEWAY__PORT": "0", "PENSTOCK_LOG_LEVEL": "WARNING"},
        )
        try:
            view = Directory(client, "bench", "gateway", settings.lease_s)
            while not view.replicas:
                await view.refresh()
                await asyncio.sleep(0.05)
            (replica,) = view.replicas.values()
            ticking = host.service
            assert isinstance(ticking, Ticking)
            async with httpx.AsyncClient(
                base_url=replica.facts["url"],
                headers={"Authorization": f"Bearer {key}"},
                limits=httpx.Limits(max_connections=None),
                timeout=60,
            ) as http:
                tokens = [0]
                readers = [asyncio.create_task(read(http, tokens)) for _ in range(sequences)]
                while len(ticking.calls) < sequences:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                before = cpu_s(gateway.pid)
                await ticking.run(rate, seconds)
                await asyncio.sleep(0.5)
                used = cpu_s(gateway.pid) - before
                ticking.over.set()
                await asyncio.gather(*readers)
            print(f"{tokens[0]} tokens, {used / tokens[0] * 1e6:.1f} CPU microseconds each")
        finally:
            gateway.terminate()
            await gateway.wait()
            await host.stop(0)
            await client.aclose()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args()
    asyncio.run(measure(given.sequences, given.rate, given.seconds))
