"""A router's view of its workers: news in order, however they come."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from protos import worker_pb2
from services.common.config import Settings
from services.common.discovery import Replica
from services.common.link import LinkState
from services.common.peers import Peer
from services.router.breaker import PROBE_S
from services.router.workers import Workers
from tests.support.block_counts import known
from tests.support.scripted_workers import CHECKPOINT, Pool
from tests.support.waiting import until


def blocks(first: int, count: int) -> list[bytes]:
    return [number.to_bytes(16) for number in range(first, first + count)]


def news(stored: list[bytes], snapshot: bool = False) -> bytes:
    told = worker_pb2.WorkerNews(snapshot=snapshot)
    told.events.add(stored=True, hashes=b"".join(stored))
    return told.SerializeToString()


class NoRedis:
    """Nobody asks it for anything here."""

    connection_pool = Mock()

    def register_script(self, script: str) -> None: ...


@pytest.fixture
async def workers() -> Workers:
    return Workers(cast(Any, NoRedis()), Settings(), "r")


def peer() -> Peer:
    replica = Replica("worker", "w", "127.0.0.1:1", "host", 1, facts={"model": "m"})
    return Peer(replica, cast(Any, None))


async def test_what_is_on_disk_is_told_apart(workers: Workers) -> None:
    one, chain = peer(), blocks(0, 3000)
    told = worker_pb2.WorkerNews.FromString(news(chain[:1000]))
    told.below.add(stored=True, hashes=b"".join(chain[500:]))
    told.below.add(stored=False, hashes=chain[2000])
    workers._on_news(one, told.SerializeToString())
    await until(lambda: workers._chores is None)
    bit = workers._of(one).holder.bit
    assert workers.index.match(chain) == {bit: 1000}
    assert workers.index.match_below(chain) == {bit: (2000, 1000)}
    piece = worker_pb2.WorkerNews()
    piece.below.add(stored=True, hashes=chain[2000])
    workers._on_news(one, piece.SerializeToString())
    await until(lambda: workers._chores is None)
    assert workers.index.match_below(chain) == {bit: (3000, 2000)}
    workers._on_news(one, news(chain[:10], snapshot=True))
    await until(lambda: workers._chores is None)
    assert workers.index.match_below(chain) == {}
    assert known(workers.index) == 10


async def test_news_without_a_load_show_nothing_of_what_was_sent(workers: Workers) -> None:
    one = peer()
    worker, bare, load = workers._of(one), worker_pb2.WorkerNews(), worker_pb2.WorkerNews()
    load.load.SetInParent()
    worker.sent(100)
    for _ in range(5):
        workers._on_news(one, bare.SerializeToString())
    assert len(worker.unseen) == 1
    for left in (1, 0):
        workers._on_news(one, load.SerializeToString())
        assert len(worker.unseen) == left


async def test_a_snapshot_forgets_what_was_known_and_what_was_still_to_be_taken_in(
    workers: Workers,
) -> None:
    """Events come in slices, so some of the old may wait when the snapshot comes."""
    one = peer()
    old, new = blocks(0, 5000), blocks(10_000, 10)
    workers._on_news(one, news(old))
    assert 0 < known(workers.index) < 5000
    workers._on_news(one, news(new, snapshot=True))
    await until(lambda: workers._chores is None)
    bit = workers._of(one).holder.bit
    assert workers.index.match(new) == {bit: 10}
    assert workers.index.match(old) == {}
    assert workers.index.match(old[2000:]) == {}
    assert known(workers.index) == 10


def serving(workers: Workers, role: str, places: int, state: LinkState = LinkState.READY) -> Peer:
    facts = {"model": "m", "digest": CHECKPOINT, "role": role, "max_running": str(places)}
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
    assert workers.next_try_s("m", CHECKPOINT) == float("inf")
    ill.breaker.began().lost()
    assert well in workers.sound("m", CHECKPOINT)
    assert 0 < workers.next_try_s("m", CHECKPOINT) <= PROBE_S


async def test_workers_of_another_model_are_no_help() -> None:
    """Neither to run on, nor to compare a worker with, nor to say that one is not alone."""
    pool = Pool()
    one, other = pool.worker("one"), pool.worker("other", model="another")
    assert pool.workers.ready("m", CHECKPOINT) == pool.workers.sound("m", CHECKPOINT) == [one]
    assert one.peers_failed_share() is None
    other.breaker.began().lost()
    one.breaker.began().lost()
    for _ in range(3):  # its probes, so that its pause is long
        one.breaker.began().lost()
    assert pool.workers.breakers_open() == 2
    assert 0 < pool.workers.next_try_s("m", CHECKPOINT) <= PROBE_S, "it is alone"
    pool.worker("third", model="another")
    assert pool.workers.next_try_s("m", CHECKPOINT) <= PROBE_S
    peer = pool.worker("fourth")
    assert pool.workers.next_try_s("m", CHECKPOINT) > PROBE_S, "it is not any more"
    peer.breaker.began().lost()
    assert pool.workers.next_try_s("m", CHECKPOINT) <= PROBE_S
    assert pool.workers.breakers_open() == 3


async def test_a_workers_failures_are_compared_with_the_mean_of_its_peers() -> None:
    pool = Pool()
    one, good, bad = (pool.worker(id) for id in ("one", "good", "bad"))
    assert one.peers_failed_share() == 0
    for _ in range(3):
        good.breaker.began().succeeded()
        bad.breaker.began().failed(None)
        one.breaker.began().failed(None)
    assert one.peers_failed_share() == 0.5
    assert good.peers_failed_share() == 1.0
    bad.peer.left.set()
    assert one.peers_failed_share() == 0, "who left is no peer"
    cast(Any, good.link).state = LinkState.DRAINING
    assert one.peers_failed_share() is None
    assert pool.workers.ready("m", CHECKPOINT) == [one]


async def test_a_workers_facts_and_what_its_load_says_of_them() -> None:
    pool = Pool()
    told = pool.peer("told", block_size=32, max_running=5)
    assert [w.id for w in pool.workers.ready("m", CHECKPOINT)] == ["told"], (
        "before it has told any news"
    )
    bare = pool.worker("bare")
    worker = pool.workers._of(told)
    assert (worker.block_size, worker.max_running) == (32, 5)
    assert (bare.block_size, bare.max_running) == (16, 1)
    load = worker_pb2.Load(block_size=8, max_running=7)
    for peer in (told, bare.peer):
        pool.tell(peer, load=load)
    assert (worker.block_size, worker.max_running) == (8, 5)
    assert (bare.block_size, bare.max_running) == (8, 7)
    assert (bare.role, bare.model) == ("both", "m")


async def test_what_was_sent_counts_until_two_news_have_come() -> None:
    pool = Pool()
    worker = pool.worker("w")
    first = worker.sent(100)
    pool.tell(worker.peer, load=worker_pb2.Load())
    second = worker.sent(200)
    waits = worker.sent(300, until_answered=True)
    assert worker.unseen == [first, second, waits]
    pool.tell(worker.peer, load=worker_pb2.Load())
    assert worker.unseen == [second, waits]
    for _ in range(5):
        pool.tell(worker.peer, load=worker_pb2.Load())
    assert worker.unseen == [waits]
    other = worker.sent(400, until_answered=True)
    worker.answered(other)
    assert worker.unseen == [waits], "of others an answer says nothing"
    for _ in range(2):
        worker.answered(waits)
    assert worker.unseen == []


async def test_news_without_a_load_keep_the_last_one() -> None:
    pool = Pool()
    worker = pool.worker("w")
    pool.tell(worker.peer, load=worker_pb2.Load(running=3))
    pool.tell(worker.peer, events=[(True, blocks(0, 2))])
    assert worker.load.running == 3


async def test_news_are_taken_in_in_their_order_in_slices() -> None:
    """More than one turn of the loop can take in, of two workers at once."""
    pool = Pool()
    one, other = pool.peer("one"), pool.peer("other")
    many = blocks(0, 3000)
    events = [(True, many), (False, many[1:]), (True, many[2000:]), (False, many[2500:])]
    for peer in (one, other):
        pool.tell(peer, events=events)
    assert known(pool.workers.index) <= 1024, "no more at once"
    await until(lambda: pool.workers._chores is None)
    bits = {pool.workers._of(peer).holder.bit for peer in (one, other)}
    match = pool.workers.index.match
    assert match(many) == dict.fromkeys(bits, 1)
    assert match(many[2000:]) == dict.fromkeys(bits, 500)
    assert known(pool.workers.index) == 501
    pool.tell(one, events=[(True, blocks(5000, 10))])
    assert match(blocks(5000, 10)) == {pool.workers._of(one).holder.bit: 10}, "few at once"


async def test_what_is_on_ones_disk_holds_up_nothing_that_is_on_a_device(
    workers: Workers,
) -> None:
    """A worker that is attached with a full disk tells of a million blocks at once."""
    first, second, third = (serving(workers, "both", places) for places in (1, 2, 3))
    disks = {peer: blocks(n * 10_000, 4000) for n, peer in enumerate((first, second), 1)}
    for peer, held in disks.items():
        told = worker_pb2.WorkerNews()
        told.below.add(stored=True, hashes=b"".join(held))
        workers._on_news(peer, told.SerializeToString())
    chain = blocks(0, 1000)
    workers._on_news(third, news(chain))
    await asyncio.sleep(0)
    assert workers.index.match(chain) == {workers._of(third).holder.bit: 1000}
    while workers._chores is not None:
        come = [len(workers._of(peer).holder.below) for peer in (first, second)]
        assert abs(come[0] - come[1]) <= 2048, "in turns"
        await asyncio.sleep(0)
    for peer, held in disks.items():
        assert workers.index.match_below(held) == {workers._of(peer).holder.bit: (4000, 4000)}


async def test_a_device_with_many_blocks_holds_up_no_other(workers: Workers) -> None:
    first, second = (serving(workers, "both", places) for places in (1, 2))
    workers._on_news(first, news(blocks(10_000, 5000)))
    workers._on_news(second, news(blocks(0, 10)))
    await asyncio.sleep(0)
    assert workers.index.match(blocks(0, 10)) == {workers._of(second).holder.bit: 10}


async def test_what_a_worker_held_goes_with_it() -> None:
    pool = Pool()
    one, other = pool.peer("one"), pool.peer("other")
    held = blocks(0, 3000)
    pool.tell(one, events=[(True, held)])
    pool.tell(other, events=[(True, held[:1])])
    await until(lambda: pool.workers._chores is None)
    changes = pool.changes
    pool.gone(one)
    assert pool.changes == changes + 1
    assert pool.workers.index.match(held) == {pool.workers._of(other).holder.bit: 1}
    assert [w.id for w in pool.workers.all()] == ["other"]
    await until(lambda: pool.workers._chores is None)
    assert known(pool.workers.index) == 1
    assert pool.workers.models() == {"m"}


async def test_how_many_take_requests_is_told_also_when_none_is_left(workers: Workers) -> None:
    """A series that ends at its last value would look like a worker that serves."""
    serving(workers, "decode", 1)
    only = serving(workers, "prefill", 1)
    serving(workers, "decode", 2, LinkState.CONNECTING)
    assert workers.ready_counts({"m"}) == {("m", "decode"): 1, ("m", "prefill"): 1}
    only.left.set()
    assert workers.ready_counts({"m"}) == {("m", "decode"): 1, ("m", "prefill"): 0}
    workers._on_gone(only)
    assert workers.ready_counts({"m"}) == {("m", "decode"): 1, ("m", "prefill"): 0}


async def test_ready_workers_are_counted_while_their_model_is_wanted() -> None:
    """By the registry: a wanted model without a worker is a zero, one that was removed is none."""
    pool = Pool()
    one, other = pool.peer("p", "prefill"), pool.peer("d", "decode")
    counts = pool.workers.ready_counts
    assert counts({"m"}) == {("m", "prefill"): 1, ("m", "decode"): 1}
    cast(Any, other.link).state = LinkState.DEAD
    assert counts({"m"}) == {("m", "prefill"): 1, ("m", "decode"): 0}
    pool.gone(other)
    assert counts({"m"}) == {("m", "prefill"): 1, ("m", "decode"): 0}, "it was there once"
    one.left.set()
    assert counts({"m", "never"}) == {
        ("m", "prefill"): 0,
        ("m", "decode"): 0,
        ("never", "both"): 0,
    }, "of one that this router never saw a worker of, too"
    assert counts(set()) == {}, "what runs on it still is nobody's alarm"
    assert counts({"m"}) == {("m", "both"): 0}


async def test_a_checkpoint_is_replaced_when_none_of_it_is_left_and_another_is_ready() -> None:
    pool = Pool()
    workers = pool.workers
    old = pool.peer("old")
    assert not await workers.replaced("m", CHECKPOINT)
    assert not await workers.replaced("nothing", CHECKPOINT)
    new = pool.peer("new", digest="new")
    assert not await workers.replaced("m", CHECKPOINT), "both are served"
    cast(Any, old.link).state = LinkState.CONNECTING
    assert not await workers.replaced("m", CHECKPOINT), "it is about to be ready"
    cast(Any, old.link).state = LinkState.DRAINING
    assert await workers.replaced("m", CHECKPOINT)
    assert [w.id for w in workers.ready("m", "new")] == ["new"]
    assert workers.ready("m", CHECKPOINT) == workers.sound("m", CHECKPOINT) == []
    cast(Any, new.link).state = LinkState.DEAD
    assert not await workers.replaced("m", CHECKPOINT), "there is nothing to go over to"


async def test_who_waits_for_a_change_hears_of_each() -> None:
    pool = Pool()
    worker = pool.worker("w")

    async def hears(of: Any) -> None:
        waits = asyncio.create_task(pool.workers.changed(60.0))
        await asyncio.sleep(0)
        assert not waits.done(), "of what was before it does not"
        of()
        await asyncio.wait_for(waits, 5)

    changes = pool.changes
    await hears(lambda: pool.peer("another"))
    await hears(lambda: pool.workers._on_state(worker.peer, LinkState.DEAD))
    assert pool.changes == changes + 2
    await hears(lambda: worker.breaker.began().lost())  # the others may be alone now
    await hears(pool.workers.poke)
    assert pool.changes == changes + 2, "slots are as many as before"
    await hears(lambda: pool.gone(worker.peer))
    await pool.workers.changed(0.0)  # nothing happens, and it waits no longer
    await pool.workers.stop()
