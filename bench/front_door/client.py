"""The load: connections that ask for chats and note when what comes comes.

    python -m bench.front_door.client '{"address": …, "headers": […], "mode": "closed", …}'

closed   each of `connections` asks again as soon as its answer is whole
open     `rate` chats a second, by chance (exponential gaps), on whichever connection is free: times
         count from when a chat was due

Says "begin" once `warm_s` have passed (or all of `connections` have their first text), "end" after
`seconds`, and then, as JSON, what came in between.
"""

import asyncio
import json
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import uvloop

from bench.front_door.engine import TEXT
from bench.front_door.stack import body

_LAST_CHUNK = b"0\r\n\r\n"  # of a chunked HTTP body
_TEXT = TEXT.encode()
_CONNECTING = 64  # at once


@dataclass
class Seen:
    """In the window."""

    chats: int = 0
    failed: int = 0
    why: str = ""
    tokens: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    whole_ms: list[float] = field(default_factory=list)
    arrived: dict[int, list[int]] = field(default_factory=dict)  # ns, by request; where asked for
    window: tuple[int, int] = (0, 0)  # ns: from when to when


class Connection(asyncio.Protocol):
    """One, kept alive, with one chat at a time."""

    def __init__(self, load: "Load") -> None:
        self._load = load
        self._key = -1
        self._due_ns = 0
        self._tail = b""
        self._heard = self._seen_any = False
        self._stamps: list[int] = []
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._load.free(self)

    def ask(self, key: int, due_ns: int) -> None:
        self._key, self._due_ns = key, due_ns
        self._tail, self._heard, self._seen_any, self._stamps = b"", False, False, []
        self._transport.write(self._load.request(key))

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        seen = self._tail + data
        if not self._heard and not seen.startswith(b"HTTP/1.1 200"):
            self._load.failed(seen)
            self._transport.close()
            return
        self._heard = True
        new = seen.count(_TEXT)
        if new:
            if not self._seen_any:
                self._seen_any = True
                self._load.first(now - self._due_ns)
            self._load.tokens(new)
            self._stamps.extend([now] * new)
        if seen.endswith(_LAST_CHUNK):
            self._load.whole(self._key, now - self._due_ns, self._stamps, seen)
            self._load.free(self)
        else:  # what may be cut in two is looked at again with its rest, but not counted again
            counted = seen.rfind(_TEXT) + len(_TEXT) if new else 0
            self._tail = seen[max(len(seen) - len(_TEXT) + 1, counted, 0) :]

    def connection_lost(self, exc: Exception | None) -> None:
        self._load.lost(self, f"connection lost: {exc}")


class Load:
    def __init__(self, asked: dict[str, Any]) -> None:
        self.seen = Seen()
        self._asked = asked
        self._key = asked.get("first", 0)
        self._counting = False
        self._ending = False
        self._begun = 0
        self._idle: deque[Connection] = deque()  # each has its turn: none waits for long
        self._due: deque[int] = deque()  # chats that wait for a connection, by when they were due
        self._bodies = asked.get("prompt_bytes", 0)
        self._large: bytes | None = None

    def request(self, key: int) -> bytes:
        if self._bodies and self._large is None:
            self._large = body(0, self._asked["tokens"], self._bodies)
        if self._large is not None:
            raw = self._large.replace(b"#0#", b"#%d#" % key, 1)
        else:
            raw = body(key, self._asked["tokens"])
        lines = ["POST /v1/chat/completions HTTP/1.1", f"Host: {self._asked['address']}"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(raw)}"]
        return "\r\n".join([*lines, *self._asked["headers"]]).encode() + b"\r\n\r\n" + raw

    # ---- from the connections ---------------------------------------------------------------

    def free(self, connection: Connection) -> None:
        if self._ending:
            return
        if self._asked["mode"] == "closed":
            self._key += 1
            connection.ask(self._key, time.monotonic_ns())
        elif self._due:
            self._key += 1
            connection.ask(self._key, self._due.popleft())
        else:
            self._idle.append(connection)

    def first(self, after_ns: int) -> None:
        self._begun += 1
        if self._counting:
            self.seen.ttft_ms.append(after_ns / 1e6)

    def tokens(self, count: int) -> None:
        if self._counting:
            self.seen.tokens += count

    def whole(self, key: int, after_ns: int, stamps: list[int], seen: bytes) -> None:
        if self._counting:
            self.seen.chats += 1
            self.seen.whole_ms.append(after_ns / 1e6)
            if self._asked.get("stamps"):
                self.seen.arrived[key] = stamps
            if len(stamps) != self._asked["tokens"]:
                self.failed(b"%d tokens came: %s" % (len(stamps), seen[-400:]))

    def failed(self, seen: bytes) -> None:
        self.seen.failed += 1
        self.seen.why = self.seen.why or seen[:400].decode(errors="replace")

    def lost(self, connection: Connection, why: str) -> None:
        if connection in self._idle:
            self._idle.remove(connection)
        if not self._ending:
            self.failed(why.encode())

    # ---- the run ----------------------------------------------------------------------------

    async def run(self) -> None:
        self._connections = await self._connect()
        if self._asked["mode"] == "open":
            arriving = asyncio.create_task(self._arrive())
        await asyncio.sleep(self._asked["warm_s"])
        missing = self._asked["connections"] if self._asked.get("hold") else 0
        while self._begun < missing and not self.seen.failed:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        self._counting = True
        print("begin", flush=True)
        began = time.monotonic_ns()
        await asyncio.sleep(self._asked["seconds"])
        self.seen.window = (began, time.monotonic_ns())
        if self._asked.get("stamps"):
            for one in self._connections:  # those that still run, too
                self.seen.arrived.setdefault(one._key, list(one._stamps))
        self._counting = False
        print("end", flush=True)
        self._ending = True
        if self._asked["mode"] == "open":
            arriving.cancel()

    async def _connect(self) -> list[Connection]:
        host, port = self._asked["address"].split(":")
        loop = asyncio.get_running_loop()
        made: list[Connection] = []
        slots = asyncio.Semaphore(_CONNECTING)

        async def one() -> None:
            async with slots:
                _, connection = await loop.create_connection(
                    lambda: Connection(self), host, int(port)
                )
                made.append(connection)

        await asyncio.gather(*(one() for _ in range(self._asked["connections"])))
        return made

    async def _arrive(self) -> None:
        chance = random.Random(1)
        due = time.monotonic()
        while True:
            due += chance.expovariate(self._asked["rate"])
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due_ns = int(due * 1e9)
            if self._idle:
                self._key += 1
                self._idle.popleft().ask(self._key, due_ns)
            else:
                self._due.append(due_ns)


def main() -> None:
    load = Load(json.loads(sys.argv[1]))
    run: Callable[[], Any] = load.run
    uvloop.run(run())  # of the load itself as little as may be
    print(json.dumps(vars(load.seen)), flush=True)


if __name__ == "__main__":
    main()
