"""Peers against real link servers and a real registry."""

import asyncio
import time

import grpc
import pytest

from services.common import peers as peers_module
from services.common.config import Settings
from services.common.discovery import Registration, Replica
from services.common.errors import PenstockError
from services.common.link import LinkCall, LinkServer, LinkState
from services.common.peers import Peer, Peers
from services.common.redis import Redis
from services.common.telemetry.spans import current_span
from services.common.telemetry.telemetry import Telemetry
from services.common.transport import listen
from tests.support.transport import TRANSPORT
from tests.support.waiting import until

METHOD = "/penstock.v1.Router/Link"


class Served:
    """A registered link server whose requests end when told to."""

    def __init__(self, redis: Redis, namespace: str, id: str) -> None:
        self.release = asyncio.Event()
        self.links = LinkServer(METHOD, self._handle, snapshot=lambda: [f"hello of {id}".encode()])
        self.server = TRANSPORT.server()
        self.links.add_to(self.server)
        port = listen(self.server, "127.0.0.1", 0)
        self.replica = Replica("router", id, f"127.0.0.1:{port}", "host", 1)
        self.registration = Registration(redis, namespace, self.replica, lease_s=0.6)

    async def _handle(self, call: LinkCall) -> None:
        await self.release.wait()
        call.send(b"done")

    async def start(self) -> "Served":
        await self.server.start()
        await self.registration.start()
        return self

    async def stop(self) -> None:
        await self.registration.stop()
        await self.server.stop(None)


@pytest.fixture
def settings(redis_url: str, namespace: str) -> Settings:
    return Settings(redis_url=redis_url, namespace=namespace, lease_s=0.6)


async def test_follows_the_registry(redis, settings, namespace):
    news: list[tuple[str, bytes]] = []
    states: list[tuple[str, LinkState]] = []
    gone: list[str] = []

    def on_gone(peer: Peer) -> None:
        assert peer.link.state is LinkState.CLOSED, "it is the last that is heard of it"
        gone.append(peer.id)

    peers = Peers(
        redis,
        settings,
        "router",
        identity="tokenizer",
        peer_id="tokenizer-1",
        on_news=lambda peer, payload: news.append((peer.id, payload)),
        on_state=lambda peer, state: states.append((peer.id, state)),
        on_gone=on_gone,
    )
    first = await Served(redis, namespace, "router-1").start()
    await peers.start()
    try:
        await peers.wait_ready(10)
        assert [peer.id for peer in peers.ready()] == ["router-1"]
        assert news == [("router-1", b"hello of router-1")]
        second = await Served(redis, namespace, "router-2").start()
        await until(lambda: len(peers.ready()) == 2)
        await first.registration.stop()
        await until(lambda: gone == ["router-1"])
        assert [peer.id for peer in peers.ready()] == ["router-2"]
        assert states[-1] == ("router-1", LinkState.CLOSED)
        await second.stop()
    finally:
        await peers.stop()
        await first.stop()
    assert sorted(gone) == ["router-1", "router-2"]


async def test_running_requests_outlive_the_registration(redis, settings, namespace, monkeypatch):
    monkeypatch.setattr(peers_module, "_IDLE_POLL_S", 0.0)
    gone: list[Peer] = []
    peers = Peers(redis, settings, "router", identity="tokenizer", peer_id="t", on_gone=gone.append)
    replica = await Served(redis, namespace, "router-1").start()
    await peers.start()
    try:
        peer = await peers.pick_least_loaded(patience_s=10)
        items: list[bytes] = []
        request = peer.link.open(b"", deadline=time.monotonic() + 30, on_item=items.append)
        await replica.registration.stop()
        await until(lambda: not peers.ready())
        assert peer.link.state is LinkState.READY
        assert not peer.ready, "who still has it opens nothing on it"
        draining = asyncio.create_task(replica.links.drain(30))
        await until(lambda: peer.link.state is LinkState.DRAINING)
        for _ in range(10):
            await asyncio.sleep(0)  # it is looked whether the link may be closed
        assert not gone
        replica.release.set()
        assert (await request.ended()).status.code == 0
        assert items == [b"done"]
        await until(lambda: gone == [peer])
        await draining
    finally:
        await peers.stop()
        await replica.stop()


async def test_picks_the_least_loaded_and_waits_for_one(redis, settings, namespace):
    peers = Peers(redis, settings, "router", identity="tokenizer", peer_id="t")
    await peers.start()
    replicas = []
    try:
        with pytest.raises(PenstockError) as refused:
            await peers.pick_least_loaded()
        assert (refused.value.code, refused.value.reason, refused.value.stage) == (
            grpc.StatusCode.UNAVAILABLE,
            "no_replica",
            "router",
        )
        waiting = asyncio.create_task(peers.pick_least_loaded(patience_s=10))
        replicas = [await Served(redis, namespace, f"router-{i}").start() for i in (1, 2)]
        assert (await waiting).ready
        await until(lambda: len(peers.ready()) == 2)
        idle = {(await peers.pick_least_loaded()).id for _ in range(64)}
        assert len(idle) == 2, "any among equals: many callers shall not all choose the same one"
        for _ in range(4):
            peer = await peers.pick_least_loaded()
            peer.link.open(b"", deadline=time.monotonic() + 30, on_item=lambda _: None)
        assert [peer.link.running for peer in peers.ready()] == [2, 2]
    finally:
        await peers.stop()
        for replica in replicas:
            await replica.stop()


async def test_a_replica_at_a_new_address_is_a_new_peer(redis, settings, namespace):
    gone: list[Peer] = []
    peers = Peers(redis, settings, "router", identity="tokenizer", peer_id="t", on_gone=gone.append)
    old = await Served(redis, namespace, "router-1").start()
    await peers.start()
    try:
        first = await peers.pick_least_loaded(patience_s=10)
        new = await Served(redis, namespace, "router-1").start()
        old.registration._task.cancel()
        await until(lambda: gone == [first])
        second = await peers.pick_least_loaded(patience_s=10)
        assert second.replica.address == new.replica.address != first.replica.address
        assert peers.all() == [second]
        assert first.link.state is LinkState.CLOSED
        assert not first.ready
    finally:
        await peers.stop()
        await old.stop()
        await new.stop()


async def test_a_peer_that_left_and_is_lost_is_not_waited_for(redis, settings, namespace):
    gone: list[Peer] = []
    peers = Peers(redis, settings, "router", identity="tokenizer", peer_id="t", on_gone=gone.append)
    replica = await Served(redis, namespace, "router-1").start()
    await peers.start()
    try:
        peer = await peers.pick_least_loaded(patience_s=10)
        request = peer.link.open(b"", deadline=time.monotonic() + 600, on_item=lambda _: None)
        await until(lambda: replica.links.running == 1)
        await replica.stop()
        assert (await request.ended()).status.reason == "peer_lost"
        await until(lambda: gone == [peer])
        assert not peers.all()
    finally:
        await peers.stop()


async def test_stopping_ends_the_requests_and_forgets_all(redis, settings, namespace):
    peers = Peers(redis, settings, "router", identity="tokenizer", peer_id="t")
    replica = await Served(redis, namespace, "router-1").start()
    await peers.start()
    try:
        peer = await peers.pick_least_loaded(patience_s=10)
        request = peer.link.open(b"", deadline=time.monotonic() + 600, on_item=lambda _: None)
        assert peers.redis_reachable
    finally:
        await peers.stop()
    assert (await request.ended()).status.reason == "peer_lost"
    assert (peers.all(), peer.link.state) == ([], LinkState.CLOSED)
    await replica.stop()


async def test_a_link_belongs_to_no_request_that_looked_for_it(redis, settings, namespace):
    """It outlives it: the request's spans would stay, and the link's log lines bear its trace."""
    spans: list[object] = []
    peers = Peers(
        redis,
        settings,
        "router",
        identity="tokenizer",
        peer_id="t1",
        on_state=lambda peer, state: spans.append(current_span()),
    )
    await peers.start()
    one = await Served(redis, namespace, "r1").start()
    with Telemetry("tokenizer", "t1").span("a request"):
        await peers.look()
    await peers.wait_ready(5)
    await peers.stop()
    await one.stop()
    assert spans
    assert spans == [None] * len(spans)
