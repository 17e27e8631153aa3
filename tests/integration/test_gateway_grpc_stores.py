"""Files, vector stores and batches over gRPC: the same things as REST's, within the same bounds."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import grpc
import pytest

from protos import gateway_stores_pb2 as pb
from protos.gateway_pb2 import PublicSearchStoreRequest
from protos.gateway_pb2_grpc import InferenceStub
from protos.gateway_stores_pb2_grpc import BatchesStub, FilesStub, VectorStoresStub
from services.common.errors import invalid
from services.common.redis import RedisAway
from services.gateway.api.grpc import inbox as grpc_inbox
from services.gateway.identity.principal import Permission
from tests.support.gateway_rig import MODEL, Rig, gateway_rig
from tests.support.waiting import until

CODE = grpc.StatusCode
LIMIT_BYTES = 200_000
DAY = {"anchor": "created_at", "seconds": 86_400}
TEXT = "# Tides\n\nThe tide of the Bäke is high at noon.\n" * 2000


@pytest.fixture
async def rig(redis_url: str, namespace: str) -> AsyncIterator[Rig]:
    async with gateway_rig(
        redis_url, namespace, max_upload_bytes=LIMIT_BYTES, body_limit_bytes=LIMIT_BYTES
    ) as rig:
        yield rig


def upload(
    content: bytes, name: str = "tides.md", purpose: str = "assistants", piece: int = 10_007
) -> Iterator[pb.UploadFileRequest]:
    yield pb.UploadFileRequest(filename=name, purpose=purpose, bytes=len(content))
    for at in range(0, len(content), piece):
        yield pb.UploadFileRequest(data=content[at : at + piece])


class Desk:
    """A caller's stubs, and what it does all the time."""

    def __init__(self, rig: Rig, channel: grpc.aio.Channel, key: str) -> None:
        self.rig = rig
        self.files = FilesStub(channel)
        self.stores = VectorStoresStub(channel)
        self.batches = BatchesStub(channel)
        self.inference = InferenceStub(channel)
        self.own = (("authorization", f"Bearer {key}"),)

    @classmethod
    async def of(cls, rig: Rig, key: str | None = None) -> "Desk":
        return cls(rig, await rig.channel(), key or rig.key)

    async def file(self, text: str = TEXT, **more: Any) -> pb.File:
        reply: pb.File = await self.files.UploadFile(
            iter(upload(text.encode(), **more)), metadata=self.own
        )
        return reply

    async def content(self, id: str) -> bytes:
        call = self.files.GetFileContent(pb.GetFileContentRequest(file_id=id), metadata=self.own)
        pieces = [piece.data async for piece in call]
        assert all(len(piece) <= 64 * 1024 for piece in pieces)
        return b"".join(pieces)

    async def listed(self) -> list[str]:
        reply = await self.files.ListFiles(pb.ListFilesRequest(), metadata=self.own)
        return [file.id for file in reply.data]

    async def indexed(self, store: str) -> pb.VectorStore:
        found: list[pb.VectorStore] = []

        async def done() -> bool:
            request = pb.GetVectorStoreRequest(vector_store_id=store)
            found[:] = [await self.stores.GetVectorStore(request, metadata=self.own)]
            return found[0].status == "completed"

        await until(done, 10, "all files are indexed")
        return found[0]

    async def nothing_held(self) -> None:
        intake = self.rig.gateway.intake
        await until(lambda: intake.running == intake.bytes_held == 0, 5, "nothing is held")


@pytest.fixture
async def desk(rig: Rig) -> Desk:
    return await Desk.of(rig)


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """Its code, and the field at fault."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    trailers = dict(raised.value.trailing_metadata() or ())
    return raised.value.code(), str(trailers.get("x-param", ""))


def same(message: Any, json: dict[str, Any], besides: Iterable[str] = ("object",)) -> None:
    """What REST tells, field by field; what is null there is not set here."""
    for name, value in json.items():
        if name in besides:
            continue
        if value is None:
            assert name not in {field.name for field, _ in message.ListFields()}, name
        elif isinstance(value, dict):
            ours = getattr(message, name)
            assert dict(ours) == value if hasattr(ours, "items") else same(ours, value) is None
        else:
            assert getattr(message, name) == value, name


# ---- files --------------------------------------------------------------------------------------


async def test_a_file_is_the_same_by_both_ways(rig: Rig, desk: Desk) -> None:
    http = await rig.http()
    file = await desk.file()
    same(file, (await http.get(f"/v1/files/{file.id}")).json())
    assert (file.filename, file.purpose, file.bytes) == (
        "tides.md",
        "assistants",
        len(TEXT.encode()),
    )
    assert await desk.content(file.id) == TEXT.encode()
    assert await desk.files.GetFile(pb.GetFileRequest(file_id=file.id), metadata=desk.own) == file
    theirs = Desk(rig, await rig.channel(), (await rig.keys.create("globex"))[0])
    for call in (
        theirs.files.GetFile(pb.GetFileRequest(file_id=file.id), metadata=theirs.own),
        theirs.files.DeleteFile(pb.DeleteFileRequest(file_id=file.id), metadata=theirs.own),
        theirs.content(file.id),
    ):
        assert (await refusal(call))[0] is CODE.NOT_FOUND
    gone = await desk.files.DeleteFile(pb.DeleteFileRequest(file_id=file.id), metadata=desk.own)
    assert (gone.id, gone.deleted) == (file.id, True)
    assert (await http.get(f"/v1/files/{file.id}")).status_code == 404
    await desk.nothing_held()


async def test_how_long_a_file_stays_is_said_as_over_rest(rig: Rig, desk: Desk) -> None:
    first = pb.UploadFileRequest(
        filename="a.md", purpose="assistants", bytes=1, data=b"x", expires_after=DAY
    )
    file = await desk.files.UploadFile(iter([first]), metadata=desk.own)
    assert file.expires_at == file.created_at + 86_400
    same(file, (await (await rig.http()).get(f"/v1/files/{file.id}")).json())


async def test_lists_come_in_pages(desk: Desk) -> None:
    ids = [(await desk.file("a")).id for _ in range(3)]
    line = "{}"
    batch = (await desk.file(line, name="b.jsonl", purpose="batch")).id

    async def page(**asked: Any) -> tuple[list[str], bool]:
        reply = await desk.files.ListFiles(pb.ListFilesRequest(**asked), metadata=desk.own)
        found = [file.id for file in reply.data]
        assert (reply.first_id, reply.last_id) == (found[0], found[-1])
        return found, reply.has_more

    assert await page() == ([batch, *reversed(ids)], False)
    assert await page(order="asc", limit=2) == (ids[:2], True)
    assert await page(order="asc", after=ids[1]) == ([ids[2], batch], False)
    assert await page(purpose="batch") == ([batch], False)
    odd = desk.files.ListFiles(pb.ListFilesRequest(purpose="zz"), metadata=desk.own)
    assert await refusal(odd) == (CODE.INVALID_ARGUMENT, "purpose")
    for asked, param in (
        ({"limit": 0}, "limit"),
        ({"limit": 10_001}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "file-0"}, "after"),
    ):
        call = desk.files.ListFiles(pb.ListFilesRequest(**asked), metadata=desk.own)
        assert await refusal(call) == (CODE.INVALID_ARGUMENT, param)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"filename": "a.md", "purpose": "vision", "bytes": 1}], "purpose"),
        ([{"filename": "a.md", "bytes": 1}], "purpose"),
        ([{"filename": "a.md", "purpose": "assistants", "data": b"x"}], "bytes"),
        ([{"filename": "a.md", "purpose": "assistants", "bytes": LIMIT_BYTES + 1}], "bytes"),
        ([{"filename": "a.pdf", "purpose": "batch", "bytes": 1, "data": b"x"}], "filename"),
        ([{"purpose": "assistants", "bytes": 1, "data": b"x"}], "filename"),
        (
            [{"filename": "a\n[2] b.md", "purpose": "assistants", "bytes": 1, "data": b"x"}],
            "filename",
        ),
        (
            [{"filename": "a" * 300 + ".md", "purpose": "assistants", "bytes": 1, "data": b"x"}],
            "filename",
        ),
        ([{"filename": "a.jsonl", "purpose": "batch", "bytes": 1, "data": b"\xff"}], "data"),
        ([{"filename": "a.md", "purpose": "assistants", "bytes": 1, "data": b" "}], "data"),
        ([{"filename": "a.md", "purpose": "assistants", "bytes": 2, "data": b"x"}], "data"),
        ([{"filename": "a.md", "purpose": "assistants", "bytes": 2}, {"data": b"xyz"}], "data"),
        (
            [{"filename": "a.md", "purpose": "assistants", "bytes": 2}, {"filename": "b.md"}],
            "filename",
        ),
        (
            [{"filename": "a.md", "purpose": "assistants", "bytes": 2}, {"expires_after": DAY}],
            "expires_after",
        ),
        (
            [{"filename": "a.md", "purpose": "assistants", "bytes": 2, "expires_after": {}}],
            "expires_after.anchor",
        ),
        (
            [{"filename": "a.md", "purpose": "assistants", "expires_after": {**DAY, "seconds": 9}}],
            "expires_after.seconds",
        ),
        ([], ""),
    ],
)
async def test_an_upload_that_is_none_is_refused_by_its_field(
    desk: Desk, messages: list[dict[str, Any]], param: str
) -> None:
    sent = iter([pb.UploadFileRequest(**one) for one in messages])
    call = desk.files.UploadFile(sent, metadata=desk.own)
    assert await refusal(call) == (CODE.INVALID_ARGUMENT, param)
    assert await desk.listed() == []
    await desk.nothing_held()


async def test_what_is_said_of_a_file_is_said_as_over_rest(rig: Rig, desk: Desk) -> None:
    form = {"files": {"file": ("a.exe", b"x")}, "data": {"purpose": "batch"}}
    told = (await (await rig.http()).post("/v1/files", **form)).json()["error"]["message"]
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await desk.file("x", name="a.exe", purpose="batch")
    assert raised.value.details() == told


async def test_an_upload_without_an_end_is_read_no_further_than_was_said(desk: Desk) -> None:
    """By gRPC's blocking client: where a write fails as its call ends, the other one takes that for
    the call's end (INTERNAL, "Internal error from Core"), if it hears of it first."""
    sent = 0

    def endless() -> Iterator[pb.UploadFileRequest]:
        nonlocal sent
        yield pb.UploadFileRequest(filename="a.md", purpose="assistants", bytes=100_000)
        while True:
            sent += 10_000
            yield pb.UploadFileRequest(data=b"x" * 10_000)

    def refused(pieces: Iterator[pb.UploadFileRequest]) -> tuple[grpc.StatusCode, str]:
        address = desk.rig.host.replica.facts["grpc"]  # type: ignore[union-attr]
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as raised:
            FilesStub(channel).UploadFile(pieces, metadata=desk.own, timeout=60)
        trailers = dict(raised.value.trailing_metadata() or ())
        return raised.value.code(), str(trailers.get("x-param", ""))

    assert await asyncio.to_thread(refused, endless()) == (CODE.INVALID_ARGUMENT, "data")
    assert sent < 2_000_000  # what fits into the windows beside
    large = [pb.UploadFileRequest(data=b"x" * (LIMIT_BYTES + 1))]
    assert (await asyncio.to_thread(refused, iter(large)))[0] is CODE.RESOURCE_EXHAUSTED
    assert await desk.listed() == []
    await desk.nothing_held()


async def begun(desk: Desk, **more: Any) -> Any:
    """An upload of which the gateway has the beginning."""
    before = desk.rig.gateway.intake.running
    call = desk.files.UploadFile(metadata=desk.own, **more)
    first = pb.UploadFileRequest(filename="a.md", purpose="assistants", bytes=9, data=b"half")
    await call.write(first)
    await until(lambda: desk.rig.gateway.intake.running == before + 1, 5)
    return call


async def test_of_an_upload_that_its_client_leaves_nothing_stays(rig: Rig, desk: Desk) -> None:
    call = await begun(desk)
    call.cancel()
    await desk.nothing_held()
    late = await begun(desk, timeout=0.3)
    assert (await refusal(late))[0] is CODE.DEADLINE_EXCEEDED
    await desk.nothing_held()
    assert rig.host.replica is not None
    channel = grpc.aio.insecure_channel(rig.host.replica.facts["grpc"])
    lost = await begun(Desk(rig, channel, rig.key))
    await channel.close()  # the connection goes with it
    await desk.nothing_held()
    assert await desk.listed() == []
    assert lost.done()


async def test_an_upload_that_stands_still_ends(redis_url: str, namespace: str) -> None:
    async with gateway_rig(redis_url, namespace, body_grace_s=0.3) as rig:
        desk = await Desk.of(rig)
        call = await begun(desk)
        assert await refusal(call) == (CODE.INVALID_ARGUMENT, "")
        await desk.nothing_held()


async def test_a_tenants_uploads_take_turns_and_others_calls_do_not_wait(
    rig: Rig, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = [await begun(desk) for _ in range(4)]
    held = range(4 * LIMIT_BYTES + 1, 4 * (LIMIT_BYTES + 1000))
    await until(lambda: rig.gateway.intake.bytes_held in held, 5, "what came, and a message's room")
    assert await desk.listed() == []
    waiting = asyncio.ensure_future(desk.file("later"))
    other = await Desk.of(rig, (await rig.keys.create("globex"))[0])
    await other.file("mine")
    assert not waiting.done()
    await running[0].write(pb.UploadFileRequest(data=b" more"))
    await running[0].done_writing()
    assert (await running[0]).bytes == 9
    await waiting
    running.append(await begun(desk))
    monkeypatch.setattr(grpc_inbox, "MESSAGE_TIMEOUT_S", 0.2)
    assert (await refusal(desk.file("never")))[0] is CODE.RESOURCE_EXHAUSTED
    for call in running:
        call.cancel()
    await desk.nothing_held()


async def test_a_large_file_is_told_to_who_reads_and_no_other(
    redis_url: str, namespace: str
) -> None:
    async with gateway_rig(redis_url, namespace, write_timeout_s=0.3) as rig:
        desk = await Desk.of(rig)
        file = await desk.file("x" * 999_999, piece=100_000)
        assert rig.host.replica is not None
        small = [("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(rig.host.replica.facts["grpc"], options=small) as own:
            request = pb.GetFileContentRequest(file_id=file.id)
            call = FilesStub(own).GetFileContent(request, metadata=desk.own)
            await until(lambda: rig.gateway.intake.bytes_held > 0, 5)
            await until(lambda: rig.gateway.intake.bytes_held == 0, 5)
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert await call.code() is CODE.RESOURCE_EXHAUSTED
        assert len(await desk.content(file.id)) == 999_999


# ---- vector stores ------------------------------------------------------------------------------


async def test_a_store_is_the_same_by_both_ways(rig: Rig, desk: Desk) -> None:
    http = await rig.http()
    file = await desk.file("The tide is high at noon.")
    made = await desk.stores.CreateVectorStore(
        pb.CreateVectorStoreRequest(name="tides", file_ids=[file.id], metadata={"a": "b"}),
        metadata=desk.own,
    )
    store = await desk.indexed(made.id)
    told = (await http.get(f"/v1/vector_stores/{made.id}")).json()
    same(store, told, ("object", "expires_after", "expires_at", "cache"))
    assert store.file_counts.completed == 1
    request = PublicSearchStoreRequest(vector_store_id=made.id, query="tide")
    found = await desk.inference.SearchStore(request, metadata=desk.own)
    assert [passage.source_id for passage in found.passages] == [file.id]

    more = await desk.file("Lamps burn oil.")
    attach = pb.AttachFileRequest(vector_store_id=made.id, file_id=more.id)
    attached = await desk.stores.AttachFile(attach, metadata=desk.own)
    assert (attached.vector_store_id, attached.id) == (made.id, more.id)
    await desk.indexed(made.id)
    look = pb.GetAttachedFileRequest(vector_store_id=made.id, file_id=more.id)
    attached = await desk.stores.GetAttachedFile(look, metadata=desk.own)
    told = (await http.get(f"/v1/vector_stores/{made.id}/files/{more.id}")).json()
    same(attached, told, ("object", "attributes"))
    for asked, ids in (
        ({"filter": "completed", "limit": 1}, [more.id]),
        ({"filter": "failed"}, []),
    ):
        request = pb.ListAttachedFilesRequest(vector_store_id=made.id, **asked)
        reply = await desk.stores.ListAttachedFiles(request, metadata=desk.own)
        assert [one.id for one in reply.data] == ids
        assert reply.has_more == bool(ids)
    detach = pb.DetachFileRequest(vector_store_id=made.id, file_id=more.id)
    assert (await desk.stores.DetachFile(detach, metadata=desk.own)).deleted
    assert (await refusal(desk.stores.GetAttachedFile(look, metadata=desk.own)))[
        0
    ] is CODE.NOT_FOUND
    reply = await desk.stores.ListVectorStores(pb.ListVectorStoresRequest(), metadata=desk.own)
    assert [(one.id, one.file_counts.total) for one in reply.data] == [(made.id, 1)]
    delete = pb.DeleteVectorStoreRequest(vector_store_id=made.id)
    assert (await desk.stores.DeleteVectorStore(delete, metadata=desk.own)).id == made.id
    assert (await http.get("/v1/vector_stores")).json()["data"] == []
    await desk.nothing_held()


async def test_a_file_that_retrieval_refuses_says_why(rig: Rig, desk: Desk) -> None:
    rig.retrieval.failure = invalid("It cannot be cut.", "text")
    file = await desk.file("a")
    create = pb.CreateVectorStoreRequest(file_ids=[file.id])
    store = await desk.stores.CreateVectorStore(create, metadata=desk.own)
    assert (await desk.indexed(store.id)).file_counts.failed == 1
    look = pb.GetAttachedFileRequest(vector_store_id=store.id, file_id=file.id)
    attached = await desk.stores.GetAttachedFile(look, metadata=desk.own)
    assert (attached.status, attached.last_error.code) == ("failed", "invalid_file")
    assert attached.last_error.message == "It cannot be cut."


async def test_what_is_too_many_or_missing_is_refused_by_its_name(desk: Desk) -> None:
    stores, own = desk.stores, desk.own
    for call, param in (
        (stores.CreateVectorStore, pb.CreateVectorStoreRequest(file_ids=["file-x"] * 2001)),
        (stores.CreateVectorStore, pb.CreateVectorStoreRequest(name="x" * 257)),
        (
            stores.CreateVectorStore,
            pb.CreateVectorStoreRequest(metadata={str(n): "" for n in range(17)}),
        ),
        (stores.GetVectorStore, pb.GetVectorStoreRequest()),
        (stores.AttachFile, pb.AttachFileRequest(vector_store_id="vs_0")),
        (
            stores.ListAttachedFiles,
            pb.ListAttachedFilesRequest(vector_store_id="vs_0", filter="odd"),
        ),
        (desk.files.GetFile, pb.GetFileRequest()),
        (desk.batches.CreateBatch, pb.CreateBatchRequest(input_file_id="file-0")),
        (desk.batches.GetBatch, pb.GetBatchRequest()),
    ):
        request, expected = param, _expected(param)
        assert await refusal(call(request, metadata=own)) == (CODE.INVALID_ARGUMENT, expected)
    unknown = pb.CreateVectorStoreRequest(file_ids=["file-" + "0" * 30])
    call = stores.CreateVectorStore(unknown, metadata=own)
    assert await refusal(call) == (CODE.NOT_FOUND, "file_ids[0]")
    many = pb.CreateVectorStoreRequest(file_ids=[""] * 20_000)
    assert (await refusal(stores.CreateVectorStore(many, metadata=own))) == (
        CODE.INVALID_ARGUMENT,
        "",
    )


def _expected(request: Any) -> str:
    match request:
        case pb.CreateVectorStoreRequest():
            return "file_ids" if request.file_ids else "name" if request.name else "metadata"
        case pb.AttachFileRequest() | pb.GetFileRequest():
            return "file_id"
        case pb.ListAttachedFilesRequest():
            return "filter"
        case pb.CreateBatchRequest():
            return "endpoint"
        case pb.GetBatchRequest():
            return "batch_id"
    return "vector_store_id"


# ---- batches ------------------------------------------------------------------------------------


def line(id: str) -> str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": id}]}
    return json.dumps(
        {"custom_id": id, "method": "POST", "url": "/v1/chat/completions", "body": body}
    )


async def test_a_batch_is_the_same_by_both_ways(rig: Rig, desk: Desk) -> None:
    text = "\n".join([*(line(str(n)) for n in range(5)), line("x").replace(MODEL, "none")])
    file = await desk.file(text, name="b.jsonl", purpose="batch")
    create = pb.CreateBatchRequest(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="1h",
        metadata={"for": "test"},
    )
    made = await desk.batches.CreateBatch(create, metadata=desk.own)
    ended: list[pb.Batch] = []

    async def over() -> bool:
        request = pb.GetBatchRequest(batch_id=made.id)
        ended[:] = [await desk.batches.GetBatch(request, metadata=desk.own)]
        return ended[0].status == "completed"

    await until(over, 20, "the batch ends")
    http = await rig.http()
    same(ended[0], (await http.get(f"/v1/batches/{made.id}")).json())
    assert (ended[0].request_counts.completed, ended[0].request_counts.failed) == (5, 1)
    lines = (await desk.content(ended[0].output_file_id)).splitlines()
    assert {json.loads(one)["custom_id"] for one in lines} == set("01234")
    reply = await desk.batches.ListBatches(pb.ListBatchesRequest(limit=1), metadata=desk.own)
    assert [one.id for one in reply.data] == [made.id]
    cancel = pb.CancelBatchRequest(batch_id=made.id)
    call = desk.batches.CancelBatch(cancel, metadata=desk.own)
    assert await refusal(call) == (CODE.INVALID_ARGUMENT, "batch_id")


async def test_a_batch_that_is_wrong_says_where(desk: Desk) -> None:
    file = await desk.file(line("a") + "\n{}", name="b.jsonl", purpose="batch")
    create = pb.CreateBatchRequest(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="1h"
    )
    made = await desk.batches.CreateBatch(create, metadata=desk.own)
    failed: list[pb.Batch] = []

    async def over() -> bool:
        request = pb.GetBatchRequest(batch_id=made.id)
        failed[:] = [await desk.batches.GetBatch(request, metadata=desk.own)]
        return failed[0].status == "failed"

    await until(over, 20, "the batch fails")
    (error,) = failed[0].errors.data
    assert (error.line, error.code, error.param) == (2, "missing_required_parameter", "body")


async def test_a_batch_needs_leave_for_files_too(rig: Rig) -> None:
    key, _ = await rig.keys.create("acme", scopes=[Permission.INFERENCE, Permission.FILES_READ])
    desk = await Desk.of(rig, key)
    call = desk.batches.CreateBatch(pb.CreateBatchRequest(), metadata=desk.own)
    assert (await refusal(call))[0] is CODE.PERMISSION_DENIED


async def test_without_redis_nothing_is_kept(
    rig: Rig, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: Any) -> None:
        raise RedisAway[0]("away")

    await desk.listed()  # so that the key is known
    monkeypatch.setattr(rig.gateway.files, "all", away)
    call = desk.files.ListFiles(pb.ListFilesRequest(), metadata=desk.own)
    assert (await refusal(call))[0] is CODE.UNAVAILABLE
