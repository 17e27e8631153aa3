"""A hand-over between two workers, without their engines: what arrives, and what is left behind."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest

from services.common.errors import PenstockError
from services.common.grpc_options import KEEPALIVE_ALLOWED
from services.common.transport import listen
from services.worker import kv_receiver, kv_sender
from services.worker.engine import KvBlocks
from services.worker.engine.kv import payload as kv_payload
from services.worker.kv_receiver import KvReceiver
from services.worker.kv_sender import Channels, KvSender
from tests.support.proxy import proxy_to
from tests.support.transport import TRANSPORT
from tests.support.waiting import until

DATA = bytes(100)
FORMAT = "of a checkpoint"
PROGRESS_S = 30.0
PING_BYTES = 17  # HTTP/2's
PINGS_ALLOWED = [(name, 100 if "interval" in name else value) for name, value in KEEPALIVE_ALLOWED]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kv_payload, "FOLDER", tmp_path)
    return tmp_path


def segments(folder: Path) -> list[Path]:
    """All but their owner's file."""
    return list(folder.glob("penstock-kv-*-*"))


class Engine:
    """The decode worker's: takes what it is given, at its own pace."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.blocks: list[KvBlocks] = []
        self.first_token: int | None = None
        self.ready = asyncio.Event()
        self.ready.set()

    def write_kv(self, blocks: KvBlocks) -> None:
        kv_payload.take(blocks.data)
        self.written.append(blocks.first_block)
        self.blocks.append(blocks)

    def start_decode(self, request_id: str, first_token: int) -> None:
        self.first_token = first_token

    async def drain(self) -> None:
        await self.ready.wait()


class DecodeWorker:
    def __init__(self, port: int) -> None:
        self.engine = Engine()
        self.receiver = KvReceiver(cast(Any, self.engine), FORMAT)
        self.server = TRANSPORT.server([("grpc.so_reuseport", 0), *PINGS_ALLOWED])
        self.receiver.add_to(self.server)
        self.port = listen(self.server, "127.0.0.1", port)
        self.address = f"127.0.0.1:{self.port}"


@asynccontextmanager
async def serving(port: int = 0) -> AsyncIterator[DecodeWorker]:
    """A decode worker at `port`, or at a free one."""
    worker = DecodeWorker(port)
    await worker.server.start()
    try:
        yield worker
    finally:
        await worker.server.stop(None)


@pytest.fixture
async def decode() -> AsyncIterator[DecodeWorker]:
    async with serving() as worker:
        yield worker


@pytest.fixture
async def channels() -> AsyncIterator[Channels]:
    channels = Channels(TRANSPORT, PROGRESS_S)
    yield channels
    await channels.close()


def shared(first_block: int) -> KvBlocks:
    return KvBlocks("p", first_block, 1, kv_payload.share(DATA))


async def hand_over(channels: Channels, to: DecodeWorker, *blocks: KvBlocks) -> int:
    """Returns how many bytes went."""
    async with channels.sender(to.address) as sender:
        with to.receiver.expect("t", "d"):
            to.receiver.reserved("d", 2)
            assert await sender.reserve("t", 100, FORMAT) == 2
            for one in blocks:
                sender.put(one)
            sender.commit(77)
            await sender.push()
        return sender.bytes_sent


async def test_blocks_arrive_in_order_and_then_the_first_token(
    channels: Channels, decode: DecodeWorker, folder: Path
) -> None:
    sent = await hand_over(channels, decode, shared(2), KvBlocks("p", 3, 1, DATA))
    assert sent == 200
    assert (decode.engine.written, decode.engine.first_token) == ([2, 3], 77)
    assert not segments(folder)


async def test_inline_blocks_arrive_as_they_were_put(
    channels: Channels, decode: DecodeWorker
) -> None:
    """Several pieces, each at its own place."""
    put = [KvBlocks("p", 2 + 3 * n, 3, bytes([n]) * 300) for n in range(4)]
    assert await hand_over(channels, decode, *put) == 1200
    assert [(b.first_block, b.num_blocks) for b in decode.engine.blocks] == [
        (2, 3), (5, 3), (8, 3), (11, 3),
    ]  # fmt: skip
    assert [bytes(b.data) for b in decode.engine.blocks] == [bytes(b.data) for b in put]  # type: ignore[arg-type]
    assert {b.request_id for b in decode.engine.blocks} == {"d"}


@pytest.fixture
def quick_keepalive(monkeypatch: pytest.MonkeyPatch) -> None:
    times = (
        "grpc.keepalive_time_ms",
        "grpc.keepalive_timeout_ms",
        "grpc.http2.ping_timeout_ms",
    )
    changed = [
        (name, 300 if name in times else value) for name, value in kv_sender._CHANNEL_OPTIONS
    ]
    assert set(times) <= dict(changed).keys()
    monkeypatch.setattr(kv_sender, "_CHANNEL_OPTIONS", changed)


@pytest.mark.usefixtures("quick_keepalive")
async def test_a_path_that_leads_nowhere_ends_the_wait_for_room(
    channels: Channels, decode: DecodeWorker
) -> None:
    """The connection stands, but nothing comes through any more."""
    async with proxy_to(decode.address) as proxy, channels.sender(proxy.address) as sender:
        with decode.receiver.expect("t", "d"):
            waiting = asyncio.create_task(sender.reserve("t", 100, FORMAT))
            await until(lambda: proxy.bytes_up > 100 and decode.receiver._meetings["t"].done())
            proxy.pause()
            with pytest.raises(PenstockError, match="handing KV blocks") as failure:
                await asyncio.wait_for(waiting, 20)
            assert failure.value.reason == "kv_transfer"


@pytest.mark.usefixtures("quick_keepalive")
async def test_waiting_long_for_room_is_no_fault(channels: Channels, decode: DecodeWorker) -> None:
    """As long as the path is sound, which is asked again and again."""
    async with proxy_to(decode.address) as proxy, channels.sender(proxy.address) as sender:
        with decode.receiver.expect("t", "d"):
            waiting = asyncio.create_task(sender.reserve("t", 100, FORMAT))
            await until(lambda: proxy.bytes_up > 100 and decode.receiver._meetings["t"].done())
            quiet = proxy.bytes_up + 50  # of the connection's own frames, some may still come
            await until(lambda: proxy.bytes_up >= quiet + 4 * PING_BYTES)
            assert not waiting.done()
            decode.receiver.reserved("d", 0)
            assert await waiting == 0


async def test_a_decode_worker_that_takes_nothing_more_ends_the_push(
    decode: DecodeWorker, folder: Path
) -> None:
    """Its connection answers pings, but its loop or its engine hangs."""
    impatient = Channels(TRANSPORT, 0.3)
    async with impatient.sender(decode.address) as sender:
        with decode.receiver.expect("t", "d"):
            decode.receiver.reserved("d", 0)
            await sender.reserve("t", 100, FORMAT)
            decode.engine.ready.clear()
            sender.put(shared(0))
            for number in range(64):
                sender.put(KvBlocks("p", number, 1, bytes(2**20)))
            with pytest.raises(PenstockError, match="takes nothing any more") as failure:
                await sender.push()
            assert failure.value.reason == "kv_transfer"
    decode.engine.ready.set()
    assert not segments(folder)
    await impatient.close()


async def test_a_commit_that_nobody_confirms_ends_the_push(decode: DecodeWorker) -> None:
    impatient = Channels(TRANSPORT, 0.3)
    async with impatient.sender(decode.address) as sender:
        with decode.receiver.expect("t", "d"):
            decode.receiver.reserved("d", 0)
            await sender.reserve("t", 100, FORMAT)
            decode.engine.ready.clear()
            sender.put(KvBlocks("p", 0, 1, DATA))
            sender.commit(7)
            with pytest.raises(PenstockError, match="takes nothing any more"):
                await sender.push()
    decode.engine.ready.set()
    await impatient.close()


async def test_a_slow_prompt_is_no_lack_of_progress(decode: DecodeWorker) -> None:
    """Only bytes on their way must move."""
    impatient = Channels(TRANSPORT, 0.3)
    async with impatient.sender(decode.address) as sender:
        with decode.receiver.expect("t", "d"):
            decode.receiver.reserved("d", 0)
            await sender.reserve("t", 100, FORMAT)
            push = asyncio.create_task(sender.push())
            done, _ = await asyncio.wait([push], timeout=1.0)
            assert not done
            sender.put(KvBlocks("p", 0, 1, DATA))
            sender.commit(7)
            await push
    assert decode.engine.first_token == 7
    await impatient.close()


async def test_what_was_confirmed_is_left_to_its_new_owner(
    channels: Channels, decode: DecodeWorker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode.engine, "write_kv", lambda blocks: None)  # it reads it later
    await hand_over(channels, decode, shared(2))
    assert len(segments(folder)) == 1


async def test_a_decode_request_that_ends_meanwhile_leaves_no_segment(
    channels: Channels, decode: DecodeWorker, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Pushes on their way when it ends are dropped unread."""
    async with channels.sender(decode.address) as sender:
        with decode.receiver.expect("t", "d"):
            decode.receiver.reserved("d", 0)
            await sender.reserve("t", 100, FORMAT)
            decode.engine.ready.clear()
            for number in range(4):
                sender.put(shared(number))
            push = asyncio.create_task(sender.push())
            await until(lambda: sender.bytes_sent == 400 and decode.engine.written == [0])
        decode.engine.ready.set()
        sender.commit(77)
        with pytest.raises(PenstockError, match="the stream broke off") as failure:
            await push
        assert "the request was ended" in caplog.text
        assert failure.value.reason == "kv_transfer"
    assert not segments(folder)


async def test_a_push_cancelled_while_it_writes_leaves_no_segment(folder: Path) -> None:
    class Stuck:
        writing = False

        async def write(self, message: object) -> None:
            self.writing = True
            await asyncio.Event().wait()

        def cancel(self, why: str = "") -> None:
            pass

        @property
        def _cython_call(self) -> "Stuck":
            return self

    class Stub:
        stream = Stuck()

        def PushKv(self) -> Stuck:
            return self.stream

    sender = KvSender(cast(Any, Stub()), 30.0)
    sender.put(shared(0))
    sender.put(shared(1))
    push = asyncio.create_task(sender.push())
    await until(lambda: Stub.stream.writing)
    push.cancel()
    with suppress(asyncio.CancelledError):
        await push
    sender.close()
    assert not segments(folder)


async def test_a_channel_stays_while_it_is_used_or_connected(channels: Channels) -> None:
    async with serving() as decode:
        await hand_over(channels, decode)
        await hand_over(channels, decode)
        assert len(channels) == 1

    async def fails() -> None:
        with pytest.raises(PenstockError, match="handing KV blocks"):
            async with channels.sender(decode.address) as sender:
                await sender.reserve("t", 100, FORMAT)

    async with channels.sender(decode.address):
        await fails()
        assert len(channels) == 1  # another hand-over has it still

    async def dropped() -> bool:
        await fails()
        return len(channels) == 0

    await until(dropped, what="its connection is known to be lost")
    async with serving(decode.port) as again:
        await hand_over(channels, again)  # at once: no back-off is left of the failures


async def test_channels_to_workers_that_left_go_with_the_next_push(channels: Channels) -> None:
    async with serving() as stays:
        async with serving() as leaves:
            await hand_over(channels, leaves)
            await hand_over(channels, stays)
            assert len(channels) == 2

        async def gone() -> bool:
            await hand_over(channels, stays)
            return len(channels) == 1

        await until(gone, what="its connection is known to be lost")


async def test_a_push_that_nobody_awaits_is_refused_and_forgotten(
    channels: Channels, decode: DecodeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_receiver, "_MEETING_S", 0.01)
    async with channels.sender(decode.address) as sender:
        with pytest.raises(PenstockError, match="handing KV blocks"):
            await sender.reserve("nobody's", 100, FORMAT)
    assert not decode.receiver._meetings
