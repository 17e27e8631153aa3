"""Links to all replicas of the next service, opened and closed as the registry says.

    routers = Peers(redis, settings, "router", identity="tokenizer", peer_id=self.id)
    await routers.start()
    peer = await routers.pick_least_loaded(patience_s=5.0)   # or raises UNAVAILABLE
    request = peer.link.open(payload, deadline=call.deadline, on_item=forward)

A replica that leaves the registry gets no new requests from here; its link stays open until the
requests on it have ended (a draining replica finishes them) or the link itself is lost.
"""

import asyncio
import contextvars
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from services.common.config import Settings
from services.common.discovery import Directory, Replica
from services.common.errors import unavailable
from services.common.fresh_look import FreshLook
from services.common.link import LinkClient, LinkOptions, LinkState
from services.common.redis import Redis
from services.common.transport import Transport

log = logging.getLogger(__name__)

_IDLE_POLL_S = 0.1  # how soon a link is closed after its last request, once the replica has left
_LOOK_EVERY_S = 0.2
_ALIVE = (LinkState.READY, LinkState.DRAINING)


@dataclass(eq=False)
class Peer:
    """One replica and the link to it."""

    replica: Replica
    link: LinkClient
    left: asyncio.Event = field(default_factory=asyncio.Event)  # the registry no longer lists it

    @property
    def id(self) -> str:
        return self.replica.id

    @property
    def ready(self) -> bool:
        """Whether a request may be opened on it now."""
        return self.link.state is LinkState.READY and not self.left.is_set()


class Peers:
    """Keeps one link per replica of `service` ("tokenizer", "router", "worker").

    All callbacks run on the event loop and must not raise: `on_news(peer, news)` in order, snapshot
    first after each connect; `on_state(peer, state)` at each change of a link's state;
    `on_gone(peer)` last, after the link was closed. A replica that leaves and comes back is a new
    `Peer`.
    """

    def __init__(
        self,
        redis: Redis,
        settings: Settings,
        service: str,
        *,
        identity: str,
        peer_id: str,
        on_news: Callable[[Peer, bytes], None] | None = None,
        on_state: Callable[[Peer, LinkState], None] | None = None,
        on_gone: Callable[[Peer], None] | None = None,
        options: LinkOptions | None = None,
    ) -> None:
        """`identity` is the own service, `peer_id` the own replica's id."""
        self._service = service
        self._method = f"/penstock.v1.{service.capitalize()}/Link"
        self.transport = Transport.of(settings, identity)
        self._peer_id = peer_id
        self._on_news = on_news
        self._on_state = on_state
        self._on_gone = on_gone
        self._options = options or LinkOptions()
        self._directory = Directory(
            redis, settings.namespace, service, settings.lease_s, self._registry_changed
        )
        self.look = FreshLook(self._directory.refresh, _LOOK_EVERY_S)
        self._peers: dict[str, Peer] = {}
        self._lives: set[asyncio.Task[None]] = set()
        self._became_ready = asyncio.Event()

    async def start(self) -> None:
        """Looks into the registry once and begins to connect; returns without waiting for links."""
        await self._directory.start()

    async def stop(self) -> None:
        """Closes all links; their requests end with reason "peer_lost"."""
        await self.look.stop()
        await self._directory.stop()
        for life in self._lives:
            life.cancel()
        if self._lives:
            await asyncio.wait(self._lives)
        self._peers.clear()

    @property
    def redis_reachable(self) -> bool:
        """Whether the registry could be read at the last look."""
        return self._directory.reachable

    def all(self) -> list[Peer]:
        """All that the registry lists, whatever the state of their links."""
        return list(self._peers.values())

    def ready(self) -> list[Peer]:
        """Those that take requests now."""
        return [peer for peer in self._peers.values() if peer.ready]

    async def wait_ready(self, timeout_s: float) -> None:
        """Returns once at least one peer takes requests; raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not self.ready():
                self._became_ready.clear()
                await self._became_ready.wait()

    async def pick_least_loaded(self, patience_s: float = 0.0) -> Peer:
        """The ready peer with the fewest requests of this caller, any of them among equals.

        While there is none, waits up to `patience_s` for one (a restart, an upgrade), then raises
        UNAVAILABLE with the service as stage and reason "no_replica".
        """
        if not self.ready() and patience_s > 0:
            try:
                await self.wait_ready(patience_s)
            except TimeoutError:
                log.warning("no %s became ready in %.1f s", self._service, patience_s)
        ready = self.ready()
        if not ready:
            raise unavailable(
                f"no {self._service} is available", stage=self._service, reason="no_replica"
            )
        return min(ready, key=lambda peer: (peer.link.running, random.random()))

    def _registry_changed(self, added: list[Replica], removed: list[Replica]) -> None:
        for replica in removed:  # before `added`: a replica with a new address is in both
            self._peers.pop(replica.id).left.set()
        for replica in added:
            peer = self._peers[replica.id] = self._make(replica)
            # Whose request looked into the registry is nothing to the link that comes of it.
            life = asyncio.create_task(
                self._live(peer), name=f"peer {replica.id}", context=contextvars.Context()
            )
            self._lives.add(life)
            life.add_done_callback(self._lives.discard)

    def _make(self, replica: Replica) -> Peer:
        def news(payload: bytes) -> None:
            if self._on_news is not None:
                self._on_news(peer, payload)

        def state(state: LinkState) -> None:
            if state is LinkState.READY:
                self._became_ready.set()
            if self._on_state is not None:
                self._on_state(peer, state)

        link = LinkClient(
            replica.address,
            self._method,
            transport=self.transport,
            peer_id=self._peer_id,
            on_news=news,
            on_state=state,
            options=self._options,
        )
        peer = Peer(replica, link)
        return peer

    async def _live(self, peer: Peer) -> None:
        """One peer's life, from its appearance in the registry to the end of its last request."""
        try:
            await peer.link.start()
            await peer.left.wait()
            while peer.link.running and peer.link.state in _ALIVE:  # noqa: ASYNC110 - seldom
                await asyncio.sleep(_IDLE_POLL_S)
        finally:
            peer.left.set()
            await peer.link.close()
            if self._on_gone is not None:
                self._on_gone(peer)
