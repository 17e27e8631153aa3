"""The socket that a link's frames take within one host, and who may come to it."""

import asyncio
import random
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from protos.common_pb2 import Beside, LinkDown, LinkUp, Open
from services.common.discovery import machine_id
from services.common.link import LinkCall, LinkServer, LinkState, local
from services.common.link.frames import MAX_FRAME_BYTES, LinkLostError, Outbox
from services.common.link.local import LocalWire, offered, read_all, taken, write_all
from tests.support.link_peers import METHOD, Context, Seen, linked, linked_to, raw_client, soon
from tests.support.link_peers import grpc_server as serving
from tests.support.waiting import until


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[LocalWire, LocalWire]]:
    async with offered() as (beside, coming):
        near = await taken(beside)
        assert near is not None
        far = await coming
    yield near, far
    near.close()
    far.close()


async def read(wire: LocalWire) -> bytes | None:
    async with asyncio.timeout(10):
        return await wire.read()


async def echo(call: LinkCall) -> None:
    call.send(call.payload)


async def ask(link, payload: bytes = b"hello") -> bytes:
    came: list[bytes] = []
    end = await link.open(payload, deadline=soon(), on_item=came.append).ended()
    assert end.status.code == 0
    return b"".join(came)


async def test_replicas_of_one_host_meet_at_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    wires: list[LocalWire | None] = []

    async def noted(beside: Beside) -> LocalWire | None:
        assert stat.S_IMODE(Path(beside.path).parent.stat().st_mode) == 0o700
        wires.append(await taken(beside))
        return wires[-1]

    monkeypatch.setattr("services.common.link.client.taken", noted)
    async with linked(LinkServer(METHOD, echo)) as link:
        assert await ask(link) == b"hello"
        (wire,) = wires
        assert wire is not None
        wire.close()
        await until(lambda: link.counters.connects == 2)
        assert len(wires) == 2, "another socket for each connection"
    assert not list(local._folder().path.iterdir()), "nobody can come any more"


async def test_who_cannot_reach_the_socket_stays_on_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def in_vain(beside: Beside) -> None:
        assert await taken(Beside(path=beside.path + "-elsewhere", word=beside.word)) is None

    monkeypatch.setattr("services.common.link.client.taken", in_vain)
    async with linked(LinkServer(METHOD, echo)) as link:
        assert await ask(link) == b"hello"
        assert link.counters.connects == 1


async def test_a_peer_names_no_other_services_socket(tmp_path: Path) -> None:
    """As a container engine's, to which this process may speak and the peer may not."""
    loop = asyncio.get_running_loop()
    path = tmp_path / "engine"
    server = await loop.create_unix_server(asyncio.Protocol, path)
    tmp_path.chmod(0o755)
    try:
        assert await taken(Beside(path=str(path), word=b"x" * 32)) is None
        tmp_path.chmod(0o700)
        assert await taken(Beside(path=str(path), word=b"POST /containers")) is None
        wire = await taken(Beside(path=str(path), word=b"x" * 32))
        assert wire is not None, "one of its own"
        wire.close()
    finally:
        server.close()


async def test_where_no_socket_can_be_made_links_stay_on_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nowhere = SimpleNamespace(path=Path("/" + "x" * 200))
    monkeypatch.setattr(local, "_folder", lambda: nowhere)
    async with linked(LinkServer(METHOD, echo)) as link:
        assert await ask(link) == b"hello"
        assert link.counters.connects == 1


async def test_another_host_is_offered_no_socket() -> None:
    async with serving(LinkServer(METHOD, echo).add_to) as address, raw_client(address) as raw:
        await raw.write(LinkUp(open=[Open(id=1, payload=b"hi", deadline_ms=20_000)]))
        answered = await raw.read_until(lambda frame: frame.ends)
        assert not any(frame.HasField("beside") for frame in raw.frames)
        assert not answered.ends[0].status.code


async def test_a_serving_end_that_offers_and_is_not_there_is_tried_without() -> None:
    hosts: list[str] = []

    async def offers(context: Context) -> None:
        hosts.append(LinkUp.FromString(await context.read()).hello.host)
        if hosts[-1]:
            nowhere = LinkDown(beside=Beside(path="/nowhere/\0", word=b"x"))
            await context.write(nowhere.SerializeToString())
        else:
            await context.write(LinkDown().SerializeToString())
        await context.read()

    seen = Seen()
    async with linked_to(offers, seen):
        assert hosts == [machine_id(), ""]
        assert seen.states[-1] is LinkState.READY


async def test_only_who_says_the_word_is_let_in() -> None:
    async with offered() as (beside, coming):
        for word in (b"\0" * 32, b""):
            loop = asyncio.get_running_loop()
            _, stranger = await loop.create_unix_connection(LocalWire, beside.path)
            stranger._transport.write(word)
            if word:
                assert await read(stranger) is None, "it is shown out"
        assert not coming.done()
        known = await taken(beside)
        assert known is not None
        wire = await coming
        second = await taken(beside)
        assert second is not None
        assert await read(second) is None, "one comes"
        await wire.write(b"frame")
        assert await read(known) == b"frame"
    assert not Path(beside.path).exists()


async def test_frames_arrive_whole_and_in_order_however_they_are_cut() -> None:
    chance = random.Random(3)
    frames = [chance.randbytes(chance.choice((0, 1, 3, 200, 70_000))) for _ in range(60)]
    sent = b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames)
    wire = LocalWire()
    while sent:
        piece = chance.choice((1, 2, 5, 3_000, 100_000))
        wire.data_received(sent[:piece])
        sent = sent[piece:]
    assert [await read(wire) for _ in frames] == frames


async def test_a_writer_waits_for_a_reader_that_does_not_read_and_loses_nothing() -> None:
    frame = b"x" * 2**20
    async with pair() as (near, far):
        written = 0

        async def write() -> None:
            nonlocal written
            for _ in range(64):
                await near.write(frame)
                written += 1

        writing = asyncio.create_task(write())
        while True:  # until nothing moves any more
            before = written
            await asyncio.sleep(0.1)
            if before and written == before:
                break
        assert written < 16, "memory is bounded at both ends"
        for _ in range(64):
            assert await read(far) == frame
        async with asyncio.timeout(10):
            await writing


async def test_what_was_written_before_the_end_arrives() -> None:
    async with pair() as (near, far):
        for number in range(100):
            await near.write(b"%d" % number * 1000)
        near.close()
        assert [await read(far) for _ in range(100)] == [b"%d" % n * 1000 for n in range(100)]
        assert await read(far) is None
        with pytest.raises(LinkLostError):
            await far.write(b"into nothing")


async def test_a_frame_that_is_too_large_ends_the_wire() -> None:
    async with pair() as (near, far):
        near._transport.write((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
        assert await read(far) is None
        assert await read(near) is None


# ---- who reads or writes all -------------------------------------------------------------------


async def test_what_came_before_is_taken_first_and_the_end_is_told() -> None:
    came: list[object] = []

    def take(frame: object) -> None:
        came.append(frame)
        if frame is None:
            raise LinkLostError("gone")

    async with pair() as (near, far):
        await near.write(b"before")
        await until(lambda: bool(far._frames))
        reading = asyncio.create_task(read_all(far, take))
        await until(lambda: came == [b"before"])
        await near.write(b"after")
        near.close()
        with pytest.raises(LinkLostError, match="gone"):
            await reading
    assert came == [b"before", b"after", None]


async def test_who_fails_on_a_frame_is_given_no_other() -> None:
    came: list[object] = []

    def take(frame: object) -> None:
        came.append(frame)
        raise LinkLostError("not like that")

    async with pair() as (near, far):
        reading = asyncio.create_task(read_all(far, take))
        await asyncio.sleep(0)
        near._transport.write(b"".join(len(f).to_bytes(4, "little") + f for f in (b"a", b"b")))
        with pytest.raises(LinkLostError, match="not like that"):
            await reading
    assert came == [b"a"]


async def test_the_end_of_a_wire_that_nobody_reads_any_more_is_no_error() -> None:
    """It comes between a reader's cancellation and its end."""

    def take(frame: object) -> None:
        raise LinkLostError("over")

    async with pair() as (_, far):
        reading = asyncio.create_task(read_all(far, take))
        await asyncio.sleep(0)
        reading.cancel()
        far.connection_lost(None)
        with pytest.raises(asyncio.CancelledError):
            await reading


async def test_what_gathers_leaves_as_one_frame_and_what_is_hurried_at_once() -> None:
    outbox = Outbox(LinkUp)
    async with pair() as (near, far):
        writing = asyncio.create_task(write_all(near, outbox, LinkUp.SerializeToString))
        for id in (1, 2):
            outbox.frame.cancel.append(id)
            outbox.mark()
        assert LinkUp.FromString(await read(far) or b"").cancel == [1, 2]
        async with asyncio.timeout(10):
            await outbox.flushed()
        for id in (3, 4, 5):
            outbox.frame.cancel.append(id)
            outbox.mark()
            outbox.hurry()
            assert bool(outbox.pending_bytes) == (id > 3), "the first alone"
        assert LinkUp.FromString(await read(far) or b"").cancel == [3]
        assert LinkUp.FromString(await read(far) or b"").cancel == [4, 5]
        writing.cancel()


async def test_while_the_peer_does_not_read_it_gathers_and_then_all_of_it_leaves() -> None:
    outbox = Outbox(LinkUp)
    async with pair() as (near, far):
        writing = asyncio.create_task(write_all(near, outbox, LinkUp.SerializeToString))
        far._transport.pause_reading()
        count = 0
        while near._room is None:
            count += 1
            outbox.frame.open.add(id=count, payload=b"x" * 2**18)
            outbox.mark(2**18)
            await asyncio.sleep(0)
        for _ in range(3):
            count += 1
            outbox.frame.cancel.append(count)
            outbox.mark()
            await asyncio.sleep(0)
        assert outbox.pending_bytes
        flushed = asyncio.create_task(outbox.flushed())
        far._transport.resume_reading()
        ids: list[int] = []
        while len(ids) < count:
            frame = LinkUp.FromString(await read(far) or b"")
            ids += [one.id for one in frame.open] + list(frame.cancel)
        assert ids == list(range(1, count + 1))
        async with asyncio.timeout(10):
            await flushed
        writing.cancel()


async def test_what_cannot_be_sealed_ends_the_writing() -> None:
    def seal(frame: LinkUp) -> bytes:
        raise LinkLostError("cannot be told")

    outbox = Outbox(LinkUp)
    outbox.mark()
    async with pair() as (near, _):
        with pytest.raises(LinkLostError, match="cannot be told"):
            await write_all(near, outbox, seal)
