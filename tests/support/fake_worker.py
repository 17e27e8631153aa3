"""A worker without an engine, for the router's tests: the real link, registry and news, and tokens
that are a pure function of all tokens before them, as a greedy model's are."""

import asyncio
import zlib
from array import array
from collections.abc import Callable, Sequence

from protos import common_pb2, worker_pb2
from services.common.block_hash import block_hashes, tenant_salt
from services.common.discovery import Registration, Replica
from services.common.errors import PenstockError, unavailable
from services.common.link import LinkCall, LinkServer, Vitals
from services.common.redis import Redis
from services.common.transport import listen
from services.common.waiting import first_done
from services.worker.turns import Turns
from tests.support.prompts import prompt_of
from tests.support.transport import TRANSPORT

BLOCK_SIZE = 16
MODEL = "demo"
CHECKPOINT = "c0ffee"


def next_token(tokens: Sequence[int], seed: int = 0) -> int:
    """What follows these tokens."""
    return zlib.crc32(array("I", tokens).tobytes(), seed & 0xFFFFFFFF) % 50_000


def continuation(prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """The undisturbed answer."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


class Transfers:
    """Stands for PushKv between the fakes: transfer id → first token, once it is committed."""

    def __init__(self) -> None:
        self._commits: dict[str, asyncio.Future[int]] = {}

    def of(self, transfer_id: str) -> "asyncio.Future[int]":
        loop = asyncio.get_running_loop()
        return self._commits.setdefault(transfer_id, loop.create_future())


class FakeWorker:
    """Runs requests as a worker does. Tests steer it by the public fields."""

    def __init__(
        self,
        redis: Redis,
        namespace: str,
        id: str,
        role: str = "both",
        *,
        transfers: Transfers | None = None,
        max_running: int = 8,
        model: str = MODEL,
        checkpoint: str = CHECKPOINT,
    ) -> None:
        self.id = id
        self.requests: list[worker_pb2.WorkRequest] = []
        self.running = 0
        self.cancelled = 0
        self.gate = asyncio.Event()  # tokens come while it is set
        self.gate.set()
        self.hold_after: int | None = None  # of each request's tokens; then it waits for ever
        self.fail_with: PenstockError | None = None  # at the first token
        self.fail_transfer = False
        self.loses_commits = False  # as a decode worker: the hand-over is never seen to end
        self.hold_end = False  # after its last token a request does not end
        self._pushes_broken = asyncio.Event()
        self.poison: int | None = None  # a prompt that begins with it ends the engine
        self.engine_ended = asyncio.Event()
        self.turns = Turns()
        self._leaving: asyncio.Task[None] | None = None
        self.delay_first = asyncio.Event()  # a prefill's first token leaves once it is set
        self.delay_first.set()
        self.steps = 0
        self.stalled = False
        self.step_s = 0.0  # expected of the step under way
        self.load = worker_pb2.Load(
            max_running=max_running,
            free_blocks=1000,
            total_blocks=1000,
            block_size=BLOCK_SIZE,
            prefill_tokens_per_s=2000,
            decode_step_ms=10,
        )
        self.held: dict[bytes, None] = {}
        self.adapters: list[str] = []  # digests of its checkpoint with one
        self._transfers = transfers or Transfers()
        self.links = LinkServer(
            "/penstock.v1.Worker/Link",
            self._serve,
            vitals=self._vitals,
            snapshot=lambda: [self._news(True, [(True, list(self.held))])],
        )
        self.server = TRANSPORT.server()
        self.links.add_to(self.server)
        port = listen(self.server, "127.0.0.1", 0)
        facts = {
            "role": role,
            "model": model,
            "digest": checkpoint,
            "block_size": str(BLOCK_SIZE),
            "max_running": str(max_running),
            "adapters": "",
        }
        self.replica = Replica("worker", id, f"127.0.0.1:{port}", "host", 1, facts=facts)
        self._registration = Registration(redis, namespace, self.replica, lease_s=5.0)

    async def start(self) -> "FakeWorker":
        await self.server.start()
        await self._registration.start()
        return self

    def tell_adapters(self, *digests: str) -> None:
        """It has these from now on."""
        self.adapters = [*digests]
        news = worker_pb2.WorkerNews(adapters=worker_pb2.Adapters(digests=digests))
        self.links.broadcast(news.SerializeToString())

    async def kill(self) -> None:
        """As if by SIGKILL: nothing is said, the registration's lease runs out."""
        if self._registration._task is not None:
            self._registration._task.cancel()
            self._registration._task = None
        await self.server.stop(None)

    async def stop(self) -> None:
        await self._registration.stop()
        await self.server.stop(None)

    def tell(self, stored: Sequence[bytes] = (), evicted: Sequence[bytes] = ()) -> None:
        """News of blocks, and the load as it is now."""
        self.held.update(dict.fromkeys(stored))
        for block in evicted:
            self.held.pop(block, None)
        self.links.broadcast(self._news(False, [(True, stored), (False, evicted)]))

    def _news(self, snapshot: bool, events: Sequence[tuple[bool, Sequence[bytes]]]) -> bytes:
        self.load.running = self.running
        news = worker_pb2.WorkerNews(load=self.load, snapshot=snapshot)
        if snapshot:
            news.adapters.digests.extend(self.adapters)
        for stored, hashes in events:
            if hashes:
                news.events.add(stored=stored, hashes=b"".join(hashes))
        return news.SerializeToString()

    def _vitals(self) -> Vitals:
        if not self.stalled:
            self.steps += 1
        return Vitals(self.steps, self.running, self.step_s)

    async def _serve(self, call: LinkCall) -> None:
        work = worker_pb2.WorkRequest.FromString(call.payload)
        self.requests.append(work)
        self.running += 1
        self.tell()
        try:
            if self.fail_with is not None:
                raise self.fail_with
            async with self.turns.take(work.alone_tokens) as gave:
                if self.engine_ended.is_set():
                    raise unavailable("engine ended", stage="worker", reason="engine_gone")
                if prompt_of(work)[0] == self.poison:
                    self.end_engine()
                await self._run_while_alive(work, call, gave)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
            self.tell()

    def end_engine(self) -> None:
        """All requests end with it, and the worker leaves."""
        if not self.engine_ended.is_set():
            self.engine_ended.set()
            self._leaving = asyncio.create_task(self._leave())

    async def _leave(self) -> None:
        await self._registration.stop()
        await self.links.drain(0.1)

    async def _run_while_alive(
        self, work: worker_pb2.WorkRequest, call: LinkCall, gave: Callable[[int], None]
    ) -> None:
        run = asyncio.create_task(self._run(work, call, gave))
        death = asyncio.create_task(self.engine_ended.wait())
        try:
            await first_done(death, run)
            if death.done():
                raise unavailable("engine ended", stage="worker", reason="engine_died")
            run.result()
        finally:
            run.cancel()
            death.cancel()

    async def _run(
        self, work: worker_pb2.WorkRequest, call: LinkCall, gave: Callable[[int], None]
    ) -> None:
        tokens = prompt_of(work)
        adapter = work.checkpoint if work.checkpoint in self.adapters else ""
        hashes = block_hashes(tokens, BLOCK_SIZE, tenant_salt(work.caller.tenant), adapter)
        cached = 0
        while cached < len(hashes) and hashes[cached] in self.held:
            cached += 1
        cached_tokens = min(cached * BLOCK_SIZE, len(tokens) - 1)
        made = 0
        if work.mode == work.DECODE:
            tokens.append(await self._handed_over(work.transfer_id))
            made = 1
        while True:
            await self.gate.wait()
            if self.hold_after is not None and made >= self.hold_after:
                await asyncio.Event().wait()
            tokens.append(next_token(tokens, work.sampling.seed))
            made += 1
            last = made == work.sampling.max_tokens
            delta = worker_pb2.TokenDelta(token_ids=tokens[-1:])
            if last:
                self._finish(delta, work, common_pb2.FINISH_LENGTH, made, cached_tokens)
            if work.mode == work.PREFILL:
                await self._hand_over(work, call, delta, cached_tokens, last)
            else:
                call.send(delta.SerializeToString())
            gave(1)
            self.tell(stored=hashes[cached:] if made == 1 else ())
            if last and self.hold_end:
                await asyncio.Event().wait()
            if last or work.mode == work.PREFILL:
                return
            await asyncio.sleep(0)

    def break_push(self) -> None:
        """Pushes to this worker break off, the one under way included."""
        self._pushes_broken.set()

    async def _handed_over(self, transfer_id: str) -> int:
        """The first token."""
        token = self._transfers.of(transfer_id)
        broken = asyncio.create_task(self._pushes_broken.wait())
        try:
            await first_done(token, broken)
            if broken.done():
                raise unavailable("the push broke off", stage="worker", reason="kv_transfer")
            if self.loses_commits:
                await asyncio.Event().wait()
            return token.result()
        finally:
            broken.cancel()

    async def _hand_over(
        self,
        work: worker_pb2.WorkRequest,
        call: LinkCall,
        delta: worker_pb2.TokenDelta,
        cached_tokens: int,
        last: bool,
    ) -> None:
        if not last and not self.fail_transfer:
            self._transfers.of(work.transfer_id).set_result(delta.token_ids[0])
        await self.delay_first.wait()
        call.send(delta.SerializeToString())
        if self.fail_transfer:
            raise unavailable("push failed", stage="worker", reason="kv_transfer")
        if not last:
            done = worker_pb2.TokenDelta()
            self._finish(done, work, common_pb2.FINISH_PREFILL_DONE, 1, cached_tokens)
            call.send(done.SerializeToString())

    def _finish(
        self,
        delta: worker_pb2.TokenDelta,
        work: worker_pb2.WorkRequest,
        reason: common_pb2.FinishReason,
        made: int,
        cached_tokens: int,
    ) -> None:
        delta.finish = reason
        delta.usage.prompt_tokens = len(prompt_of(work)) - work.generated_prefix
        delta.usage.cached_tokens = cached_tokens
        delta.usage.completion_tokens = work.generated_prefix + made
