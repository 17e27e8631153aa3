"""The processes that bench/links.py measures and those that it measures with.

    worker ──▶ router ──▶ tokenizer ──▶ gateway ──▶ client        (tokens flow to the right)

Run as `python -m bench.link_hops ROLE …`. A server prints its address when it serves, and ends at
SIGTERM. `worker` and `client` are the two ends of the measurement: they write down when each token
left and arrived (CLOCK_MONOTONIC is one clock for all processes of a machine). Router, tokenizer
and gateway are pass-through hops: the work of the real ones on a token's way is reduced to decoding
and encoding the message and to writing the SSE event; what is left is the cost of moving tokens.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import uvicorn

from protos.common_pb2 import FINISH_LENGTH, Usage
from protos.tokenizer_pb2 import TextDelta
from protos.worker_pb2 import Load, TokenDelta, WorkerNews, WorkRequest
from services.common.config import Settings
from services.common.link import MAX_FRAME_BYTES, LinkCall, LinkClient, LinkServer, Vitals
from services.common.packed_ids import pack, unpack
from services.common.transport import Transport, listen

TEXT = " and"  # what every token of the pass-through hops says; the client counts it
TOKEN = 100
KEY_BASE = 200  # a request's number travels as the last two prompt token ids, offset by 10
MAX_RUNNING = 1024
DEADLINE_S = 600.0
LAST_CHUNK = b"\r\n0\r\n\r\n"  # of a chunked HTTP body

Source = Callable[[bytes], AsyncIterator[bytes]]  # a request in, its pieces out


def key_to_ids(key: int) -> list[int]:
    return [10 + key // KEY_BASE, 10 + key % KEY_BASE]


def ids_to_key(ids: list[int]) -> int:
    return (ids[-2] - 10) * KEY_BASE + ids[-1] - 10


# ---- the same small work in every variant -------------------------------------------------------


def to_text(delta: bytes) -> bytes:
    tokens = len(TokenDelta.FromString(delta).token_ids)
    return TextDelta(text=TEXT * tokens, token_ids=[300] * tokens).SerializeToString()


def to_event(text: bytes) -> bytes:
    choice = {"index": 0, "text": TextDelta.FromString(text).text, "finish_reason": None}
    body = {"id": "cmpl-1", "object": "text_completion", "created": 0, "choices": [choice]}
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


# ---- the fake worker ----------------------------------------------------------------------------


class Steps:
    """An engine's rhythm without an engine: `rate` steps a second, one token per sequence each.

    A step that is late is made up for, up to a second of them. Writes down when tokens left.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.count = 0
        self.left_ns: dict[int, list[int]] = {}
        self.active: dict[int, tuple[Callable[[bytes], None], Callable[[], None], int]] = {}
        self.after: Callable[[], None] = lambda: None  # each step
        self._delta = TokenDelta(token_ids=[TOKEN]).SerializeToString()

    def add(
        self, key: int, tokens: int, send: Callable[[bytes], None], end: Callable[[], None]
    ) -> None:
        self.active[key] = (send, end, tokens)
        self.left_ns[key] = []

    async def run(self) -> None:
        due = time.monotonic()
        while True:
            due = max(due + 1 / self.rate, time.monotonic() - 1.0)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self.count += 1
            now = time.monotonic_ns()
            for key, (send, end, tokens) in list(self.active.items()):
                stamps = self.left_ns[key]
                stamps.append(now)
                if len(stamps) < tokens:
                    send(self._delta)
                else:
                    del self.active[key]
                    send(self._last(tokens))
                    end()
            self.after()

    def _last(self, tokens: int) -> bytes:
        usage = Usage(prompt_tokens=2, completion_tokens=tokens)
        last = TokenDelta(token_ids=[TOKEN], finish=FINISH_LENGTH, usage=usage)
        return last.SerializeToString()


def link_worker(server: grpc.aio.Server, steps: Steps) -> LinkServer:
    async def handler(call: LinkCall) -> None:
        work = WorkRequest.FromString(call.payload)
        done = asyncio.Event()
        key = ids_to_key(unpack(work.prompt_token_ids).tolist())
        steps.add(key, work.sampling.max_tokens, call.send, done.set)
        call.on_cancel(lambda: steps.active.pop(key, None))
        await done.wait()

    links = LinkServer(
        "/penstock.v1.Worker/Link",
        handler,
        vitals=lambda: Vitals(steps.count, len(steps.active)),
        snapshot=lambda: [WorkerNews(snapshot=True, load=load(steps)).SerializeToString()],
    )
    links.add_to(server)
    steps.after = lambda: links.broadcast(WorkerNews(load=load(steps)).SerializeToString())
    return links


def load(steps: Steps) -> Load:
    return Load(
        running=len(steps.active),
        max_running=MAX_RUNNING,
        free_blocks=100_000,
        total_blocks=100_000,
        block_size=16,
    )


async def worker_pieces(steps: Steps, request: bytes) -> AsyncIterator[bytes]:
    work = WorkRequest.FromString(request)
    pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
    key = ids_to_key(unpack(work.prompt_token_ids).tolist())
    steps.add(key, work.sampling.max_tokens, pieces.put_nowait, lambda: pieces.put_nowait(None))
    try:
        while (piece := await pieces.get()) is not None:
            yield piece
    finally:
        steps.active.pop(key, None)


async def run_worker(args: argparse.Namespace) -> None:
    steps = Steps(args.rate)
    stepping = asyncio.create_task(steps.run())
    async with grpc_server() as (server, serve):
        if args.variant == "plain":
            mount(server, lambda request: worker_pieces(steps, request))
        else:
            link_worker(server, steps)
        await serve()
    stepping.cancel()
    write_out(args, steps.left_ns)


# ---- hops ---------------------------------------------------------------------------------------


async def run_link_hop(args: argparse.Namespace) -> None:
    """Router and tokenizer over links: what comes in one frame goes out in one frame."""
    below = {"router": "Worker", "tokenizer": "Router"}[args.role]
    link = await connect(args.upstream, f"/penstock.v1.{below}/Link", args.role)

    async def handler(call: LinkCall) -> None:
        on_item = call.send if args.role == "router" else lambda item: call.send(to_text(item))
        request = link.open(call.payload, deadline=call.deadline, on_item=on_item)
        try:
            end = await request.ended()
        finally:
            request.cancel()
        call.end(end.status)

    async with grpc_server() as (server, serve):
        LinkServer(f"/penstock.v1.{args.role.capitalize()}/Link", handler).add_to(server)
        await serve()
    await link.close()


async def run_plain_hop(args: argparse.Namespace) -> None:
    """Router and tokenizer with one gRPC stream per request."""
    async with (
        transport().dial(args.upstream, "tokenizer") as channel,
        grpc_server() as (server, serve),
    ):
        open_stream = channel.unary_stream("/bench.Hop/Generate")

        async def pieces(request: bytes) -> AsyncIterator[bytes]:
            async for piece in open_stream(request):
                yield piece if args.role == "router" else to_text(piece)

        mount(server, pieces)
        await serve()


async def run_gateway(args: argparse.Namespace) -> None:
    """SSE over HTTP, from the tokenizer by a link or by one stream per request."""
    async with contextlib.AsyncExitStack() as stack:
        if args.variant == "links":
            link = await connect(args.upstream, "/penstock.v1.Tokenizer/Link", "gateway")
            stack.push_async_callback(link.close)
            source = link_source(link)
        else:
            channel = await stack.enter_async_context(transport().dial(args.upstream, "tokenizer"))
            source = stream_source(channel)
        server, address = await start_http(make_app(source))
        announce(address)
        await terminated()
        server.should_exit = True


def link_source(link: LinkClient) -> Source:
    async def pieces(request: bytes) -> AsyncIterator[bytes]:
        """Joins what arrived since the last write into one piece."""
        waiting: list[bytes] = []
        arrived = asyncio.Event()

        def on_item(item: bytes) -> None:
            waiting.append(to_event(item))
            arrived.set()

        def on_end(_ended: asyncio.Task[Any]) -> None:
            arrived.set()

        opened = link.open(request, deadline=time.monotonic() + DEADLINE_S, on_item=on_item)
        end = asyncio.create_task(opened.ended())
        end.add_done_callback(on_end)
        try:
            while not end.done() or waiting:
                await arrived.wait()
                arrived.clear()
                piece = b"".join(waiting)
                waiting.clear()
                yield piece
        finally:
            opened.cancel()

    return pieces


def stream_source(channel: grpc.aio.Channel) -> Source:
    open_stream = channel.unary_stream("/bench.Hop/Generate")

    async def pieces(request: bytes) -> AsyncIterator[bytes]:
        async for piece in open_stream(request):
            yield to_event(piece)

    return pieces


def make_app(source: Source) -> Any:
    """`POST /v1/completions`, as little of it as the client uses. `source` gives SSE events."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        asked = json.loads(body)
        work = WorkRequest(prompt_token_ids=pack(asked["prompt"]))
        work.sampling.max_tokens = asked["max_tokens"]
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for events in source(work.SerializeToString()):
            await send({"type": "http.response.body", "body": events, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    return app


async def start_http(app: Any) -> tuple[uvicorn.Server, str]:
    """A server on the running loop, and its address."""
    # asyncio sets TCP_NODELAY only on sockets that say that they are TCP; without it, small events
    # wait up to 40 ms for the client's delayed acknowledgement.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, lifespan="off", log_level="critical")
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[listening])
    host, port = listening.getsockname()
    return server, f"{host}:{port}"


# ---- the client ---------------------------------------------------------------------------------


class Stream(asyncio.Protocol):
    """One connection that asks for one completion after the other and notes when tokens arrive."""

    def __init__(self, ask: Callable[[int], bytes], keys: "itertools.count[int]", text: bytes):
        self._ask = ask
        self._keys = keys
        self._text = text
        self._tail = b""
        self._answered = False
        self.arrived_ns: dict[int, list[int]] = {}
        self._stamps: list[int] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._next()

    def _next(self) -> None:
        key = next(self._keys)
        self._stamps = self.arrived_ns[key] = []
        self._answered = False
        self._tail = b""
        self._transport.write(self._ask(key))

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        seen = self._tail + data
        if not self._answered:
            self._answered = True
            if not seen.startswith(b"HTTP/1.1 200"):
                sys.exit(f"the gateway answered: {seen[:2000]!r}")
        new = seen.count(self._text)
        self._stamps.extend([now] * new)
        if seen.endswith(LAST_CHUNK):
            self._next()
        else:  # what may be cut in two is looked at again with its rest, but not counted again
            kept = max(len(self._text), len(LAST_CHUNK)) - 1
            counted = seen.rfind(self._text) + len(self._text) if new else 0
            self._tail = seen[max(len(seen) - kept, counted) :]


async def run_client(args: argparse.Namespace) -> None:
    host, port = args.upstream.split(":")

    def ask(key: int) -> bytes:
        tokens = random.Random(key).randint(args.tokens // 2, args.tokens * 3 // 2)
        body = {"prompt": key_to_ids(key), "max_tokens": tokens, "stream": True}
        raw = json.dumps(body).encode()
        lines = [
            "POST /v1/completions HTTP/1.1",
            f"Host: {args.upstream}",
            "Content-Type: application/json",
            f"Content-Length: {len(raw)}",
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + raw

    keys = itertools.count()
    loop = asyncio.get_running_loop()
    streams = []
    for _ in range(args.sequences):
        _, stream = await loop.create_connection(
            lambda: Stream(ask, keys, TEXT.encode()), host, int(port)
        )
        streams.append(stream)
    announce("")
    await terminated()
    arrived: dict[int, list[int]] = {}
    for stream in streams:
        arrived.update(stream.arrived_ns)
    write_out(args, arrived)


# ---- plumbing -----------------------------------------------------------------------------------


def announce(address: str) -> None:
    print(json.dumps({"address": address, "pid": os.getpid()}), flush=True)


def write_out(args: argparse.Namespace, times_ns: dict[int, list[int]]) -> None:
    Path(args.out).write_text(json.dumps(times_ns))


async def terminated() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()


def transport() -> Transport:
    """With the secret that bench/links.py gave to all hops."""
    return Transport.of(Settings(), "cli")


async def connect(address: str, method: str, peer_id: str) -> LinkClient:
    link = LinkClient(address, method, transport=transport(), peer_id=peer_id)
    await link.start()
    await link.wait_ready(30)
    return link


@contextlib.asynccontextmanager
async def grpc_server() -> AsyncIterator[tuple[grpc.aio.Server, Callable[..., Awaitable[None]]]]:
    """A server to mount on, and what serves until SIGTERM."""
    server = transport().server([("grpc.max_receive_message_length", MAX_FRAME_BYTES)])

    async def serve() -> None:
        address = f"127.0.0.1:{listen(server, '127.0.0.1', 0)}"
        await server.start()
        announce(address)
        await terminated()

    yield server, serve
    await server.stop(None)


def mount(server: grpc.aio.Server, source: Source) -> None:
    """One gRPC stream per request, of bytes."""

    async def generate(request: bytes, _context: Any) -> AsyncIterator[bytes]:
        async for piece in source(request):
            yield piece

    handlers = {"Generate": grpc.unary_stream_rpc_method_handler(generate)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Hop", handlers),))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["worker", "router", "tokenizer", "gateway", "client"])
    parser.add_argument("--variant", choices=["links", "plain"], default="links")
    parser.add_argument("--upstream", default="", help="address of the hop below")
    parser.add_argument("--rate", type=float, default=100.0, help="worker: steps a second")
    parser.add_argument("--sequences", type=int, default=64, help="client: connections")
    parser.add_argument("--tokens", type=int, default=256, help="client: of a request, on average")
    parser.add_argument("--out", default="", help="worker and client: JSON of key to times in ns")
    args = parser.parse_args()
    run = {"worker": run_worker, "gateway": run_gateway, "client": run_client}.get(args.role)
    if run is None:
        run = run_link_hop if args.variant == "links" else run_plain_hop
    asyncio.run(run(args))


if __name__ == "__main__":
    main()
