"""A push of KV blocks as the decode worker takes it, written by hand."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from protos import worker_pb2, worker_pb2_grpc
from services.worker import kv_receiver
from services.worker.engine import FinishReason, KvReserved
from tests.support.transport import TRANSPORT
from tests.support.waiting import until
from tests.unit.worker.split_rig import Split
from tests.unit.worker.worker_rig import (
    Worker,
    last,
)


@asynccontextmanager
async def pushing(to: Worker) -> AsyncIterator[Any]:
    """A PushKv stream, written by hand."""
    async with TRANSPORT.dial(to.address, "worker") as channel:
        yield worker_pb2_grpc.WorkerStub(channel).PushKv()  # type: ignore[no-untyped-call]


def begin(to: Worker, transfer_id: str = "t") -> worker_pb2.KvPush:
    kv_format = to.service.describe()["kv_format"]
    return worker_pb2.KvPush(begin=worker_pb2.KvBegin(transfer_id=transfer_id, kv_format=kv_format))


def blocks(first_block: int) -> worker_pb2.KvPush:
    body = worker_pb2.KvBlocks(first_block=first_block, num_blocks=1, inline=b"kv")
    return worker_pb2.KvPush(blocks=body)


@pytest.mark.parametrize("wrong", [None, blocks(0), worker_pb2.KvPush()])
async def test_a_push_must_say_first_what_it_is(
    split: Split, wrong: worker_pb2.KvPush | None
) -> None:
    async with pushing(split.decode) as stream:
        if wrong is not None:
            await stream.write(wrong)
        await stream.done_writing()
        with pytest.raises(grpc.aio.AioRpcError, match="begin must come first") as failure:
            assert await stream.read() is None
        assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not split.decode.service._receiver._meetings


async def test_blocks_of_another_checkpoint_or_format_are_refused(split: Split) -> None:
    """As many bytes may well mean something else: nothing is reserved for them, nothing written."""
    decoding, _ = await split.decodes()
    async with pushing(split.decode) as stream:
        wrong = worker_pb2.KvBegin(transfer_id="t", kv_format="other float32 panels")
        await stream.write(worker_pb2.KvPush(begin=wrong))
        with pytest.raises(grpc.aio.AioRpcError, match="of 'other float32 panels'") as failure:
            assert await stream.read() is None
        assert failure.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert (await decoding.end()).status.reason == "kv_transfer"


async def test_a_push_that_nobody_knows_is_told_so_in_time(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_receiver, "_MEETING_S", 0.05)
    async with pushing(split.decode) as stream:
        await stream.write(begin(split.decode, "nobody's"))
        with pytest.raises(grpc.aio.AioRpcError, match="no request awaits") as failure:
            assert await stream.read() is None
        assert failure.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_push_may_come_before_its_request(split: Split) -> None:
    async with pushing(split.decode) as stream:
        await stream.write(begin(split.decode))
        await until(lambda: "t" in split.decode.service._receiver._meetings)
        _, at_decode = await split.decodes()
        split.decode.engine.reserve(at_decode.request_id, 2)
        assert (await stream.read()).reserved.cached_blocks == 2
        await stream.write(blocks(2))
        await until(lambda: bool(split.decode.engine.written))
        assert split.decode.engine.written[0].request_id == at_decode.request_id


async def test_a_push_that_ends_without_a_commit_is_broken(split: Split) -> None:
    decoding, at_decode = await split.decodes()
    async with pushing(split.decode) as stream:
        await stream.write(begin(split.decode))
        split.decode.engine.reserve(at_decode.request_id)
        assert (await stream.read()).HasField("reserved")
        await stream.write(blocks(0))
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF, "it is not confirmed"
    assert (await decoding.end()).status.reason == "kv_transfer"
    assert split.decode.engine.cancelled == [at_decode.request_id]
    assert not split.decode.engine.begun


async def test_a_commit_is_the_last_word_of_a_push(split: Split) -> None:
    decoding, at_decode = await split.decodes()
    async with pushing(split.decode) as stream:
        await stream.write(begin(split.decode))
        split.decode.engine.reserve(at_decode.request_id)
        assert (await stream.read()).HasField("reserved")
        commit = worker_pb2.KvPush(commit=worker_pb2.KvCommit(first_token=7))
        await stream.write(commit)
        assert (await stream.read()).HasField("done")
        assert await stream.read() is grpc.aio.EOF  # whatever else the peer would send
    assert split.decode.engine.begun == [(at_decode.request_id, 7)]
    split.decode.engine.step(last(at_decode.request_id, 8, reason=FinishReason.STOP))
    assert (await decoding.end()).status.code == 0, "the stream's end breaks nothing any more"


async def test_room_told_twice_or_for_nobody_changes_nothing(split: Split) -> None:
    decoding, at_decode = await split.decodes()
    split.decode.engine.reserve("unknown", 5)
    for cached in (1, 2):
        split.decode.engine.reserve(at_decode.request_id, cached)
    async with pushing(split.decode) as stream:
        await stream.write(begin(split.decode))
        assert (await stream.read()).reserved.cached_blocks == 1
    assert (await decoding.end()).status.reason == "kv_transfer"


@pytest.mark.parametrize("closed", [False, True])
async def test_a_push_that_comes_too_late_is_told_why(split: Split, closed: bool) -> None:
    decoding, at_decode = await split.decodes()
    async with pushing(split.decode) as stream:
        await stream.write(begin(split.decode))
        split.decode.engine.reserve(at_decode.request_id)
        assert (await stream.read()).HasField("reserved")
        if closed:
            decoding.request.stop()
            await decoding.end()
        else:
            split.decode.engine.running = False  # and nobody has noticed yet
        await stream.write(blocks(0))
        words = "the request was ended" if closed else "not running"
        with pytest.raises(grpc.aio.AioRpcError, match=words) as failure:
            assert await stream.read() is None
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not split.decode.engine.written


async def test_a_push_that_gave_up_before_its_request_came_leaves_its_id_free(
    split: Split,
) -> None:
    meetings = split.decode.service._receiver._meetings
    async with pushing(split.decode) as stream:
        await stream.write(begin(split.decode))
        await until(lambda: "t" in meetings)
        stream.cancel()
    await until(lambda: "t" not in meetings)
    _, _, decoding, at_decode = await split.begin()
    split.decode.engine.step(last(at_decode.request_id, 8, reason=FinishReason.STOP))
    assert (await decoding.end()).status.code == 0


async def test_room_for_two_in_one_step_is_told_to_both(split: Split) -> None:
    requests = [(await split.decodes(transfer))[1] for transfer in ("t", "u")]
    async with pushing(split.decode) as one, pushing(split.decode) as other:
        for stream, transfer in ((one, "t"), (other, "u")):
            await stream.write(begin(split.decode, transfer))
        split.decode.engine.step(
            kv_reserved=[KvReserved(r.request_id, n) for n, r in enumerate(requests)]
        )
        told = [(await stream.read()).reserved.cached_blocks for stream in (one, other)]
    assert told == [0, 1]
