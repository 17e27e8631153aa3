"""Workers without a network, for the router's unit tests: each request on them does what the test
says, when it says so. The router's own view of them is the real one."""

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import grpc

from protos import common_pb2, worker_pb2
from services.common.config import Settings
from services.common.discovery import Replica
from services.common.fresh_look import FreshLook
from services.common.link import End, LinkState
from services.common.peers import Peer
from services.router.workers import Worker, Workers

CHECKPOINT = "c0ffee"


class Opened:
    """One request on a scripted worker: `LinkRequest` to the router."""

    def __init__(
        self, log: list[str], worker: str, payload: bytes, on_item: Callable[[bytes], None], at: Any
    ) -> None:
        self.work = worker_pb2.WorkRequest.FromString(payload)
        self.deadline, self.traceparent = at
        self.ends_when_stopped = True
        self._log, self._worker, self._on_item = log, worker, on_item
        self.outcome: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self._silent = False

    def give(
        self,
        *tokens: int,
        finish: int = 0,
        cached: int | None = None,
        logprob: float | None = None,
        pooled: bytes = b"",
    ) -> None:
        """One delta; `cached`: its usage says so many tokens were cached; `logprob`: of each."""
        delta = worker_pb2.TokenDelta(token_ids=tokens, finish=cast(Any, finish), pooled=pooled)
        if cached is not None:
            delta.usage.cached_tokens = cached
        if logprob is not None:
            delta.logprobs.extend([common_pb2.TokenLogprobs(logprob=logprob)] * len(tokens))
        if not self._silent:
            self._on_item(delta.SerializeToString())

    def end(self, code: grpc.StatusCode = grpc.StatusCode.OK, reason: str = "") -> None:
        if not self.outcome.done():
            status = common_pb2.Status(code=code.value[0], message="told", reason=reason)
            record = common_pb2.Record(spans=[common_pb2.Span(name=f"on {self._worker}")])
            self.outcome.set_result(End(status=status, record=record))

    async def ended(self) -> End:
        return await asyncio.shield(self.outcome)

    def stop(self) -> None:
        self._silent = True
        if not self.outcome.done():
            self._log.append(f"stop {self._worker}")
            if self.ends_when_stopped:
                self.end(grpc.StatusCode.CANCELLED, "cancelled")

    def cancel(self) -> None:
        self._silent = True
        if not self.outcome.done():
            self._log.append(f"cancel {self._worker}")
            self.end(grpc.StatusCode.CANCELLED, "cancelled")


class _NoRedis:
    connection_pool = Mock()

    def register_script(self, script: str) -> None:
        """Nothing looks there."""


class Pool:
    """Scripted workers, and the router's view of them. `log` tells what was stopped, in order."""

    def __init__(self, settings: Settings | None = None) -> None:
        redis: Any = _NoRedis()
        self.changes = 0
        self.workers = Workers(redis, settings or Settings(), "r", self._changed)
        self.workers._peers.look = FreshLook(self._look, 0.0)
        self.on_look: Callable[[], object] = lambda: None  # what the registry has to tell by then
        self.opened: dict[str, list[Opened]] = {}
        self.log: list[str] = []

    async def _look(self) -> None:
        self.on_look()

    def _changed(self) -> None:
        self.changes += 1

    def peer(
        self, id: str, role: str = "both", model: str = "m", host: str = "host", **facts: object
    ) -> Peer:
        """Its link takes requests at once. `facts`: as the registry has them."""
        told = {"model": model, "role": role, "digest": CHECKPOINT}
        told |= {name: str(fact) for name, fact in facts.items()}
        replica = Replica("worker", id, f"127.0.0.1:{len(self.opened) + 1}", host, 1, facts=told)
        self.opened[id] = []

        def open_(payload: bytes, *, deadline: float, traceparent: str, on_item: Any) -> Opened:
            made = Opened(self.log, id, payload, on_item, (deadline, traceparent))
            self.opened[id].append(made)
            return made

        link = SimpleNamespace(
            state=LinkState.READY, vitals=SimpleNamespace(steps=0), open=open_, running=0
        )
        peer = Peer(replica, cast(Any, link))
        self.workers._peers._peers[id] = peer
        self.workers._on_state(peer, LinkState.READY)
        return peer

    def worker(self, id: str, *args: Any, **facts: Any) -> Worker:
        peer = self.peer(id, *args, **facts)
        return next(w for w in self.workers.all() if w.peer is peer)

    def gone(self, peer: Peer) -> None:
        """It left, and its last request has ended."""
        del self.workers._peers._peers[peer.id]
        peer.left.set()
        self.workers._on_gone(peer)

    def tell(self, peer: Peer, snapshot: bool = False, **news: Any) -> None:
        """News of the worker: `load`, and `events` as (stored, hashes)."""
        told = worker_pb2.WorkerNews(snapshot=snapshot, load=news.get("load"))
        for stored, hashes in news.get("events", ()):
            told.events.add(stored=stored, hashes=b"".join(hashes))
        self.workers._on_news(peer, told.SerializeToString())


class Call:
    """A `LinkCall` that keeps what is sent."""

    def __init__(self, payload: bytes = b"", timeout_s: float = 60.0) -> None:
        self.payload = payload
        self.deadline = time.monotonic() + timeout_s
        self.traceparent = ""
        self.peer = "tokenizer-1"
        self.deltas: list[worker_pb2.TokenDelta] = []
        self.status: common_pb2.Status | None = None
        self.record = common_pb2.Record()

    @property
    def tokens(self) -> list[int]:
        return [id for delta in self.deltas for id in delta.token_ids]

    def send(self, payload: bytes) -> None:
        self.deltas.append(worker_pb2.TokenDelta.FromString(payload))

    def end(self, status: common_pb2.Status, record: common_pb2.Record) -> None:
        assert self.status is None, "it ends once"
        self.status, self.record = status, record
