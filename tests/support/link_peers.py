"""Peers for the link tests: real ones, and raw gRPC ends that misbehave."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import grpc
import pytest

from protos.common_pb2 import Hello, LinkDown, LinkUp
from services.common import peers
from services.common.link import MAX_FRAME_BYTES, LinkClient, LinkOptions, LinkServer, LinkState
from services.common.transport import listen
from tests.support.transport import TRANSPORT

METHOD = "/penstock.v1.Router/Link"

# Quick to notice and to retry, but patient enough for a busy machine.
QUICK = LinkOptions(
    connect_timeout_s=2.0,
    heartbeat_s=0.05,
    heartbeat_timeout_s=1.0,
    stall_timeout_s=0.3,
    backoff_s=0.02,
    backoff_max_s=0.1,
)
# No pings within a test: every frame is the test's own.
STILL = LinkOptions(heartbeat_s=60.0, heartbeat_timeout_s=120.0)


@contextmanager
def links_made_anew_at_once() -> Iterator[None]:
    """Of services made within: those lost again and again are waited for no longer each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "LinkOptions", partial(LinkOptions, backoff_max_s=0.1))
        yield


Context = grpc.aio.ServicerContext
Behaviour = Callable[[Context], Awaitable[None]]


def ignore(_item: bytes) -> None:
    """Of an item, or of a frame."""


def soon(seconds: float = 20.0) -> float:
    """A deadline that no passing test reaches."""
    return time.monotonic() + seconds


@asynccontextmanager
async def grpc_server(add: Callable[[grpc.aio.Server], None], port: int = 0) -> AsyncIterator[str]:
    """A server on 127.0.0.1 with what `add` mounts on it; gives its address."""
    limit = ("grpc.max_receive_message_length", MAX_FRAME_BYTES)
    server = TRANSPORT.server([("grpc.so_reuseport", 0), limit])
    add(server)
    port = listen(server, "127.0.0.1", port)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def raw_server(behaviour: Behaviour) -> Callable[[grpc.aio.Server], None]:
    """Mounts a serving end that reads and writes bytes as `behaviour` likes."""

    async def serve(_requests: object, context: Context) -> None:
        await behaviour(context)

    def add(server: grpc.aio.Server) -> None:
        handlers = {"Link": grpc.stream_stream_rpc_method_handler(serve)}
        service = METHOD.split("/")[1]
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))

    return add


async def greet(context: Context) -> None:
    """What a good serving end does first."""
    assert LinkUp.FromString(await context.read()).hello.protocol == 1
    await context.write(LinkDown().SerializeToString())


async def next_open(context: Context) -> int:
    """Reads frames until one opens a request; gives its id."""
    while True:
        frame = LinkUp.FromString(await context.read())
        if frame.open:
            return frame.open[0].id


class Seen:
    """Collects what a client's callbacks are told."""

    def __init__(self) -> None:
        self.items: list[bytes] = []
        self.news: list[bytes] = []
        self.states: list[LinkState] = []


@asynccontextmanager
async def client(
    address: str,
    seen: Seen | None = None,
    options: LinkOptions = QUICK,
    ready: bool = True,
    method: str = METHOD,
) -> AsyncIterator[LinkClient]:
    seen = seen or Seen()
    link = LinkClient(
        address,
        method,
        transport=TRANSPORT,
        peer_id="tokenizer-test",
        on_news=seen.news.append,
        on_state=seen.states.append,
        options=options,
    )
    await link.start()
    try:
        if ready:
            await link.wait_ready(60)
        yield link
    finally:
        await link.close()


@asynccontextmanager
async def linked_to(
    behaviour: Behaviour,
    seen: Seen | None = None,
    options: LinkOptions = QUICK,
    ready: bool = True,
) -> AsyncIterator[LinkClient]:
    """A client of a serving end that does as `behaviour` likes."""
    async with (
        grpc_server(raw_server(behaviour)) as address,
        client(address, seen, options, ready) as link,
    ):
        yield link


@asynccontextmanager
async def linked(
    server: LinkServer, seen: Seen | None = None, options: LinkOptions = QUICK
) -> AsyncIterator[LinkClient]:
    """A good pair: `server` on a port of its own and a client that is READY."""
    async with grpc_server(server.add_to) as address, client(address, seen, options) as link:
        yield link


class RawClient:
    """A calling end that writes what it likes."""

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:
        self.call = call
        self.frames: list[LinkDown] = []

    async def write(self, frame: LinkUp | bytes) -> None:
        raw = frame if isinstance(frame, bytes) else frame.SerializeToString()
        await self.call.write(raw)

    async def read(self) -> LinkDown:
        async with asyncio.timeout(10):
            raw = await self.call.read()
        assert isinstance(raw, bytes), "the server ended the link"
        self.frames.append(LinkDown.FromString(raw))
        return self.frames[-1]

    async def read_until(self, condition: Callable[[LinkDown], object]) -> LinkDown:
        while True:
            frame = await self.read()
            if condition(frame):
                return frame

    async def lost(self) -> str:
        """Reads until the server ends the link, which it must; gives its reason."""
        try:
            while isinstance(raw := await asyncio.wait_for(self.call.read(), 10), bytes):
                self.frames.append(LinkDown.FromString(raw))
        except grpc.aio.AioRpcError as error:
            return error.details() or ""
        return await self.call.details()


@asynccontextmanager
async def raw_client(address: str, *, hello: bool = True) -> AsyncIterator[RawClient]:
    async with TRANSPORT.dial(address, "router") as channel:
        raw = RawClient(channel.stream_stream(METHOD)())
        if hello:
            await raw.write(LinkUp(hello=Hello(protocol=1, peer="raw")))
            await raw.read()
        yield raw
        raw.call.cancel()
