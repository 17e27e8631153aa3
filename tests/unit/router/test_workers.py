"""A router's view of its workers: news in order, however they come."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from protos import worker_pb2
from services.common.config import Settings
from services.common.discovery import Replica
from services.common.link import LinkState
from services.common.peers import Peer
from services.router.breaker import PROBE_S
from services.router.workers import Workers
from tests.support.waiting import until


def blocks(first: int, count: int) -> list[bytes]:
    return [number.to_bytes(16) for number in range(first, first + count)]


def news(stored: list[bytes], snapshot: bool = False) -> bytes:
    told = worker_pb2.WorkerNews(snapshot=snapshot)
    told.events.add(stored=True, hashes=b"".join(stored))
    return told.SerializeToString()


@pytest.fixture
async def workers() -> Workers:
    return Workers(cast(Any, SimpleNamespace(register_script=lambda _: None)), Settings(), "r")


def peer() -> Peer:
    replica = Replica("worker", "w", "127.0.0.1:1", "host", 1, facts={"model": "m"})
    return Peer(replica, cast(Any, None))


async def test_a_snapshot_forgets_what_was_known_and_what_was_still_to_be_taken_in(
    workers: Workers,
) -> None:
    """Events come in slices, so some of the old may wait when the snapshot comes."""
    one = peer()
    old, new = blocks(0, 5000), blocks(10_000, 10)
    workers._on_news(one, news(old))
    assert 0 < len(workers.index) < 5000
    workers._on_news(one, news(new, snapshot=True))
    await until(lambda: workers._chores is None)
    bit = workers._of(one).holder.bit
    assert workers.index.match(new) == {bit: 10}
    assert workers.index.match(old) == {}
    assert workers.index.match(old[2000:]) == {}
    assert len(workers.index) == 10


def serving(workers: Workers, role: str, places: int, state: LinkState = LinkState.READY) -> Peer:
    facts = {"model": "m", "role": role, "max_running": str(places)}
    replica = Replica("worker", f"{role}-{places}", "127.0.0.1:1", "host", 1, facts=facts)
    peer = Peer(replica, cast(Any, SimpleNamespace(state=state)))
    workers._of(peer)
    return peer


async def test_slots_are_the_places_of_those_who_decode(workers: Workers) -> None:
    assert workers.capacity("m") == 0
    serving(workers, "prefill", 1)
    assert workers.capacity("m") == 1, "they are all there is"
    serving(workers, "decode", 10)
    serving(workers, "both", 100, LinkState.CONNECTING)
    leaving = serving(workers, "decode", 1000)
    serving(workers, "decode", 10_000, LinkState.DRAINING)
    assert workers.capacity("m") == 1110
    leaving.left.set()
    assert workers.capacity("m") == 110
    assert workers.capacity("another") == 0


async def test_the_next_try_is_at_the_first_pause_that_is_not_over(workers: Workers) -> None:
    """A worker that takes requests now brings no new chance: who waits would not wait at all."""
    well, ill = (workers._of(serving(workers, "both", places)) for places in (1, 2))
    assert workers.next_try_s("m") == float("inf")
    ill.breaker.began().lost()
    assert well in workers.sound("m")
    assert 0 < workers.next_try_s("m") <= PROBE_S
