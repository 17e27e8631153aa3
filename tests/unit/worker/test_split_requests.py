"""PREFILL and DECODE requests between two workers, whose engines the test steps by hand."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import common_pb2, worker_pb2
from services.common.discovery import host_id
from services.common.transport import listen
from services.worker.engine import FinishReason, KvBlocks, RequestError
from services.worker.engine.kv import payload as kv_payload
from tests.support.transport import TRANSPORT
from tests.support.waiting import until
from tests.unit.worker.split_rig import Split, two_workers
from tests.unit.worker.worker_rig import (
    Answer,
    Work,
    Worker,
    first,
    last,
    output,
    spans_of,
    status_of,
)

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE.value[0]


async def test_a_request_in_two_parts(split: Split) -> None:
    decoding, at_decode = await split.decodes()
    assert at_decode.remote_prefill
    assert not at_decode.prefill_only
    prefilling = split.prefills()
    await until(lambda: split.met == 1)
    assert not split.prefill.engine.requests, "no prompt is computed before there is room for it"
    split.decode.engine.reserve(at_decode.request_id, 1)
    await until(lambda: bool(split.prefill.engine.requests))
    (at_prefill,) = split.prefill.engine.requests
    assert at_prefill.prefill_only
    assert not at_prefill.remote_prefill
    assert (at_prefill.export_kv, at_prefill.export_from_block) == ("shared", 1)
    assert at_prefill.prompt_token_ids == at_decode.prompt_token_ids == list(range(3, 43))

    engine, id = split.prefill.engine, at_prefill.request_id
    ref = kv_payload.share(b"one" * 10)
    engine.step(kv_exports=[KvBlocks(id, 1, 1, ref)])
    await until(lambda: bool(split.decode.engine.written))  # while the rest is computed
    assert not split.decode.engine.begun
    engine.step(
        first(id, 7, finish_reason=FinishReason.PREFILL_DONE), kv_exports=[KvBlocks(id, 2, 1, b"x")]
    )
    end = await prefilling.end()
    assert end.status.code == 0
    assert [(list(d.token_ids), d.finish) for d in prefilling.deltas] == [
        ([7], 0),
        ([], common_pb2.FINISH_PREFILL_DONE),
    ]
    assert [(b.request_id, b.first_block, b.num_blocks) for b in split.decode.engine.written] == [
        (at_decode.request_id, 1, 1),
        (at_decode.request_id, 2, 1),
    ]
    assert [b.data for b in split.decode.engine.written] == [ref, b"x"]
    assert split.decode.engine.begun == [(at_decode.request_id, 7)]
    assert not engine.cancelled
    pushed = spans_of(end)["push kv"].attributes
    assert (pushed["bytes"], pushed["shared_memory"]) == ("31", "True")
    assert spans_of(end)["worker"].attributes["mode"] == "prefill"
    assert {"reserve kv", "queue"} <= spans_of(end).keys()

    split.decode.engine.step(first(at_decode.request_id, 8))
    split.decode.engine.step(last(at_decode.request_id, 9, reason=FinishReason.LENGTH))
    end = await decoding.end()
    assert end.status.code == 0
    assert decoding.tokens == [8, 9]
    assert decoding.deltas[-1].finish == common_pb2.FINISH_LENGTH
    assert spans_of(end)["worker"].attributes["mode"] == "decode"
    assert {"queue", "decode"} <= spans_of(end).keys()
    assert not split.decode.engine.cancelled


async def test_the_end_of_a_prefill_waits_for_the_decode_workers_word(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then a router must take the hand-over for undone."""
    taking = asyncio.Event()
    monkeypatch.setattr(split.decode.engine, "drain", taking.wait)
    prefilling, at_prefill, _, _ = await split.begin()
    id = at_prefill.request_id
    split.prefill.engine.step(
        first(id, 7, finish_reason=FinishReason.PREFILL_DONE), kv_exports=[KvBlocks(id, 0, 3, b"x")]
    )
    await until(lambda: bool(split.decode.engine.written) and bool(prefilling.deltas))
    assert [d.finish for d in prefilling.deltas] == [0]
    taking.set()
    assert (await prefilling.end()).status.code == 0
    assert [d.finish for d in prefilling.deltas] == [0, common_pb2.FINISH_PREFILL_DONE]


@pytest.mark.parametrize(
    ("transfer", "host", "form"),
    [("auto", None, "shared"), ("auto", "another", "inline"), ("grpc", None, "inline")],
)
async def test_blocks_go_through_shared_memory_on_one_host_alone(
    tmp_path: Path, transfer: str, host: str | None, form: str
) -> None:
    async with two_workers(tmp_path, transfer=transfer) as split:
        _, at_decode = await split.decodes()
        split.decode.engine.reserve(at_decode.request_id)
        split.prefills(host=host)
        await until(lambda: bool(split.prefill.engine.requests))
        assert split.prefill.engine.requests[0].export_kv == form


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
async def test_a_first_token_that_is_the_last_is_not_handed_over(
    split: Split, reason: FinishReason
) -> None:
    prefilling, at_prefill, decoding, at_decode = await split.begin()
    split.prefill.engine.step(last(at_prefill.request_id, 7, reason=reason))
    assert (await prefilling.end()).status.code == 0
    assert prefilling.tokens == [7]
    assert prefilling.deltas[-1].finish
    # The router cancels the other part; if it is late, the decode worker frees the room itself.
    assert status_of(await decoding.end()) == (UNAVAILABLE, "worker", "kv_transfer", "")
    assert split.decode.engine.cancelled == [at_decode.request_id]
    assert not split.decode.engine.begun


def export(split: Split, number: int) -> None:
    """The prefill engine has computed a block."""
    (request,) = split.prefill.engine.requests
    blocks = KvBlocks(request.request_id, number, 1, kv_payload.share(b"x" * 64))
    split.prefill.engine.step(kv_exports=[blocks])


async def finish_prefill(split: Split, decode: Answer) -> None:
    """The prefill engine goes on until its prompt is computed; its worker learns with the blocks
    that it sends that nobody takes them, and tells no success."""
    await decode.end()
    export(split, 2)
    (request,) = split.prefill.engine.requests
    split.prefill.engine.step(first(request.request_id, 7, finish_reason=FinishReason.PREFILL_DONE))


async def cancel_decode(split: Split, prefill: Answer, decode: Answer) -> None:
    decode.request.stop()
    await finish_prefill(split, decode)


async def cancel_prefill(split: Split, prefill: Answer, decode: Answer) -> None:
    prefill.request.stop()


async def fail_prefill(split: Split, prefill: Answer, decode: Answer) -> None:
    (request,) = split.prefill.engine.requests
    error = RequestError("internal", "a bug")
    split.prefill.engine.step(
        output(request.request_id, finish_reason=FinishReason.ERROR, error=error)
    )


async def end_decode_engine(split: Split, prefill: Answer, decode: Answer) -> None:
    split.decode.engine.die()
    await finish_prefill(split, decode)


async def end_prefill_engine(split: Split, prefill: Answer, decode: Answer) -> None:
    split.prefill.engine.die()


@pytest.mark.parametrize(
    ("what", "prefill_end", "decode_end", "prefill_tells", "decode_tells"),
    [
        (cancel_decode, "kv_transfer", "cancelled", False, True),
        (cancel_prefill, "cancelled", "kv_transfer", True, True),
        (fail_prefill, "internal", "kv_transfer", False, True),
        (end_decode_engine, "kv_transfer", "engine_died", False, False),
        (end_prefill_engine, "engine_died", "kv_transfer", False, True),
    ],
)
async def test_whatever_ends_one_part_ends_the_other_and_leaves_nothing(
    split: Split,
    folder: Path,
    what: Callable[[Split, Answer, Answer], Any],
    prefill_end: str,
    decode_end: str,
    prefill_tells: bool,
    decode_tells: bool,
) -> None:
    prefilling, at_prefill, decoding, at_decode = await split.begin()
    for number in range(2):
        export(split, number)
    await until(lambda: len(split.decode.engine.written) == 2)
    await what(split, prefilling, decoding)
    assert (await prefilling.end()).status.reason == prefill_end
    assert (await decoding.end()).status.reason == decode_end
    assert split.prefill.engine.cancelled == [at_prefill.request_id] * prefill_tells
    assert split.decode.engine.cancelled == [at_decode.request_id] * decode_tells
    assert not split.decode.engine.begun
    assert not any(delta.finish for delta in [*prefilling.deltas, *decoding.deltas])
    assert not list(folder.glob("penstock-kv-*-*")), "nobody has confirmed that it took them"


async def test_a_prefill_cancelled_while_it_waits_for_room_never_begins(split: Split) -> None:
    decoding, at_decode = await split.decodes()
    prefilling = split.prefills()
    await until(lambda: split.met == 1)
    prefilling.request.stop()
    assert (await prefilling.end()).status.reason == "cancelled"
    assert (await decoding.end()).status.reason == "kv_transfer"
    assert not split.prefill.engine.requests
    assert split.decode.engine.cancelled == [at_decode.request_id]


async def test_a_decode_refused_by_its_engine_ends_the_wait_for_room(split: Split) -> None:
    decoding, at_decode = await split.decodes()
    prefilling = split.prefills()
    await until(lambda: split.met == 1)
    error = RequestError("context_length_exceeded", "too long", "prompt_token_ids")
    refused = output(at_decode.request_id, finish_reason=FinishReason.ERROR, error=error)
    split.decode.engine.step(refused)
    assert (await decoding.end()).status.reason == "context_length_exceeded"
    assert status_of(await prefilling.end()) == (UNAVAILABLE, "worker", "kv_transfer", "")
    assert not split.prefill.engine.requests


async def test_a_transfer_id_serves_one_request_at_a_time(split: Split) -> None:
    decoding, at_decode = await split.decodes()
    second = split.decode.open(mode=Work.DECODE, transfer_id="t")
    code = grpc.StatusCode.ALREADY_EXISTS.value[0]
    assert status_of(await second.end()) == (code, "worker", "", "transfer_id")
    assert split.decode.engine.requests == [at_decode], "it never was the engine's"
    other, at_other = await split.decodes("u")  # and harms neither the first nor another
    for transfer, answer, request in (("t", decoding, at_decode), ("u", other, at_other)):
        split.prefills(transfer)
        split.decode.engine.reserve(request.request_id)
        had = len(split.prefill.engine.requests)
        await until(lambda had=had: len(split.prefill.engine.requests) > had)  # type: ignore[misc]
        id = split.prefill.engine.requests[-1].request_id
        split.prefill.engine.step(first(id, 7, finish_reason=FinishReason.PREFILL_DONE))
        await until(lambda request=request: (request.request_id, 7) in split.decode.engine.begun)  # type: ignore[misc]
        split.decode.engine.step(last(request.request_id, 8, reason=FinishReason.STOP))
        assert (await answer.end()).status.code == 0
    again, _ = await split.decodes()  # it has ended, the id is free
    again.request.cancel()


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (None, "it did not reserve room"),
        (worker_pb2.KvPushReply(done=worker_pb2.KvDone()), "it did not reserve room"),
    ],
)
async def test_a_decode_worker_that_reserves_nothing_ends_the_prefill(
    split: Split, monkeypatch: pytest.MonkeyPatch, reply: worker_pb2.KvPushReply | None, words: str
) -> None:
    async def push_kv(pushes: Any, context: Any) -> AsyncIterator[worker_pb2.KvPushReply]:
        await anext(aiter(pushes))
        if reply is not None:
            yield reply

    async with strange_decode_worker(push_kv) as address:
        end = await prefill_to(split.prefill, address).end()
    assert status_of(end) == (UNAVAILABLE, "worker", "kv_transfer", "")
    assert words in end.status.message
    assert not split.prefill.engine.requests


async def test_a_commit_answered_by_the_streams_end_is_no_success(
    split: Split, folder: Path
) -> None:
    async def push_kv(pushes: Any, context: Any) -> AsyncIterator[worker_pb2.KvPushReply]:
        await anext(aiter(pushes))
        yield worker_pb2.KvPushReply(reserved=worker_pb2.KvReserved())
        async for push in pushes:
            if push.HasField("commit"):
                return

    async with strange_decode_worker(push_kv) as address:
        answer = prefill_to(split.prefill, address)
        await until(lambda: bool(split.prefill.engine.requests))
        id = split.prefill.engine.requests[0].request_id
        exported = [KvBlocks(id, 0, 3, kv_payload.share(b"x" * 64))]
        split.prefill.engine.step(
            first(id, 7, finish_reason=FinishReason.PREFILL_DONE), kv_exports=exported
        )
        end = await answer.end()
    assert status_of(end) == (UNAVAILABLE, "worker", "kv_transfer", "")
    assert "did not confirm" in end.status.message
    assert not any(delta.finish for delta in answer.deltas)
    assert not list(folder.glob("penstock-kv-*-*"))


def prefill_to(worker: Worker, address: str) -> Answer:
    to = worker_pb2.WorkerAddress(address=address, host_id=host_id("127.0.0.1"))
    return worker.open(mode=Work.PREFILL, transfer_id="t", push_to=to)


@asynccontextmanager
async def strange_decode_worker(push_kv: Any) -> AsyncIterator[str]:
    server = TRANSPORT.server()
    handler = grpc.stream_stream_rpc_method_handler(
        push_kv,
        request_deserializer=worker_pb2.KvPush.FromString,
        response_serializer=worker_pb2.KvPushReply.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("penstock.v1.Worker", {"PushKv": handler}),)
    )
    port = listen(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_a_decode_worker_that_nobody_reaches_ends_the_prefill(split: Split) -> None:
    end = await prefill_to(split.prefill, "127.0.0.1:1").end()
    assert status_of(end) == (UNAVAILABLE, "worker", "kv_transfer", "")
    assert not split.prefill.engine.requests


async def test_a_hand_over_under_way_outlives_its_engine(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its part is done; those that are not end with the engine."""
    taking = asyncio.Event()
    monkeypatch.setattr(split.decode.engine, "drain", taking.wait)
    prefilling, at_prefill, _, _ = await split.begin()
    other, _ = await split.prefill.ask()
    id = at_prefill.request_id
    split.prefill.engine.step(
        first(id, 7, finish_reason=FinishReason.PREFILL_DONE), kv_exports=[KvBlocks(id, 0, 3, b"x")]
    )
    await until(lambda: bool(prefilling.deltas))
    split.prefill.engine.die()
    assert (await other.end()).status.reason == "engine_died"
    taking.set()
    assert (await prefilling.end()).status.code == 0


async def test_a_decode_worker_that_takes_nothing_more_ends_the_prefill(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the patience that a router has with a worker that makes no step."""
    async with two_workers(folder, stall_timeout_s=0.2) as split:
        monkeypatch.setattr(split.decode.engine, "drain", asyncio.Event().wait)
        prefilling, at_prefill, _, _ = await split.begin()
        id = at_prefill.request_id
        split.prefill.engine.step(
            first(id, 7, finish_reason=FinishReason.PREFILL_DONE),
            kv_exports=[KvBlocks(id, 0, 3, b"x")],
        )
        end = await prefilling.end()
    assert status_of(end) == (UNAVAILABLE, "worker", "kv_transfer", "")
    assert "takes nothing any more" in end.status.message


async def test_a_worker_that_stops_leaves_no_connection(split: Split) -> None:
    _, _, decoding, _ = await split.begin()
    assert len(split.prefill.service._channels) == 1
    await split.prefill.service.stop()
    assert len(split.prefill.service._channels) == 0
    assert (await decoding.end()).status.reason == "kv_transfer"


async def test_a_prompt_whose_blocks_nobody_takes_is_not_computed_to_its_end(
    split: Split, folder: Path
) -> None:
    prefilling, at_prefill, decoding, _ = await split.begin()
    decoding.request.stop()
    await decoding.end()
    numbers = itertools.count()

    def given_up() -> bool:
        if not split.prefill.engine.cancelled:
            export(split, next(numbers))
        return bool(split.prefill.engine.cancelled)

    await until(given_up)
    assert status_of(await prefilling.end()) == (UNAVAILABLE, "worker", "kv_transfer", "")
    assert split.prefill.engine.cancelled == [at_prefill.request_id]
    assert not list(folder.glob("penstock-kv-*-*"))
