"""Links between two good peers: what is promised when nobody misbehaves."""

import asyncio
import contextlib
import random
from collections.abc import Iterator

import grpc
import pytest

from protos import router_pb2_grpc
from protos.common_pb2 import Decision, Record
from services.common.errors import PenstockError, invalid
from services.common.link import LinkCall, LinkClient, LinkServer, LinkState, Vitals
from services.common.link import client as link_client
from tests.support.link_peers import (
    METHOD,
    QUICK,
    STILL,
    Seen,
    client,
    grpc_server,
    ignore,
    linked,
    soon,
)
from tests.support.transport import TRANSPORT
from tests.support.waiting import until

CANCELLED = grpc.StatusCode.CANCELLED.value[0]
DEADLINE_EXCEEDED = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
INTERNAL = grpc.StatusCode.INTERNAL.value[0]
INVALID_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT.value[0]
RESOURCE_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE.value[0]


class Held:
    """A handler whose requests stay open for the test to play with."""

    def __init__(self) -> None:
        self.calls: list[LinkCall] = []
        self.log: list[str] = []
        self.release = asyncio.Event()

    async def __call__(self, call: LinkCall) -> None:
        self.calls.append(call)
        call.on_cancel(lambda: self.log.append("on_cancel"))
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.log.append("task")
            raise


async def echo(call: LinkCall) -> None:
    """Sends each byte of the payload as an item."""
    for byte in call.payload:
        call.send(bytes([byte]))


async def test_a_request_carries_its_parts_and_gives_items_in_order_then_its_end() -> None:
    calls: list[LinkCall] = []

    async def handler(call: LinkCall) -> None:
        calls.append(call)
        for n in range(100):
            call.send(b"%d" % n)
            if n % 10 == 0:
                await asyncio.sleep(0)
        call.end(record=Record(decisions=[Decision(stage="router", choice="w1")]))

    async with linked(LinkServer(METHOD, handler)) as link:
        items: list[bytes] = []
        deadline = soon(30)
        request = link.open(b"in", deadline=deadline, traceparent="00-ab", on_item=items.append)
        end = await request.ended()
    assert items == [b"%d" % n for n in range(100)]
    assert end.status.code == 0
    assert end.record.decisions[0].choice == "w1"
    call = calls[0]
    assert (call.payload, call.traceparent, call.peer) == (b"in", "00-ab", "tokenizer-test")
    assert call.deadline == pytest.approx(deadline, abs=1.0)
    assert not call.cancelled


async def test_one_loop_turn_makes_one_frame() -> None:
    held = Held()
    server = LinkServer(METHOD, held, vitals=lambda: Vitals(7, 64, 1.5))
    seen = Seen()
    async with linked(server, seen, STILL) as link:
        requests = [link.open(b"", deadline=soon(), on_item=seen.items.append) for _ in range(64)]
        await until(lambda: len(held.calls) == 64)
        frames = link.counters.frames
        for step in range(10):
            for call in held.calls:
                call.send(b"%d" % step)
            server.broadcast(b"news %d" % step)
            await until(lambda step=step: len(seen.items) == 64 * (step + 1))
            assert link.counters.frames == frames + step + 1
        for call in held.calls:
            call.send(b"last")
            call.end()
        for request in requests:
            assert (await request.ended()).status.code == 0
        assert link.counters.frames == frames + 11
        assert seen.items[-64:] == [b"last"] * 64
        assert seen.news == [b"news %d" % step for step in range(10)]
        assert link.vitals == Vitals(7, 64, 1.5)


async def test_a_hop_in_the_middle_keeps_one_frame_per_step() -> None:
    held = Held()
    async with linked(LinkServer(METHOD, held), None, STILL) as below:

        async def hop(call: LinkCall) -> None:
            request = below.open(call.payload, deadline=call.deadline, on_item=call.send)
            call.end((await request.ended()).status)

        async with linked(LinkServer(METHOD, hop), None, STILL) as above:
            items: list[bytes] = []
            for _ in range(32):
                above.open(b"", deadline=soon(), on_item=items.append)
            await until(lambda: len(held.calls) == 32)
            before = above.counters.frames, below.counters.frames
            for step in range(5):
                for call in held.calls:
                    call.send(b"token")
                await until(lambda step=step: len(items) == 32 * (step + 1))
            assert above.counters.frames - before[0] == 5
            assert below.counters.frames - before[1] == 5


async def test_opens_of_one_turn_share_a_frame_and_large_payloads_pass() -> None:
    async def size(call: LinkCall) -> None:
        call.send(call.payload)

    async with linked(LinkServer(METHOD, size)) as link:
        payloads = [random.Random(n).randbytes(6 * 2**20) for n in range(3)]
        got: dict[int, bytes] = {}
        requests = [
            link.open(payload, deadline=soon(), on_item=lambda item, n=n: got.update({n: item}))
            for n, payload in enumerate(payloads)
        ]
        for request in requests:
            assert (await request.ended()).status.code == 0
        assert [got[n] for n in range(3)] == payloads


async def test_a_failing_handler_harms_only_its_request() -> None:
    async def handler(call: LinkCall) -> None:
        if call.payload == b"penstock":
            raise invalid("too hot", "temperature", reason="range")
        if call.payload == b"bug":
            raise KeyError("secret prompt text")
        if call.payload == b"cancels itself":
            raise asyncio.CancelledError
        await echo(call)

    async with linked(LinkServer(METHOD, handler)) as link:
        open_ = {
            what: link.open(what, deadline=soon(), on_item=ignore)
            for what in (b"penstock", b"bug", b"cancels itself", b"fine")
        }
        ends = {what: (await request.ended()).status for what, request in open_.items()}
    refused = PenstockError.from_status(ends[b"penstock"])
    assert (refused.code, refused.param) == (grpc.StatusCode.INVALID_ARGUMENT, "temperature")
    assert (refused.stage, refused.reason) == ("router", "range")
    assert (ends[b"bug"].code, ends[b"bug"].reason) == (INTERNAL, "internal")
    assert "secret" not in ends[b"bug"].message
    assert ends[b"cancels itself"].code == CANCELLED
    assert ends[b"fine"].code == 0


async def test_a_second_end_and_items_after_the_end_are_ignored() -> None:
    async def handler(call: LinkCall) -> None:
        call.send(b"in time")
        call.end()
        call.send(b"late")
        call.end(invalid("too late", "x").to_status())
        raise ValueError("after the end")

    server = LinkServer(METHOD, handler)
    async with linked(server) as link:
        items: list[bytes] = []
        end = await link.open(b"", deadline=soon(), on_item=items.append).ended()
        await until(lambda: not server.tasks)
        assert end.status.code == 0
        assert items == [b"in time"]
        assert link.counters.strays == 0
        assert server.running == 0


async def test_an_on_item_that_raises_ends_its_request_alone() -> None:
    held = Held()
    async with linked(LinkServer(METHOD, held)) as link:

        def broken(_item: bytes) -> None:
            raise RuntimeError("no")

        items: list[bytes] = []
        bad = link.open(b"", deadline=soon(), on_item=broken)
        good = link.open(b"", deadline=soon(), on_item=items.append)
        await until(lambda: len(held.calls) == 2)
        for call in held.calls:
            call.send(b"x")
        end = await bad.ended()
        assert (end.status.code, end.status.reason) == (INTERNAL, "internal")
        await until(lambda: held.calls[0].cancelled)
        held.calls[1].end()
        assert (await good.ended()).status.code == 0
        assert items == [b"x"]


async def test_cancel_reaches_the_handler_and_resolves_at_once() -> None:
    held = Held()
    server = LinkServer(METHOD, held)
    async with linked(server) as link:
        items: list[bytes] = []
        request = link.open(b"", deadline=soon(), on_item=items.append)
        other = link.open(b"", deadline=soon(), on_item=items.append)
        await until(lambda: len(held.calls) == 2)
        request.cancel()
        assert (await request.ended()).status.code == CANCELLED
        await until(lambda: held.log == ["on_cancel", "task"])
        assert held.calls[0].cancelled
        assert server.running == 1
        held.calls[0].send(b"dropped")
        told: list[str] = []
        held.calls[0].on_cancel(lambda: told.append("at once"))
        assert told == ["at once"]
        held.calls[1].end()
        await other.ended()
        request.cancel()
        assert items == []


async def test_stop_lets_no_item_through_and_brings_the_record() -> None:
    calls: list[LinkCall] = []

    async def handler(call: LinkCall) -> None:
        calls.append(call)
        try:
            await asyncio.Event().wait()
        finally:
            call.send(b"too late")
            call.end(record=Record(decisions=[Decision(stage="router", choice="w1")]))

    async with linked(LinkServer(METHOD, handler)) as link:
        items: list[bytes] = []
        request = link.open(b"", deadline=soon(), on_item=items.append)
        await until(lambda: calls)
        calls[0].send(b"on its way")
        request.stop()
        end = await request.ended()
        request.stop()
        assert end.status.code == CANCELLED
        assert end.record.decisions[0].choice == "w1"
        assert items == []


async def test_a_handler_that_will_not_unwind_does_not_hold_up_the_end() -> None:
    released = asyncio.Event()

    async def handler(_call: LinkCall) -> None:
        while not released.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await released.wait()

    server = LinkServer(METHOD, handler)
    async with linked(server) as link:
        request = link.open(b"", deadline=soon(), on_item=ignore)
        await until(lambda: server.running)
        request.stop()
        assert (await request.ended()).status.code == CANCELLED
        await until(lambda: not server.running)
        assert server.tasks
        released.set()


async def test_cancelling_the_waiter_leaves_the_request_running() -> None:
    held = Held()
    async with linked(LinkServer(METHOD, held)) as link:
        request = link.open(b"", deadline=soon(), on_item=ignore)
        waiters = [asyncio.create_task(request.ended()) for _ in range(2)]
        await until(lambda: held.calls)
        waiters[0].cancel()
        held.calls[0].end()
        assert (await waiters[1]).status.code == 0
        assert waiters[0].cancelled()


async def test_the_deadline_ends_a_request_at_both_ends() -> None:
    held = Held()
    server = LinkServer(METHOD, held)
    async with linked(server) as link:
        request = link.open(b"", deadline=soon(0.1), on_item=ignore)
        end = await request.ended()
        assert (end.status.code, end.status.reason) == (DEADLINE_EXCEEDED, "deadline")
        assert end.status.stage == "router"
        await until(lambda: held.log == ["on_cancel", "task"])
        late = await link.open(b"", deadline=soon(-1), on_item=ignore).ended()
        assert (late.status.code, late.status.reason) == (DEADLINE_EXCEEDED, "deadline")
        assert server.running == 0


async def test_the_deepest_hop_gives_the_account_of_a_missed_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_client, "ACCOUNT_S", 1.0)  # a tenth of what is left: a busy machine's

    async def handler(call: LinkCall) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            call.end(record=Record(decisions=[Decision(stage="worker", choice="waits")]))

    worker = LinkServer("/penstock.v1.Worker/Link", handler)
    async with (
        grpc_server(worker.add_to) as address,
        client(address, method="/penstock.v1.Worker/Link") as below,
    ):

        async def hop(call: LinkCall) -> None:
            end = await below.open(b"", deadline=call.deadline, on_item=call.send).ended()
            call.end(end.status, end.record)

        async with linked(LinkServer(METHOD, hop)) as link:
            end = await link.open(b"", deadline=soon(3.0), on_item=ignore).ended()
    assert (end.status.stage, end.status.reason) == ("worker", "deadline")
    assert end.record.decisions[0].stage == "worker"


async def test_drain_lets_running_requests_finish_and_refuses_new_ones() -> None:
    held = Held()
    server = LinkServer(METHOD, held)
    seen = Seen()
    async with linked(server, seen) as link:
        items: list[bytes] = []
        request = link.open(b"", deadline=soon(), on_item=items.append)
        await until(lambda: held.calls)
        drain = asyncio.create_task(server.drain(10))
        await until(lambda: link.state is LinkState.DRAINING)
        refused = await link.open(b"", deadline=soon(), on_item=items.append).ended()
        assert (refused.status.code, refused.status.reason) == (UNAVAILABLE, "draining")
        held.calls[0].send(b"still here")
        held.calls[0].end()
        assert (await request.ended()).status.code == 0
        assert items == [b"still here"]
        assert not drain.done()  # the handler's task may still account for its request
        held.release.set()
        await drain
        await until(lambda: link.state is LinkState.DEAD)
        assert server.links == 0
        assert seen.states[:3] == [LinkState.READY, LinkState.DRAINING, LinkState.DEAD]


async def test_drain_refuses_an_open_that_crossed_its_announcement() -> None:
    server = LinkServer(METHOD, Held())
    async with linked(server, None, STILL) as link:
        server.draining = True  # the announcement is not sent
        end = await link.open(b"", deadline=soon(), on_item=ignore).ended()
        assert (end.status.code, end.status.reason) == (UNAVAILABLE, "draining")


async def test_drain_ends_what_outlives_its_grace_and_flushes_it() -> None:
    held = Held()
    server = LinkServer(METHOD, held)
    async with linked(server) as link:
        items: list[bytes] = []
        request = link.open(b"", deadline=soon(), on_item=items.append)
        await until(lambda: held.calls)
        held.calls[0].send(b"a" * 2**20)
        await server.drain(0.05)
        end = await request.ended()
        assert (end.status.code, end.status.reason) == (UNAVAILABLE, "draining")
        assert [len(item) for item in items] == [2**20]
        await until(lambda: not server.tasks)
        assert server.running == 0


async def test_the_client_reconnects_and_gets_the_snapshot_again() -> None:
    news = [b"one", b"two"]

    def server() -> LinkServer:
        return LinkServer(METHOD, echo, snapshot=lambda: [b"snapshot", *news])

    seen = Seen()
    states_at_news: list[LinkState] = []
    async with grpc_server(server().add_to) as address:
        link = LinkClient(
            address,
            METHOD,
            transport=TRANSPORT,
            peer_id="t",
            on_news=lambda raw: (seen.news.append(raw), states_at_news.append(link.state)),
            on_state=seen.states.append,
            options=QUICK,
        )
        await link.start()
        await link.wait_ready(10)
    await until(lambda: link.state is LinkState.DEAD)
    refused = await link.open(b"", deadline=soon(), on_item=ignore).ended()
    assert (refused.status.code, refused.status.reason) == (UNAVAILABLE, "peer_lost")
    async with grpc_server(server().add_to, int(address.split(":")[1])):
        await link.wait_ready(10)
        assert (await link.open(b"ab", deadline=soon(), on_item=ignore).ended()).status.code == 0
        await link.close()
    assert seen.news == [b"snapshot", b"one", b"two"] * 2
    assert LinkState.READY not in states_at_news
    assert seen.states == [LinkState.READY, LinkState.DEAD, LinkState.READY, LinkState.CLOSED]


async def test_news_go_to_all_links_and_a_new_one_misses_none() -> None:
    blocks = [b"0"]
    server = LinkServer(METHOD, echo, snapshot=lambda: [b"snapshot:" + b",".join(blocks)])
    first, second = Seen(), Seen()
    async with grpc_server(server.add_to) as address, client(address, first):
        for n in range(1, 200):
            if n == 20:
                joining = asyncio.create_task(_until_last_news(address, second, b"199"))
            blocks.append(b"%d" % n)
            server.broadcast(b"%d" % n)
            await asyncio.sleep(0.001)
        await joining
        await until(lambda: first.news[-1] == b"199")
    assert first.news == [b"snapshot:0", *(b"%d" % n for n in range(1, 200))]
    known = second.news[0].removeprefix(b"snapshot:").split(b",") + second.news[1:]
    assert known == blocks


async def test_news_that_may_be_many_go_one_by_one_among_the_others() -> None:
    """More of them than may wait for a peer; each is made when it is told."""
    told: list[bytes] = []

    def more() -> Iterator[bytes]:
        for n in range(50):
            told.append(b"more %d" % n)
            yield told[-1] + b" " * 10_000

    server = LinkServer(
        METHOD, echo, snapshot=lambda: [b"snapshot"], more=more, max_pending_bytes=20_000
    )
    seen = Seen()
    async with grpc_server(server.add_to) as address, client(address, seen):
        await until(lambda: told)
        assert len(told) < 50
        server.broadcast(b"now")
        await until(lambda: len(seen.news) == 52)
        assert server.links == 1
    assert seen.news[0] == b"snapshot"
    assert [one.strip() for one in seen.news[1:] if one != b"now"] == told
    assert seen.news.index(b"now") < 51


async def _until_last_news(address: str, seen: Seen, last: bytes) -> None:
    async with client(address, seen):
        await until(lambda: seen.news[-1].endswith(last))


async def test_more_than_max_requests_are_refused_each() -> None:
    held = Held()
    server = LinkServer(METHOD, held, max_requests=10)
    async with linked(server) as link:
        requests = [link.open(b"", deadline=soon(), on_item=ignore) for _ in range(500)]
        ends = [await request.ended() for request in requests[10:]]
        assert {end.status.code for end in ends} == {RESOURCE_EXHAUSTED}
        assert {end.status.reason for end in ends} == {"too_many_requests"}
        assert len(held.calls) == server.running == 10
        held.calls[0].end()
        await requests[0].ended()
        assert server.running == 9


async def test_close_ends_the_requests_and_leaves_no_task() -> None:
    before = asyncio.all_tasks()
    held = Held()
    server = LinkServer(METHOD, held)
    async with grpc_server(server.add_to) as address:
        async with client(address) as link:
            request = link.open(b"", deadline=soon(), on_item=ignore)
            await until(lambda: held.calls)
            await link.close()
            assert link.state is LinkState.CLOSED
            end = await request.ended()
            assert (end.status.code, end.status.reason) == (UNAVAILABLE, "peer_lost")
            refused = await link.open(b"", deadline=soon(), on_item=ignore).ended()
            assert refused.status.code == UNAVAILABLE
        await until(lambda: held.log == ["on_cancel", "task"])
        await until(lambda: not server.links and not server.tasks)
    await until(lambda: asyncio.all_tasks() == before)


async def test_a_link_sits_beside_the_generated_servicer() -> None:
    links = LinkServer(METHOD, echo)

    def add(server: grpc.aio.Server) -> None:
        router_pb2_grpc.add_RouterServicer_to_server(router_pb2_grpc.RouterServicer(), server)
        links.add_to(server)

    async with grpc_server(add) as address, client(address) as link:
        assert (await link.open(b"x", deadline=soon(), on_item=ignore).ended()).status.code == 0


async def test_every_request_ends_once_in_a_storm_of_cancels_deadlines_and_restarts() -> None:
    """Seeded disorder: whatever happens, each request resolves and nothing is left over."""
    rng = random.Random(5)

    async def handler(call: LinkCall) -> None:
        for _ in range(rng.randrange(20)):
            call.send(b"x" * rng.randrange(1000))
            await asyncio.sleep(rng.random() * 0.01)
        if rng.random() < 0.2:
            raise ValueError("storm")
        if rng.random() < 0.1:
            await asyncio.Event().wait()

    port, ends = 0, []
    servers = [LinkServer(METHOD, handler) for _ in range(3)]

    async def one(link: LinkClient) -> None:
        request = link.open(b"", deadline=soon(rng.random() * 0.5), on_item=ignore)
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() * 0.05)
            request.cancel()
        ends.append(await request.ended())

    link: LinkClient | None = None
    tasks: list[asyncio.Task[None]] = []
    for server in servers:
        async with grpc_server(server.add_to, port) as address:
            if link is None:
                port = int(address.split(":")[1])
                link = LinkClient(
                    address, METHOD, transport=TRANSPORT, peer_id="storm", options=QUICK
                )
                await link.start()
            await link.wait_ready(10)
            for _ in range(150):
                tasks.append(asyncio.create_task(one(link)))
                await asyncio.sleep(0.001)
    async with asyncio.timeout(10):
        await asyncio.gather(*tasks)
    assert len(ends) == 450
    assert link is not None
    assert link.running == 0
    assert {0, INTERNAL, CANCELLED, DEADLINE_EXCEEDED, UNAVAILABLE} <= {
        end.status.code for end in ends
    }
    await link.close()
    for server in servers:
        await until(lambda server=server: not server.tasks)
        assert (server.running, server.links) == (0, 0)
