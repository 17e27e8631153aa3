"""Links at their edges: ends that are given up, far deadlines, drains met at hello, back-off."""

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest

from protos.common_pb2 import Hello, LinkDown, LinkUp
from services.common.link import LinkCall, LinkClient, LinkServer, LinkState, Vitals
from services.common.link import client as module
from services.common.transport import Channel, Transport
from tests.support.link_peers import (
    METHOD,
    QUICK,
    STILL,
    Context,
    Seen,
    greet,
    grpc_server,
    ignore,
    linked,
    linked_to,
    next_open,
    raw_client,
    soon,
)
from tests.support.transport import SECRET, TRANSPORT
from tests.support.waiting import until

CANCELLED = grpc.StatusCode.CANCELLED.value[0]


async def test_who_settles_waits_for_the_end_and_not_for_the_deadline_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go, calls = asyncio.Event(), list[LinkCall]()

    async def handler(call: LinkCall) -> None:
        calls.append(call)
        await go.wait()
        call.send(b"last")

    timers: list[tuple[float, asyncio.TimerHandle]] = []
    loop = asyncio.get_running_loop()
    call_at = loop.call_at

    def noted(at: float, *given: Any) -> asyncio.TimerHandle:
        timers.append((at, call_at(at, *given)))
        return timers[-1][1]

    monkeypatch.setattr(loop, "call_at", noted)
    items: list[bytes] = []
    async with linked(LinkServer(METHOD, handler)) as link:
        deadline = soon(1000)
        request = link.open(b"", deadline=deadline, on_item=items.append)
        await until(lambda: calls)
        request.settle()
        go.set()
        assert link.running == 1
        assert (await request.ended()).status.code == 0
        assert link.running == 0, "what has ended is forgotten"
        assert items == [b"last"], "what was on its way is still wanted"
        request.settle()
        late = [timer for at, timer in timers if at == deadline]
        assert late
        assert all(timer.cancelled() for timer in late)


@pytest.mark.parametrize("how", ["stop", "settle"])
async def test_an_end_that_does_not_come_is_not_waited_for_long(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancels: list[int] = []

    async def behave(context: Context) -> None:
        await greet(context)
        await next_open(context)
        while True:
            cancels.extend(LinkUp.FromString(await context.read()).cancel)

    monkeypatch.setattr(module, "STOP_TIMEOUT_S", 0.05)
    async with linked_to(behave, None, STILL) as link:
        request = link.open(b"", deadline=soon(600), on_item=ignore)
        getattr(request, how)()
        async with asyncio.timeout(10):
            end = await request.ended()
        assert (end.status.code, end.status.reason) == (CANCELLED, "cancelled")
        assert link.running == 0
        await until(lambda: request.id in cancels)


async def test_a_far_deadline_and_an_endless_step_still_fit_their_frames() -> None:
    calls: list[LinkCall] = []

    async def handler(call: LinkCall) -> None:
        calls.append(call)

    server = LinkServer(METHOD, handler, vitals=lambda: Vitals(1, 0, 1e9))
    async with linked(server) as link:
        request = link.open(b"", deadline=soon(1e8), on_item=ignore)
        assert (await request.ended()).status.code == 0
        assert calls[0].deadline > soon(40 * 86_400)
        assert link.vitals.step_s > 1e6


async def test_a_peer_that_drains_at_its_hello_takes_no_request() -> None:
    async def behave(context: Context) -> None:
        await context.read()
        await context.write(LinkDown(draining=True).SerializeToString())
        await asyncio.Event().wait()

    seen = Seen()
    async with linked_to(behave, seen, STILL, ready=False) as link:
        await until(lambda: link.state is LinkState.DRAINING)
        end = await link.open(b"", deadline=soon(), on_item=ignore).ended()
        assert end.status.reason == "draining"
        assert seen.states == [LinkState.DRAINING]


async def test_a_server_that_drains_attaches_nobody() -> None:
    server = LinkServer(METHOD, lambda call: asyncio.sleep(0))
    server.draining = True
    async with (
        grpc_server(server.add_to) as address,
        raw_client(address, hello=False) as raw,
    ):
        await raw.write(LinkUp(hello=Hello(protocol=1, peer="late")))
        assert "draining" in await raw.lost()
        assert server.links == 0


async def test_late_frames_of_one_connection_hit_no_request_of_the_next() -> None:
    opened: list[int] = []

    async def behave(context: Context) -> None:
        await greet(context)
        opened.append(await next_open(context))
        if len(opened) == 2:  # of the request that the first connection took along
            late = LinkDown()
            late.items.add(id=opened[0], payload=b"late")
            late.ends.add(id=opened[0])
            late.items.add(id=opened[1], payload=b"right")
            await context.write(late.SerializeToString())
            await asyncio.Event().wait()

    async with linked_to(behave) as link:
        first = link.open(b"", deadline=soon(), on_item=ignore)
        assert (await first.ended()).status.reason == "peer_lost"
        await link.wait_ready(10)
        items: list[bytes] = []
        second = link.open(b"", deadline=soon(), on_item=items.append)
        await until(lambda: items)
        assert items == [b"right"]
        assert not second.outcome.done()
        assert link.counters.strays == 2


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What links sleep for between attempts, in seconds, without their jitter."""
    found: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        task = asyncio.current_task()
        if task is not None and task.get_name().startswith("link to"):
            found.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(module.random, "uniform", lambda least, most: most)
    monkeypatch.setattr(module.asyncio, "sleep", noted)
    return found


async def test_attempts_back_off_and_begin_anew_after_a_connection(
    pauses: list[float],
) -> None:
    server = LinkServer(METHOD, lambda call: asyncio.sleep(0))
    async with grpc_server(server.add_to) as address:
        pass
    link = LinkClient(address, METHOD, transport=TRANSPORT, peer_id="t", options=QUICK)
    await link.start()
    await until(lambda: len(pauses) >= 5)
    assert pauses[:5] == [0.02, 0.04, 0.08, 0.1, 0.1]
    async with grpc_server(server.add_to, int(address.split(":")[1])):
        await link.wait_ready(10)
        before = len(pauses)
        await asyncio.sleep(2 * QUICK.heartbeat_s)
    await until(lambda: len(pauses) >= before + 2)
    assert pauses[before : before + 2] == [0.02, 0.04]
    await link.close()


async def test_who_answers_and_ends_the_link_at_once_is_backed_off_from(
    pauses: list[float],
) -> None:
    options = replace(QUICK, heartbeat_s=60.0)
    async with linked_to(greet, options=options, ready=False) as link:
        await until(lambda: len(pauses) >= 4)
        assert link.counters.connects >= 3
    assert pauses[:4] == [0.02, 0.04, 0.08, 0.1]


async def test_time_without_a_step_is_counted_anew_on_each_connection() -> None:
    """Or a peer whose link is cut now and then would be taken for stalled at last."""
    patience = 12  # heartbeats

    async def behave(context: Context) -> None:
        await context.read()
        await context.write(LinkDown(vitals={"steps": 5, "pending": 1}).SerializeToString())
        for _ in range(patience * 2 // 3):
            assert await context.read()  # a heartbeat, or several at once
            await context.write(LinkDown(pong=1).SerializeToString())

    options = replace(QUICK, heartbeat_timeout_s=5.0, stall_timeout_s=patience * QUICK.heartbeat_s)
    async with linked_to(behave, None, options) as link:
        for connection in range(1, 4):
            await until(lambda n=connection: link.counters.connects >= n)
            await link.wait_ready(10)
            end = await link.open(b"", deadline=soon(), on_item=ignore).ended()
            assert end.status.reason == "peer_lost", connection


async def test_callbacks_that_raise_do_no_harm() -> None:
    def broken(_: object) -> None:
        raise ValueError("of the caller")

    async def handler(call: LinkCall) -> None:
        call.on_cancel(lambda: broken(None))
        call.on_cancel(lambda: told.append("cancelled"))
        await asyncio.Event().wait()

    told: list[str] = []
    server = LinkServer(METHOD, handler, snapshot=lambda: [b"news"])
    async with grpc_server(server.add_to) as address:
        link = LinkClient(
            address, METHOD, transport=TRANSPORT, peer_id="t", on_news=broken, on_state=broken
        )
        await link.start()
        await link.wait_ready(10)
        request = link.open(b"", deadline=soon(), on_item=ignore)
        await until(lambda: server.running == 1)
        request.stop()
        assert (await request.ended()).status.code == CANCELLED
        assert told == ["cancelled"]
        assert link.counters.connects == 1
        await link.close()


async def test_a_link_that_could_not_be_dialled_is_tried_again() -> None:
    """As where certificates cannot be read for a moment: nothing else would ever begin it anew."""
    dials = 0

    async def nothing(call: LinkCall) -> None: ...

    class Fails(Transport):
        def dial(self, *given: Any) -> Channel:
            nonlocal dials
            dials += 1
            if dials == 1:
                raise OSError("too many open files")
            return TRANSPORT.dial(*given)

    async with grpc_server(LinkServer(METHOD, nothing).add_to) as address:
        link = LinkClient(address, METHOD, transport=Fails(SECRET), peer_id="t", options=QUICK)
        await link.start()
        await link.wait_ready(5)
        await link.close()
    assert dials == 2
