"""The workers as this router sees them: links, roles, load, and the KV blocks that each holds."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from protos import worker_pb2
from services.common.block_hash import DIGEST_SIZE
from services.common.config import Settings
from services.common.discovery import Replica
from services.common.link import LinkClient, LinkOptions, LinkState
from services.common.peers import Peer, Peers
from services.common.redis import Redis
from services.router.block_index import BlockIndex, Holder
from services.router.breaker import Breaker, State

_SLICE = 1024  # block hashes taken or freed in one turn of the loop, well under a millisecond
_NEWS_TO_SHOW = 2  # news of its load until a sent request is surely part of the reported load

PREFILL_ROLES = ("prefill", "both")
DECODE_ROLES = ("decode", "both")


@dataclass(eq=False)
class Sent:
    """A request on its way to a worker that its reported load may not show yet."""

    prefill_tokens: int
    news_left: float = _NEWS_TO_SHOW


class Event(NamedTuple):
    """Blocks that came or went."""

    stored: bool
    hashes: bytes


@dataclass(eq=False)
class Worker:
    """One worker. `load` is as of its last news; `unseen` is what was sent since."""

    peer: Peer
    holder: Holder
    load: worker_pb2.Load
    unseen: list[Sent] = field(default_factory=list)
    events: deque[Event] = field(default_factory=deque)  # of its device, not yet in the index
    below: deque[Event] = field(default_factory=deque)  # the same of its disk
    prefill_measured_s: float = field(default_factory=time.monotonic)  # when its rates last moved
    step_measured_s: float = field(default_factory=time.monotonic)
    breaker: Breaker = field(default_factory=Breaker)
    peers: Callable[[], "list[Worker]"] = list  # the others of its checkpoint
    adapters: frozenset[str] | None = None  # digests, as of its news; None: it has told none yet

    def waiting(self, below: bool) -> deque[Event]:
        """Its news that are not in the index yet."""
        return self.below if below else self.events

    @property
    def id(self) -> str:
        return self.peer.id

    @property
    def replica(self) -> Replica:
        return self.peer.replica

    @property
    def link(self) -> LinkClient:
        return self.peer.link

    @property
    def model(self) -> str:
        return self.replica.facts.get("model", "")

    @property
    def checkpoint(self) -> str:
        """Its digest."""
        return self.replica.facts.get("digest", "")

    def serves(self, checkpoint: str) -> bool:
        """Its own, or that with an adapter."""
        return checkpoint == self.checkpoint or checkpoint in (self.adapters or ())

    def may_serve(self, checkpoint: str) -> bool:
        """Which adapters it has it tells with its first news."""
        untold = self.adapters is None and "adapters" in self.replica.facts
        return untold or self.serves(checkpoint)

    @property
    def kv_format(self) -> tuple[str, str]:
        """Equal where one's blocks are the other's, of one checkpoint."""
        return self.replica.facts.get("kv_format", ""), self.replica.facts.get("block_size", "")

    @property
    def role(self) -> str:
        return self.replica.facts.get("role", "both")

    @property
    def block_size(self) -> int:
        return self.load.block_size or int(self.replica.facts.get("block_size", "16"))

    @property
    def max_running(self) -> int:
        return int(self.replica.facts.get("max_running", "0")) or self.load.max_running or 1

    def learn(self, load: worker_pb2.Load) -> None:
        """Takes its load as it is now."""
        now = time.monotonic()
        if load.prefill_tokens_per_s != self.load.prefill_tokens_per_s:
            self.prefill_measured_s = now
        if load.decode_step_ms != self.load.decode_step_ms:
            self.step_measured_s = now
        self.load = load

    def sent(self, prefill_tokens: int, until_answered: bool = False) -> Sent:
        """Notes a request that is opened on this worker now.

        `until_answered`: its load may not show the request for any number of news.
        """
        sent = Sent(prefill_tokens, math.inf if until_answered else _NEWS_TO_SHOW)
        self.unseen.append(sent)
        return sent

    def answered(self, sent: Sent) -> None:
        """Its first token or its end came: there is nothing left to add to the reported load."""
        if sent in self.unseen:
            self.unseen.remove(sent)

    def peers_failed_share(self) -> float | None:
        """Of failed requests, the mean over the model's other workers; None if there are none."""
        shares = [peer.breaker.failed_share for peer in self.peers()]
        return sum(shares) / len(shares) if shares else None


class Workers:
    """All workers of all models."""

    def __init__(
        self,
        redis: Redis,
        settings: Settings,
        router_id: str,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called when a worker came, went or changed its state."""
        self.index = BlockIndex()
        self._workers: dict[Peer, Worker] = {}
        self._shown: set[tuple[str, str]] = set()  # models and roles in `ready_counts`
        self._on_change = on_change
        self._changed = asyncio.Event()
        self._chores: asyncio.Handle | None = None
        self._first = {False: 0, True: 0}  # worker whose events are next, by `below`
        self._peers = Peers(
            redis,
            settings,
            "worker",
            identity="router",
            peer_id=router_id,
            on_news=self._on_news,
            on_state=self._on_state,
            on_gone=self._on_gone,
            options=LinkOptions(stall_timeout_s=settings.router.stall_timeout_s),
        )

    async def start(self) -> None:
        await self._peers.start()

    async def stop(self) -> None:
        await self._peers.stop()
        if self._chores is not None:
            self._chores.cancel()

    def all(self) -> list[Worker]:
        """Whatever their state, those that the registry lists no longer included until they end."""
        for peer in self._peers.all():
            self._of(peer)
        return list(self._workers.values())

    def ready(self, model: str, checkpoint: str) -> list[Worker]:
        """Those of the model's checkpoint that take requests now."""
        return [w for w in self._ready(model) if w.serves(checkpoint)]

    def _ready(self, model: str) -> list[Worker]:
        return [w for w in self._workers.values() if w.peer.ready and w.model == model]

    async def replaced(self, model: str, checkpoint: str) -> bool:
        """Whether workers of another checkpoint are ready, and none of this one is nor comes; that
        none comes is looked up anew."""
        if self._is_replaced(model, checkpoint):
            await self._peers.look()
        return self._is_replaced(model, checkpoint)

    def _is_replaced(self, model: str, checkpoint: str) -> bool:
        left = any(w.may_serve(checkpoint) for w in self._linked(model))
        return not left and bool(self._ready(model))

    def sound(self, model: str, checkpoint: str) -> list[Worker]:
        """Those of the ready whose breakers take a request now."""
        ready = self.ready(model, checkpoint)
        alone = _none_closed(ready)
        return [w for w in ready if w.breaker.takes(alone)]

    def next_try_s(self, model: str, checkpoint: str) -> float:
        """Until one more of the ready is sound, if nothing changes; infinite: then none will be.

        To be asked before `sound`: the pause that ends between the two is then found over.
        """
        ready = self.ready(model, checkpoint)
        alone = _none_closed(ready)
        times = (w.breaker.takes_in(alone) for w in ready)
        return min((s for s in times if s > 0), default=math.inf)

    def breakers_open(self) -> int:
        """Workers that are left alone, or tried."""
        return sum(w.breaker.state is not State.CLOSED for w in list(self._workers.values()))

    def ready_counts(self, listed: set[str]) -> dict[tuple[str, str], int]:
        """How many take requests now, by model and role; zero for each role that a `listed` model
        once had here, and for one without any, of whatever role.

        The metrics' thread calls this: it looks at copies.
        """
        workers = [w for w in list(self._workers.values()) if not w.peer.left.is_set()]
        found = {(w.model, w.role) for w in workers}
        self._shown = found | {(model, role) for model, role in self._shown if model in listed}
        bare = listed - {model for model, _ in self._shown}
        counts = dict.fromkeys([*self._shown, *((model, "both") for model in bare)], 0)
        for worker in workers:
            counts[worker.model, worker.role] += worker.peer.ready
        return counts

    def models(self) -> set[str]:
        """Of the workers that the registry lists."""
        return {peer.replica.facts.get("model", "") for peer in self._peers.all()}

    def capacity(self, model: str) -> int:
        """Sequences of the model that can decode at once.

        Workers that decode count; prefill workers hold a sequence only for its prompt, so they
        count only while they are all there is. A worker not linked yet counts, a lost one does not.
        """
        counted = [(w.role, w.max_running) for w in self._linked(model)]
        decoding = sum(n for role, n in counted if role in DECODE_ROLES)
        return decoding or sum(n for _, n in counted)

    def _linked(self, model: str) -> list[Worker]:
        """Those that take requests, or soon."""
        return [
            w
            for w in self.all()
            if w.model == model
            and not w.peer.left.is_set()
            and w.link.state in (LinkState.CONNECTING, LinkState.READY)
        ]

    async def changed(self, timeout_s: float) -> None:
        """Returns when a worker came, went or changed its state, or after `timeout_s`."""
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def _of(self, peer: Peer) -> Worker:
        if peer not in self._workers:
            breaker = Breaker(on_change=self.poke)
            worker = Worker(peer, self.index.add(), worker_pb2.Load(), breaker=breaker)
            worker.peers = lambda: [
                w for w in self.ready(worker.model, worker.checkpoint) if w is not worker
            ]
            self._workers[peer] = worker
        return self._workers[peer]

    def _on_news(self, peer: Peer, payload: bytes) -> None:
        news = worker_pb2.WorkerNews.FromString(payload)
        worker = self._of(peer)
        if news.HasField("adapters"):
            worker.adapters = frozenset(news.adapters.digests)
            self._tell_change()
        if news.HasField("load"):
            worker.learn(news.load)
            for sent in worker.unseen:
                sent.news_left -= 1
            worker.unseen = [sent for sent in worker.unseen if sent.news_left > 0]
        if news.snapshot:
            worker.events.clear()
            worker.below.clear()
            self.index.remove(worker.holder)
            worker.holder = self.index.add()
        for below, told in ((False, news.events), (True, news.below)):
            worker.waiting(below).extend(Event(one.stored, one.hashes) for one in told)
        self._do_chores()

    def _on_state(self, peer: Peer, state: LinkState) -> None:
        self._of(peer)
        self._tell_change()

    def _on_gone(self, peer: Peer) -> None:
        self.index.remove(self._of(peer).holder)
        del self._workers[peer]
        self._tell_change()
        self._do_chores()

    def poke(self) -> None:
        """Wakes those who wait for a change: something else has changed that they look at."""
        self._changed.set()

    def _tell_change(self) -> None:
        self._changed.set()
        self._on_change()

    def _do_chores(self) -> None:
        """Takes in events and sweeps, at most a slice of each per turn of the loop. What workers
        have on their devices comes first: on disk one may have a million blocks."""
        if self._chores is not None:
            return
        left = self._take_in_all(_SLICE, below=False)
        self._take_in_all(left, below=True)
        waiting = any(w.events or w.below for w in self._workers.values())
        if self.index.sweep(_SLICE) or waiting:
            self._chores = asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._chores = None
        self._do_chores()

    def _take_in_all(self, limit: int, *, below: bool) -> int:
        """From one worker after the other, behind the one where the last slice ended; returns how
        many hashes more the slice may have."""
        workers = list(self._workers.values())
        for n in range(first := self._first[below], first + len(workers)):
            worker = workers[n % len(workers)]
            while limit > 0 and worker.waiting(below):
                limit -= self._take_in(worker, limit, below)
            if limit <= 0:
                self._first[below] = (n + 1) % len(workers)
                break
        return limit

    def _take_in(self, worker: Worker, limit: int, below: bool) -> int:
        """Applies the worker's oldest event, or its first `limit` hashes; returns how many."""
        events = worker.waiting(below)
        event = events.popleft()
        raw = event.hashes
        if len(raw) > limit * DIGEST_SIZE:
            events.appendleft(event._replace(hashes=raw[limit * DIGEST_SIZE :]))
            raw = raw[: limit * DIGEST_SIZE]
        hashes = [raw[i : i + DIGEST_SIZE] for i in range(0, len(raw), DIGEST_SIZE)]
        apply = self.index.store if event.stored else self.index.evict
        apply(worker.holder, hashes, below)
        return max(1, len(hashes))


def _none_closed(workers: list[Worker]) -> bool:
    return all(w.breaker.state is not State.CLOSED for w in workers)
