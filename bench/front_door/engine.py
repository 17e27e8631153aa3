"""A fake engine: tokens without a model, as a worker of ours and behind an OpenAI-compatible door.

    python -m bench.front_door.engine [--pace 100]

A request's first token comes at once, the others `pace` times a second, each at its own phase of
the engine's ticks. Its number stands in its prompt as "#17#"; when each of its tokens left can be
asked for (`GET /left`), on the clock that all processes of the machine share. Prints its ports when
it serves; ends at SIGTERM. Registers as the worker of the first model of PENSTOCK_MODELS.
"""

import argparse
import asyncio
import json
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from tokenizers import Tokenizer

from bench.link_hops import announce, terminated
from protos.common_pb2 import FINISH_LENGTH, Usage
from protos.worker_pb2 import Load, TokenDelta, WorkerNews, WorkRequest
from services.common.checkpoints.checkpoint import digest
from services.common.config import Settings
from services.common.discovery import Registration, Replica, host_id
from services.common.garbage import set_aside
from services.common.link import MAX_FRAME_BYTES, LinkCall, LinkServer, Vitals
from services.common.packed_ids import count, unpack
from services.common.redis import connect
from services.common.transport import Transport, listen

TEXT = "Windmill"  # what each token says: one of the demonstration model's vocabulary
WINDOW = 4_000_000  # tokens: 2 MB of text fit in
_AT_ONCE = 16_384
_TICKS = 200  # a second
_NUMBER = re.compile(r"#(\d+)#")
_LOOKED_AT = 96  # the last tokens of a prompt, where its number is


@dataclass(eq=False)
class _Stream:
    left: int  # tokens
    send: Callable[[bool], None]  # a token, and whether it is the last
    stamps: list[int] = field(default_factory=list)  # ns


class Engine:
    """All streams, each with its tokens due every so many ticks."""

    def __init__(self, pace: float) -> None:
        self.every = max(1, round(_TICKS / pace))
        self.ticks = 0
        self.left: dict[int, list[int]] = {}  # when tokens of each request left
        self.after: Callable[[], None] = lambda: None  # each tick that sent something
        self.running = 0
        self._begun = 0
        self._due: list[set[_Stream]] = [set() for _ in range(self.every)]

    def begin(
        self, tokens: int, send: Callable[[bool], None]
    ) -> tuple[list[int], Callable[[], None]]:
        """Its first token at once. When each left, for `left`, and what ends it early."""
        stream = _Stream(tokens, send)
        self.running += 1
        phase = self._begun % self.every  # spread evenly, however many come in one tick
        self._begun += 1
        self._due[phase].add(stream)
        self._step(stream, phase)

        def end() -> None:
            if stream in self._due[phase]:
                self._due[phase].remove(stream)
                self.running -= 1

        return stream.stamps, end

    async def run(self) -> None:
        due = time.monotonic()
        while True:
            due = max(due + 1 / _TICKS, time.monotonic() - 0.5)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self.ticks += 1
            phase = self.ticks % self.every
            if self._due[phase]:
                for stream in list(self._due[phase]):
                    self._step(stream, phase)
                self.after()

    def _step(self, stream: _Stream, phase: int) -> None:
        stream.stamps.append(time.monotonic_ns())
        stream.left -= 1
        if not stream.left:
            self._due[phase].remove(stream)
            self.running -= 1
        stream.send(not stream.left)


class Worker:
    """The engine as a worker on a link."""

    def __init__(self, engine: Engine, model: Path) -> None:
        self._engine = engine
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        [self._token] = self._tokenizer.encode(TEXT, add_special_tokens=False).ids
        self._delta = TokenDelta(token_ids=[self._token]).SerializeToString()

    def links(self) -> LinkServer:
        engine = self._engine

        def news(snapshot: bool = False) -> bytes:
            return WorkerNews(snapshot=snapshot, load=self._load()).SerializeToString()

        links = LinkServer(
            "/penstock.v1.Worker/Link",
            self._handle,
            vitals=lambda: Vitals(engine.ticks, engine.running),
            snapshot=lambda: [news(snapshot=True)],
            max_requests=_AT_ONCE,
        )
        engine.after = lambda: links.broadcast(news())
        return links

    async def _handle(self, call: LinkCall) -> None:
        work = WorkRequest.FromString(call.payload)
        prompt = work.prompt_token_ids  # perhaps of hundreds of thousands: not to be read
        tokens = work.sampling.max_tokens
        over = asyncio.Event()

        def send(is_last: bool) -> None:
            delta = self._delta
            if is_last:
                usage = Usage(prompt_tokens=count(prompt), completion_tokens=tokens)
                last = TokenDelta(token_ids=[self._token], finish=FINISH_LENGTH, usage=usage)
                delta = last.SerializeToString()
                over.set()
            call.send(delta)

        stamps, end = self._engine.begin(tokens, send)
        call.on_cancel(end)
        await asyncio.sleep(0)  # the first token has left: the rest is nobody's time
        last = unpack(prompt[-_LOOKED_AT * 5 :])[1:].tolist()  # the first may be cut in two
        told = self._tokenizer.decode(last, skip_special_tokens=False)
        self._engine.left[number_in(told)] = stamps
        await over.wait()

    def _load(self) -> Load:
        return Load(
            running=self._engine.running,
            max_running=_AT_ONCE,
            free_blocks=10_000_000,
            total_blocks=10_000_000,
            block_size=16,
        )


def number_in(told: str) -> int:
    return int(_NUMBER.findall(told)[-1])


def registration(address: str) -> Registration:
    """In the registry that the environment names, so that a real router finds this worker."""
    settings = Settings()
    facts = {
        "role": "both",
        "model": settings.models[0].name,
        "digest": digest(Path(settings.models[0].path)),
        "dtype": "float32",
        "block_size": "16",
        "max_running": str(_AT_ONCE),
        "max_model_len": str(WINDOW),
    }
    replica = Replica("worker", "worker-fake", address, host_id("127.0.0.1"), os.getpid())
    replica.facts.update(facts)
    return Registration(connect(settings.redis_dsn), settings.namespace, replica, settings.lease_s)


# ---- as an OpenAI-compatible server ---------------------------------------------------------


def application(engine: Engine) -> Any:
    """POST /v1/chat/completions, streamed; GET /left."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        if scope["path"] == "/left":
            left, engine.left = engine.left, {}
            return await _reply(send, json.dumps(left).encode())
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        asked = json.loads(body)
        if not asked.get("stream"):
            return await _reply(send, json.dumps(_whole(asked)).encode())
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for event in _events(engine, asked):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    return app


async def _reply(send: Any, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _events(engine: Engine, asked: dict[str, Any]) -> AsyncIterator[bytes]:
    tokens: asyncio.Queue[bool] = asyncio.Queue()
    number = number_in(asked["messages"][-1]["content"])
    head: dict[str, Any] = {"id": f"chatcmpl-{number}", "object": "chat.completion.chunk"}
    head |= {"created": int(time.time()), "model": asked["model"]}

    def event(delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n"

    engine.left[number], end = engine.begin(asked["max_tokens"], tokens.put_nowait)
    last, opening = False, {"role": "assistant"}
    try:
        while not last:
            last = await tokens.get()
            yield event({**opening, "content": TEXT})
            opening = {}
        yield event({}, "length")
    finally:
        end()


def _whole(asked: dict[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant", "content": TEXT}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    head = {"id": "chatcmpl-0", "object": "chat.completion", "created": int(time.time())}
    return {**head, "model": asked["model"], "choices": [choice], "usage": usage}


@asynccontextmanager
async def serve_left(engine: Engine) -> AsyncIterator[str]:
    """The HTTP server, and its address."""
    # asyncio sets TCP_NODELAY only on sockets that say that they are TCP.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    config = uvicorn.Config(application(engine), lifespan="off", log_level="critical", backlog=4096)
    server = _Uvicorn(config)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    set_aside()  # a look for garbage holds all streams for 20 to 30 ms, which no front door adds
    yield f"127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    await serving


async def _serve(pace: float) -> None:
    engine = Engine(pace)
    stepping = asyncio.create_task(engine.run())
    options = [("grpc.max_receive_message_length", MAX_FRAME_BYTES)]
    links = Transport.of(Settings(), "cli").server(options)
    Worker(engine, Path(Settings().models[0].path)).links().add_to(links)
    registered = registration(f"127.0.0.1:{listen(links, '127.0.0.1', 0)}")
    await links.start()
    await registered.start()
    async with serve_left(engine) as address:
        announce(address)
        await terminated()
    await registered.stop()
    await links.stop(None)
    stepping.cancel()


class _Uvicorn(uvicorn.Server):
    """The process ends by its own signal handler."""

    def capture_signals(self) -> Any:
        return nullcontext()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pace", type=float, default=100.0, help="tokens a second of each stream")
    uvloop.run(_serve(parser.parse_args().pace))
