"""The chain of bench/link_hops.py as Ray Serve deployments that call each other by handles.

The baseline of bench/links.py: how a Serve application moves streams when nothing else is built.
The gateway writes SSE from a server of its own in its replica, as in the other variants, so that no
Serve proxy is in the figures. Run as `python -m bench.link_serve --out FILE`.
"""

import argparse
import asyncio
import json
import logging
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

# Local only; see the README on Ray's settings.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")

import ray
from ray import serve

from bench.link_hops import Steps, make_app, start_http, to_event, to_text, worker_pieces


class Hop:
    """What each deployment has."""

    def pid(self) -> int:
        return os.getpid()


class Worker(Hop):
    async def __init__(self, rate: float) -> None:  # type: ignore[misc]  # Serve awaits it
        self.steps = Steps(rate)
        self.stepping = asyncio.create_task(self.steps.run())

    async def generate(self, request: bytes) -> AsyncIterator[bytes]:
        async for piece in worker_pieces(self.steps, request):
            yield piece

    async def left_ns(self) -> dict[int, list[int]]:
        return self.steps.left_ns


class Router(Hop):
    def __init__(self, below: Any) -> None:
        self.below = below.options(stream=True)

    async def generate(self, request: bytes) -> AsyncIterator[bytes]:
        async for piece in self.below.generate.remote(request):
            yield piece


class Tokenizer(Router):
    async def generate(self, request: bytes) -> AsyncIterator[bytes]:
        async for piece in self.below.generate.remote(request):
            yield to_text(piece)


class Gateway(Router):
    async def __init__(self, below: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        super().__init__(below)
        self.server, self.url = await start_http(make_app(self.generate))

    async def generate(self, request: bytes) -> AsyncIterator[bytes]:
        async for piece in self.below.generate.remote(request):
            yield to_event(piece)

    def address(self) -> str:
        return self.url


def deployed(kind: type[Hop], *arguments: Any) -> Any:
    options = {"num_cpus": 0}
    made: Any = serve.deployment(
        name=kind.__name__, ray_actor_options=options, max_ongoing_requests=10_000
    )(kind)
    return made.bind(*arguments)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--out", required=True, help="JSON of key to times in ns")
    args = parser.parse_args()
    ray.init(
        address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end of stdin ends this
    try:
        worker = deployed(Worker, args.rate)
        serve.start(proxy_location="Disabled")
        chain = deployed(Gateway, deployed(Tokenizer, deployed(Router, worker)))
        serve.run(chain, name="bench", route_prefix=None)
        handles = {
            kind.__name__.lower(): serve.get_deployment_handle(kind.__name__, "bench")
            for kind in (Worker, Router, Tokenizer, Gateway)
        }
        ready = {
            "address": handles["gateway"].address.remote().result(),
            "pid": os.getpid(),
            "pids": {name: handle.pid.remote().result() for name, handle in handles.items()},
        }
        print(json.dumps(ready), flush=True)
        sys.stdin.read()
        Path(args.out).write_text(json.dumps(handles["worker"].left_ns.remote().result()))
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
