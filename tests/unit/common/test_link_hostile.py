"""Links with peers that die, stall, lie, flood or hush: no request hangs, none harms another."""

import asyncio
import random
import signal
import sys

import grpc
import pytest

from protos.common_pb2 import (
    End,
    Hello,
    Item,
    LinkDown,
    LinkUp,
    Open,
    Status,
)
from protos.common_pb2 import (
    Vitals as VitalsFrame,
)
from services.common.children import dying_with_parent
from services.common.link import LinkCall, LinkOptions, LinkServer, LinkState, Vitals
from tests.support.link_peers import (
    METHOD,
    QUICK,
    STILL,
    Context,
    Seen,
    client,
    greet,
    grpc_server,
    ignore,
    linked,
    linked_to,
    next_open,
    raw_client,
    soon,
)
from tests.support.transport import TRANSPORT
from tests.support.waiting import until

RESOURCE_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE.value[0]


async def hold(_call: LinkCall) -> None:
    await asyncio.Event().wait()


def opens(*ids: int, deadline_ms: int = 20_000) -> LinkUp:
    return LinkUp(open=[Open(id=id, deadline_ms=deadline_ms) for id in ids])


# ---- serving ends that misbehave ----------------------------------------------------------------

STREAMING_SERVER = """
import asyncio
from services.common.link import LinkServer
from services.common.transport import listen
from tests.support.transport import TRANSPORT

async def handler(call):
    while True:
        call.send(b"token")
        await asyncio.sleep(0.005)

async def main():
    server = TRANSPORT.server()
    LinkServer("/penstock.v1.Router/Link", handler).add_to(server)
    print(listen(server, "127.0.0.1", 0), flush=True)
    await server.start()
    await server.wait_for_termination()

asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_peer_killed_or_frozen_mid_stream_is_lost(how: signal.Signals) -> None:
    process = await asyncio.create_subprocess_exec(
        *dying_with_parent("KILL"),
        *(sys.executable, "-c", STREAMING_SERVER),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        port = int(await process.stdout.readline())
        async with client(f"127.0.0.1:{port}") as link:
            items: list[bytes] = []
            requests = [link.open(b"", deadline=soon(), on_item=items.append) for _ in range(8)]
            await until(lambda: len(items) > 50)
            process.send_signal(how)
            for request in requests:
                end = await asyncio.wait_for(request.ended(), 10)
                assert (end.status.code, end.status.reason) == (UNAVAILABLE, "peer_lost")
                # No more: gRPC's own words may name the peer's address.
                assert end.status.message == "the router was lost"
                assert end.status.stage == "router"
            assert link.state is LinkState.DEAD
            assert link.running == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_peer_that_accepts_but_never_answers_is_not_ready() -> None:
    async def behave(context: Context) -> None:
        await asyncio.Event().wait()

    options = LinkOptions(connect_timeout_s=0.1, backoff_s=0.01)
    async with linked_to(behave, None, options, ready=False) as link:
        await until(lambda: link.state is LinkState.DEAD)
        with pytest.raises(TimeoutError):
            await link.wait_ready(0.2)
        end = await link.open(b"", deadline=soon(), on_item=ignore).ended()
        assert (end.status.code, end.status.reason) == (UNAVAILABLE, "peer_lost")


async def test_a_port_that_takes_connections_and_says_nothing_is_not_ready() -> None:
    taken = []
    server = await asyncio.start_server(
        lambda reader, writer: taken.append((reader, writer)), "127.0.0.1", 0
    )
    port = server.sockets[0].getsockname()[1]
    options = LinkOptions(connect_timeout_s=0.1, backoff_s=0.01)
    async with client(f"127.0.0.1:{port}", None, options, ready=False) as link:
        await until(lambda: link.state is LinkState.DEAD and len(taken) > 1)
    for _, writer in taken:
        writer.close()
    server.close()


async def test_a_closed_port_is_tried_again_with_back_off() -> None:
    async with client("127.0.0.1:1", None, QUICK, ready=False) as link:
        await until(lambda: link.state is LinkState.DEAD)
        assert link.counters.connects == 0


async def test_a_peer_that_falls_silent_is_lost_and_reconnected() -> None:
    async def behave(context: Context) -> None:
        await greet(context)
        await asyncio.Event().wait()  # reads no ping, sends no pong

    async with linked_to(behave) as link:
        end = await link.open(b"", deadline=soon(), on_item=ignore).ended()
        assert (end.status.code, end.status.reason) == (UNAVAILABLE, "peer_lost")
        await link.wait_ready(10)
        assert link.counters.connects == 2


async def test_a_peer_whose_steps_stand_still_is_stalled_until_they_move() -> None:
    steps, pending, running = 5, 0, []

    async def handler(call: LinkCall) -> None:
        running.append(call)
        await asyncio.Event().wait()

    server = LinkServer(METHOD, handler, vitals=lambda: Vitals(steps, pending))
    seen = Seen()
    async with linked(server, seen) as link:
        request = link.open(b"", deadline=soon(), on_item=ignore)
        await until(lambda: running)
        pending = 1
        end = await request.ended()
        assert (end.status.code, end.status.reason) == (UNAVAILABLE, "peer_stalled")
        assert end.status.stage == "router"
        assert seen.states == [LinkState.READY, LinkState.DEAD]
        await until(lambda: running[0].cancelled)  # the peer frees what it held, if it still can
        refused = await link.open(b"", deadline=soon(), on_item=ignore).ended()
        assert refused.status.reason == "peer_lost"
        steps += 1
        await link.wait_ready(10)
        assert seen.states == [LinkState.READY, LinkState.DEAD, LinkState.READY]
        assert link.counters.connects == 1


async def test_a_stalled_peer_is_not_ready_again_by_reconnecting() -> None:
    attaches = 0
    moved = asyncio.Event()

    async def behave(context: Context) -> None:
        nonlocal attaches
        attaches += 1
        await context.read()
        for _ in range(100):
            steps = 6 if moved.is_set() else 5
            await context.write(
                LinkDown(vitals=VitalsFrame(steps=steps, pending=1)).SerializeToString()
            )
            await asyncio.sleep(0.01)

    seen = Seen()
    async with linked_to(behave, seen) as link:
        await until(lambda: attaches >= 3)
        assert seen.states == [LinkState.READY, LinkState.DEAD]
        moved.set()
        await link.wait_ready(10)


async def test_a_peer_that_works_and_idles_is_never_taken_for_stalled() -> None:
    steps, pending = 0, 1
    server = LinkServer(METHOD, hold, vitals=lambda: Vitals(steps, pending))
    seen = Seen()
    async with linked(server, seen) as link:
        for phase in range(4):
            pending = phase % 2
            frames = link.counters.frames
            while link.counters.frames < frames + 8:  # longer than `stall_timeout_s`
                steps += pending
                await asyncio.sleep(0.01)
        assert seen.states == [LinkState.READY]
        assert link.state is LinkState.READY


async def test_a_peer_in_a_long_step_is_given_the_time_that_it_takes() -> None:
    step_s = 2.0
    server = LinkServer(METHOD, hold, vitals=lambda: Vitals(5, 1, step_s))
    seen = Seen()
    async with linked(server, seen) as link:
        request = link.open(b"", deadline=soon(), on_item=ignore)
        frames = link.counters.frames
        await until(lambda: link.counters.frames > frames + 8)  # longer than `stall_timeout_s`
        assert seen.states == [LinkState.READY]
        step_s = 0.01  # and no longer: it hangs
        assert (await request.ended()).status.reason == "peer_stalled"


async def test_unknown_ids_and_double_ends_are_counted_and_harm_nobody() -> None:
    async def behave(context: Context) -> None:
        await greet(context)
        id = await next_open(context)
        unknown = [Item(id=id + n, payload=b"?") for n in range(1, 1001)]
        await context.write(
            LinkDown(
                items=[*unknown, Item(id=id, payload=b"mine")],
                ends=[End(id=id + 7), End(id=0), End(id=id), End(id=id, status=Status(code=13))],
            ).SerializeToString()
        )
        await asyncio.Event().wait()

    async with linked_to(behave, None, STILL) as link:
        items: list[bytes] = []
        request = link.open(b"", deadline=soon(), on_item=items.append)
        assert (await request.ended()).status.code == 0
        assert items == [b"mine"]
        assert link.counters.strays == 1003
        assert link.state is LinkState.READY


async def test_items_after_the_end_do_not_arrive() -> None:
    async def behave(context: Context) -> None:
        await greet(context)
        id = await next_open(context)
        await context.write(LinkDown(ends=[End(id=id)]).SerializeToString())
        await context.write(LinkDown(items=[Item(id=id, payload=b"late")]).SerializeToString())
        await asyncio.Event().wait()

    async with linked_to(behave, None, STILL) as link:
        items: list[bytes] = []
        await link.open(b"", deadline=soon(), on_item=items.append).ended()
        await until(lambda: link.counters.strays == 1)
        assert items == []


@pytest.mark.parametrize(
    "garbage",
    [b"\xff" * 40, random.Random(3).randbytes(5000), b"\x0a\x7f", None],
    ids=["ones", "random", "cut short", "too large"],
)
async def test_garbage_from_the_peer_ends_the_link_and_its_requests(garbage: bytes | None) -> None:
    async def behave(context: Context) -> None:
        await greet(context)
        await next_open(context)
        await context.write(bytes(64 * 2**20 + 1) if garbage is None else garbage)
        await asyncio.Event().wait()

    async with linked_to(behave, None, STILL) as link:
        end = await link.open(b"", deadline=soon(), on_item=ignore).ended()
        assert (end.status.code, end.status.reason) == (UNAVAILABLE, "peer_lost")
        await link.wait_ready(10)


async def test_a_peer_that_ends_the_stream_without_ends_is_lost() -> None:
    async def behave(context: Context) -> None:
        await greet(context)
        await next_open(context)

    async with linked_to(behave) as link:
        end = await link.open(b"", deadline=soon(), on_item=ignore).ended()
        assert (end.status.code, end.status.reason) == (UNAVAILABLE, "peer_lost")


async def test_a_peer_that_never_ends_a_request_meets_its_deadline() -> None:
    async def behave(context: Context) -> None:
        await greet(context)
        while True:
            await context.read()
            await context.write(LinkDown().SerializeToString())

    async with linked_to(behave) as link:
        end = await link.open(b"", deadline=soon(0.2), on_item=ignore).ended()
        assert end.status.reason == "deadline"
        assert link.state is LinkState.READY


async def test_opens_are_refused_while_a_peer_does_not_read() -> None:
    async def behave(context: Context) -> None:
        await greet(context)
        await asyncio.Event().wait()

    options = LinkOptions(heartbeat_s=60, heartbeat_timeout_s=120, max_pending_bytes=4 * 2**20)
    async with linked_to(behave, None, options) as link:
        opened = 0
        while link.running == opened:
            assert opened < 1000
            request = link.open(bytes(100_000), deadline=soon(), on_item=ignore)
            opened += 1
            await asyncio.sleep(0)
            assert link._outbox.pending_bytes <= options.max_pending_bytes
        end = await request.ended()
        assert (end.status.code, end.status.reason) == (RESOURCE_EXHAUSTED, "link_congested")
        assert link.state is LinkState.READY


# ---- calling ends that misbehave ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (LinkUp(), "protocol 0"),
        (LinkUp(hello=Hello(protocol=2)), "protocol 2"),
        (LinkUp(hello=Hello(protocol=1), open=[Open(id=1, deadline_ms=9)]), "more than a hello"),
        (opens(1), "protocol 0"),
        (b"\xff\xff\xff", "decoded"),
    ],
)
async def test_a_wrong_hello_is_refused(first: LinkUp | bytes, reason: str) -> None:
    server = LinkServer(METHOD, hold)
    async with (
        grpc_server(server.add_to) as address,
        raw_client(address, hello=False) as raw,
    ):
        await raw.write(first)
        assert reason in await raw.lost()
        assert server.links == server.running == 0


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"\xff" * 30, "decoded"),
        (LinkUp(hello=Hello(protocol=1)), "second hello"),
        (opens(0), "request id 0"),
        (opens(5, 5), "request id 5"),
    ],
)
async def test_a_broken_frame_ends_the_link_and_cancels_its_requests_alone(
    frame: LinkUp | bytes, reason: str
) -> None:
    calls: list[LinkCall] = []

    async def handler(call: LinkCall) -> None:
        calls.append(call)
        await asyncio.Event().wait()

    server = LinkServer(METHOD, handler)
    async with grpc_server(server.add_to) as address, client(address) as good:
        request = good.open(b"", deadline=soon(), on_item=ignore)
        await until(lambda: len(calls) == 1)
        async with raw_client(address) as raw:
            await raw.write(opens(1, 2))
            await until(lambda: len(calls) == 3)
            await raw.write(frame)
            assert reason in await raw.lost()
            await until(lambda: calls[1].cancelled and calls[2].cancelled)
            await until(lambda: server.running == 1 and len(server.tasks) == 1)
        calls[0].end()
        assert (await request.ended()).status.code == 0


async def test_a_request_without_a_deadline_is_refused() -> None:
    server = LinkServer(METHOD, hold)
    async with grpc_server(server.add_to) as address, raw_client(address) as raw:
        await raw.write(opens(1, deadline_ms=0))
        frame = await raw.read_until(lambda frame: frame.ends)
        assert frame.ends[0].status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


async def test_the_server_keeps_the_deadline_of_a_client_that_does_not() -> None:
    server = LinkServer(METHOD, hold)
    async with grpc_server(server.add_to) as address, raw_client(address) as raw:
        await raw.write(opens(1, deadline_ms=50))
        frame = await raw.read_until(lambda frame: frame.ends)
        assert frame.ends[0].status.reason == "deadline"
        await until(lambda: not server.tasks)


async def test_cancels_of_unknown_ids_are_ignored() -> None:
    server = LinkServer(METHOD, hold)
    async with grpc_server(server.add_to) as address, raw_client(address) as raw:
        await raw.write(opens(1))
        await raw.write(LinkUp(cancel=[0, 7, 2**63, 1, 1], ping=9))
        frame = await raw.read_until(lambda frame: frame.pong == 9)
        assert frame.HasField("vitals")
        await until(lambda: server.running == 0)
        await raw.write(LinkUp(ping=10))
        await raw.read_until(lambda frame: frame.pong == 10)
        ends = [end for frame in raw.frames for end in frame.ends]
        assert [end.id for end in ends] == [1]


async def test_a_flood_of_opens_is_refused_one_by_one() -> None:
    server = LinkServer(METHOD, hold, max_requests=5)
    async with grpc_server(server.add_to) as address, raw_client(address) as raw:
        for start in range(1, 20_001, 1000):
            await raw.write(opens(*range(start, start + 1000)))
        seen = 0
        while seen < 19_995:
            frame = await raw.read()
            assert {end.status.code for end in frame.ends} <= {RESOURCE_EXHAUSTED}
            seen += len(frame.ends)
        assert server.running == len(server.tasks) == 5


async def test_a_client_that_vanishes_cancels_its_requests() -> None:
    calls: list[LinkCall] = []
    told: list[str] = []

    async def handler(call: LinkCall) -> None:
        calls.append(call)
        call.on_cancel(lambda: told.append("cancel"))
        await asyncio.Event().wait()

    server = LinkServer(METHOD, handler)
    async with grpc_server(server.add_to) as address:
        async with raw_client(address) as raw:
            await raw.write(opens(1, 2))
            await until(lambda: len(calls) == 2)
        await until(lambda: told == ["cancel"] * 2)
        await until(lambda: (server.links, server.running, len(server.tasks)) == (0, 0, 0))


async def test_a_client_that_falls_silent_is_dropped_and_one_that_pings_is_not() -> None:
    server = LinkServer(METHOD, hold, client_timeout_s=0.5)
    async with grpc_server(server.add_to) as address, client(address) as good:
        async with raw_client(address) as silent:
            await silent.write(opens(1))
            await until(lambda: server.running == 1)
            assert "silent" in await silent.lost()
        await until(lambda: server.running == 0 and server.links == 1)
        assert good.state is LinkState.READY


async def test_a_client_that_does_not_read_is_dropped_and_memory_stays_bounded() -> None:
    limit = 2 * 2**20
    calls: list[LinkCall] = []

    async def handler(call: LinkCall) -> None:
        calls.append(call)
        await asyncio.Event().wait()

    server = LinkServer(METHOD, handler, max_pending_bytes=limit)
    async with grpc_server(server.add_to) as address, client(address) as good:
        request = good.open(b"", deadline=soon(), on_item=ignore)
        await until(lambda: len(calls) == 1)
        async with raw_client(address) as stuck:
            await stuck.write(opens(1))
            await until(lambda: len(calls) == 2)
            sent = 0
            while not calls[1].cancelled:
                calls[1].send(bytes(10_000))
                sent += 10_000
                assert calls[1]._link.outbox.pending_bytes < limit + 20_000
                assert sent < 20 * limit
                await asyncio.sleep(0)
            calls[1].send(b"dropped")
            await until(lambda: server.running == 1 and server.links == 1)
        calls[0].end()
        assert (await request.ended()).status.code == 0


async def test_many_tiny_items_count_against_the_bound_too() -> None:
    calls: list[LinkCall] = []

    async def handler(call: LinkCall) -> None:
        calls.append(call)
        await asyncio.Event().wait()

    server = LinkServer(METHOD, handler, max_pending_bytes=2**20)
    async with grpc_server(server.add_to) as address, raw_client(address) as stuck:
        await stuck.write(opens(1))
        await until(lambda: calls)
        for _ in range(2**20 // 64 + 2):
            calls[0].send(b"")
        await until(lambda: calls[0].cancelled)


async def test_the_server_stops_promptly_with_hostile_clients_attached() -> None:
    server = LinkServer(METHOD, hold)
    async with grpc_server(server.add_to) as address, TRANSPORT.dial(address, "router") as channel:
        calls = [channel.stream_stream(METHOD)() for _ in range(3)]
        for call in calls:
            await call.write(LinkUp(hello=Hello(protocol=1)).SerializeToString())
            await call.write(opens(1).SerializeToString())
        await until(lambda: server.running == 3)
        async with asyncio.timeout(5):
            await server.drain(0)
            await until(lambda: (server.running, server.links, len(server.tasks)) == (0, 0, 0))
