"""Uploads in parts over gRPC: REST's, by the same rules."""

import hashlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from protos import gateway_stores_pb2 as pb
from protos.gateway_stores_pb2_grpc import UploadsStub
from tests.support.gateway_rig import Rig, gateway_rig

CODE = grpc.StatusCode
LIMIT_BYTES = 200_000


@pytest.fixture
async def rig(redis_url: str, namespace: str) -> AsyncIterator[Rig]:
    async with gateway_rig(redis_url, namespace, max_upload_bytes=LIMIT_BYTES) as rig:
        yield rig


class Desk:
    """A caller's stub."""

    def __init__(self, channel: grpc.aio.Channel, key: str) -> None:
        self.stub = UploadsStub(channel)
        self.own = (("authorization", f"Bearer {key}"),)

    @classmethod
    async def of(cls, rig: Rig, key: str = "") -> "Desk":
        return cls(await rig.channel(), key or rig.key)

    async def begin(self, size: int, **more: Any) -> Any:
        fields = {"filename": "a.md", "purpose": "assistants", "mime_type": "text/markdown"}
        request = pb.CreateUploadRequest(**{**fields, "bytes": size, **more})
        return await self.stub.CreateUpload(request, metadata=self.own)

    async def part(self, upload: str, data: bytes, size: int | None = None) -> Any:
        size = len(data) if size is None else size

        def pieces() -> Iterator[pb.AddUploadPartRequest]:
            yield pb.AddUploadPartRequest(upload_id=upload, bytes=size)
            for at in range(0, len(data), 7):
                yield pb.AddUploadPartRequest(data=data[at : at + 7])

        return await self.stub.AddUploadPart(pieces(), metadata=self.own)

    async def complete(self, upload: str, *parts: str, **more: Any) -> Any:
        request = pb.CompleteUploadRequest(upload_id=upload, part_ids=parts, **more)
        return await self.stub.CompleteUpload(request, metadata=self.own)

    async def cancel(self, upload: str) -> Any:
        request = pb.CancelUploadRequest(upload_id=upload)
        return await self.stub.CancelUpload(request, metadata=self.own)


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    trailers = dict(refused.value.trailing_metadata() or ())
    return refused.value.code(), str(trailers.get("x-param", ""))


async def test_a_file_comes_in_parts_by_either_way(rig: Rig) -> None:
    desk, http = await Desk.of(rig), await rig.http()
    text = b"# Tides\n\nThe tide is high at noon.\n"
    expires = pb.FileExpiresAfter(anchor="created_at", seconds=7200)
    begun = await desk.begin(len(text), expires_after=expires)
    assert begun.status == "pending"
    assert begun.expires_at > begun.created_at
    assert not begun.HasField("file")
    second = await http.post(f"/v1/uploads/{begun.id}/parts", files={"data": text[10:]})
    first = await desk.part(begun.id, text[:10])
    assert first.upload_id == begun.id
    parts = first.id, second.json()["id"]
    done = await desk.complete(begun.id, *parts, md5=hashlib.md5(text).hexdigest())
    assert (done.status, done.file.bytes, done.file.filename) == ("completed", len(text), "a.md")
    assert done.file.expires_at == done.file.created_at + 7200
    assert (await http.get(f"/v1/files/{done.file.id}/content")).content == text
    assert (await desk.complete(begun.id, *parts)).file.id == done.file.id


async def test_what_is_wrong_is_named(rig: Rig) -> None:
    desk = await Desk.of(rig)
    wrong, none = CODE.INVALID_ARGUMENT, CODE.NOT_FOUND
    assert await refusal(desk.begin(5, purpose="dreams")) == (wrong, "purpose")
    assert await refusal(desk.begin(5, mime_type="")) == (wrong, "mime_type")
    assert await refusal(desk.begin(0)) == (wrong, "bytes")
    begun = await desk.begin(5)
    assert await refusal(desk.part("", b"Hello")) == (wrong, "upload_id")
    assert (await refusal(desk.part("upload_1", b"Hello")))[0] == none
    assert await refusal(desk.part(begun.id, b"Hel", 5)) == (wrong, "data"), "it ended before"
    assert await refusal(desk.part(begun.id, b"Hello", 3)) == (wrong, "data"), "more came"
    assert (await refusal(desk.part(begun.id, b"", LIMIT_BYTES + 1)))[1] == "bytes"
    assert await refusal(desk.complete(begun.id)) == (wrong, "part_ids")
    assert await refusal(desk.complete("", "part_1")) == (wrong, "upload_id")
    part = await desk.part(begun.id, b"Hello")
    assert await refusal(desk.complete(begun.id, part.id, md5="0" * 32)) == (wrong, "md5")
    assert (await desk.cancel(begun.id)).status == "cancelled"
    assert (await refusal(desk.part(begun.id, b"Hello")))[0] == wrong


async def test_another_tenants_is_none(rig: Rig) -> None:
    begun = await (await Desk.of(rig)).begin(5)
    key, _ = await rig.keys.create("another")
    stranger = await Desk.of(rig, key)
    for call in (
        stranger.part(begun.id, b"Hello"),
        stranger.complete(begun.id, "part_1"),
        stranger.cancel(begun.id),
    ):
        assert (await refusal(call))[0] == CODE.NOT_FOUND
