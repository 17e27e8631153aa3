"""A hand-over between two workers, without their engines: what arrives, and what is left behind."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from protos import worker_pb2_grpc
from services.common.errors import PenstockError
from services.worker.engine import KvBlocks, kv_payload
from services.worker.kv_receiver import KvReceiver
from services.worker.kv_sender import KvSender
from tests.support.waiting import until

DATA = bytes(100)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kv_payload, "FOLDER", tmp_path)
    return tmp_path


class Engine:
    """The decode worker's: takes what it is given, at its own pace."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.first_token: int | None = None
        self.ready = asyncio.Event()
        self.ready.set()

    def write_kv(self, blocks: KvBlocks) -> None:
        kv_payload.take(blocks.data)
        self.written.append(blocks.first_block)

    def start_decode(self, request_id: str, first_token: int) -> None:
        self.first_token = first_token

    async def drain(self) -> None:
        await self.ready.wait()


class DecodeWorker:
    def __init__(self, engine: Engine, receiver: KvReceiver, channel: grpc.aio.Channel) -> None:
        self.engine, self.receiver = engine, receiver
        self._stub = worker_pb2_grpc.WorkerStub(channel)

    def sender(self) -> KvSender:
        return KvSender(self._stub)


@pytest.fixture
async def decode() -> AsyncIterator[DecodeWorker]:
    engine = Engine()
    receiver = KvReceiver(cast(Any, engine))
    server = grpc.aio.server()
    receiver.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield DecodeWorker(engine, receiver, channel)
    await server.stop(None)


def shared(first_block: int) -> KvBlocks:
    return KvBlocks("p", first_block, 1, kv_payload.share(DATA))


async def test_blocks_arrive_in_order_and_then_the_first_token(
    decode: DecodeWorker, folder: Path
) -> None:
    sender = decode.sender()
    with decode.receiver.expect("t", "d"):
        decode.receiver.reserved("d", 2)
        assert await sender.reserve("t", 100) == 2
        sender.put(shared(2))
        sender.put(KvBlocks("p", 3, 1, DATA))
        sender.commit(77)
        await sender.push()
    sender.close()
    assert (decode.engine.written, decode.engine.first_token) == ([2, 3], 77)
    assert sender.bytes_sent == 200
    assert not list(folder.iterdir())


async def test_what_was_confirmed_is_left_to_its_new_owner(
    decode: DecodeWorker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode.engine, "write_kv", lambda blocks: None)  # it reads it later
    sender = decode.sender()
    with decode.receiver.expect("t", "d"):
        decode.receiver.reserved("d", 0)
        await sender.reserve("t", 100)
        sender.put(shared(0))
        sender.commit(77)
        await sender.push()
    sender.close()
    assert len(list(folder.iterdir())) == 1


async def test_a_decode_request_that_ends_meanwhile_leaves_no_segment(
    decode: DecodeWorker, folder: Path
) -> None:
    """Pushes on their way when it ends are dropped unread."""
    sender = decode.sender()
    with decode.receiver.expect("t", "d"):
        decode.receiver.reserved("d", 0)
        await sender.reserve("t", 100)
        decode.engine.ready.clear()
        for number in range(4):
            sender.put(shared(number))
        push = asyncio.create_task(sender.push())
        await until(lambda: sender.bytes_sent == 400 and decode.engine.written == [0])
    decode.engine.ready.set()
    sender.commit(77)
    with pytest.raises(PenstockError, match="the request was ended") as failure:
        await push
    assert failure.value.reason == "kv_transfer"
    sender.close()
    assert not list(folder.iterdir())


async def test_a_push_cancelled_while_it_writes_leaves_no_segment(folder: Path) -> None:
    class Stuck:
        writing = False

        async def write(self, message: object) -> None:
            self.writing = True
            await asyncio.Event().wait()

        def cancel(self) -> None:
            pass

    class Stub:
        stream = Stuck()

        def PushKv(self) -> Stuck:
            return self.stream

    sender = KvSender(cast(Any, Stub()))
    sender.put(shared(0))
    sender.put(shared(1))
    push = asyncio.create_task(sender.push())
    await until(lambda: Stub.stream.writing)
    push.cancel()
    with suppress(asyncio.CancelledError):
        await push
    sender.close()
    assert not list(folder.iterdir())
