"""Files that come in parts: what they take of a tenant's room, and what is left of them at any
end."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest

from services.common.blobs import Blobs
from services.common.config import GatewaySettings
from services.common.errors import PenstockError
from services.common.redis import Redis, connect
from services.gateway.ids import PART
from services.gateway.stores.files import uploads as module
from services.gateway.stores.files.files import Files
from services.gateway.stores.files.upload_record import LASTS_S, UploadRecord
from services.gateway.stores.files.uploads import Uploads
from tests.support.blob_folder import memory_blobs, pieces


class Bed(NamedTuple):
    redis: Redis
    root: str
    blobs: Blobs
    files: Files
    uploads: Uploads

    async def begin(self, size: int = 10, **about: Any) -> UploadRecord:
        told = {"filename": "a.txt", "purpose": "assistants", "file_expires_s": None, **about}
        return await self.uploads.create("t", size=size, **told)

    async def add(self, upload: UploadRecord, *content: bytes) -> str:
        return (await self.uploads.add("t", upload.id, pieces(*content))).id

    async def refused(self, call: Any) -> tuple[str, str]:
        with pytest.raises(PenstockError) as refused:
            await call
        return refused.value.reason, refused.value.param

    async def counted(self) -> tuple[int, int]:
        """Bytes that count as the tenant's, and as all tenants'."""
        own, all = await self.redis.mget(f"{self.root}:t:blobs", f"{self.root}:blobs")
        return int(own or 0), int(all or 0)

    async def kept(self) -> set[str]:
        """The last parts of blobs' keys."""
        return {blob.key.rpartition("/")[2] async for blob in self.blobs.all()}

    async def age(self, upload: UploadRecord, seconds: int = LASTS_S) -> None:
        key, due = f"{self.root}:t:uploads", f"{self.root}:uploads"
        record = json.loads(await self.redis.hget(key, upload.id))
        record["created_at"] -= seconds
        await self.redis.hset(key, upload.id, json.dumps(record))
        await self.redis.zincrby(due, -seconds, f"t {upload.id}")


@pytest.fixture
async def bed(redis_url: str, namespace: str) -> AsyncIterator[Bed]:
    redis, blobs = connect(redis_url), memory_blobs(namespace)
    limits = GatewaySettings(
        max_files=3,
        max_blob_bytes_per_tenant=100,
        max_blob_bytes=150,
        max_upload_bytes=80,
        body_limit_bytes=40,
    )
    files = Files(redis, namespace, limits, blobs)
    uploads = Uploads(redis, namespace, limits, blobs, files)
    yield Bed(redis, f"{namespace}:{{files}}", blobs, files, uploads)
    await redis.aclose()


async def test_a_file_is_its_parts_in_the_order_that_is_told(bed: Bed) -> None:
    upload = await bed.begin(10, file_expires_s=7200)
    second, first = await bed.add(upload, b"fgh", b"ij"), await bed.add(upload, b"abcde")
    left_out = await bed.refused(bed.add(upload, b"x"))
    assert left_out == ("too_many_bytes_in_upload", "data")
    done, file = await bed.uploads.complete("t", upload.id, [first, second])
    assert file is not None
    assert (done.state, done.file, file.bytes) == ("completed", file.id, 10)
    assert await bed.files.content("t", file.id) == b"abcdefghij"
    assert file.expires_at == file.created_at + 7200
    assert await bed.redis.zscore(f"{bed.root}:expiring", f"t {file.id}") == file.expires_at
    assert (await bed.counted(), await bed.kept()) == ((10, 10), {file.id})
    assert await bed.files.delete("t", file.id)
    assert (await bed.counted(), await bed.kept()) == ((0, 0), set())


async def test_what_was_announced_counts_until_it_ends(bed: Bed) -> None:
    upload = await bed.begin(80)
    assert await bed.counted() == (80, 80)
    assert await bed.refused(bed.begin(21)) == ("too_many_bytes_of_files", "")
    told = {"filename": "a", "purpose": "assistants", "file_expires_s": None}
    other = bed.uploads.create("other", size=71, **told)  # type: ignore[arg-type]
    assert await bed.refused(other) == ("storage_full", "")
    await bed.add(upload, b"x" * 50)
    assert (await bed.uploads.cancel("t", upload.id)).state == "cancelled"
    assert (await bed.counted(), await bed.kept()) == ((0, 0), set())
    assert (await bed.uploads.cancel("t", upload.id)).state == "cancelled", "as a retry asks"
    assert await bed.counted() == (0, 0)
    for call in (bed.add(upload, b"x"), bed.uploads.complete("t", upload.id, ["part_x"])):
        assert await bed.refused(call) == ("upload_cancelled", "upload_id")


async def test_a_retry_of_its_end_hears_the_same(bed: Bed) -> None:
    upload = await bed.begin(3)
    part = await bed.add(upload, b"abc")
    ends = [bed.uploads.complete("t", upload.id, [part]) for _ in range(3)]
    told = {file.id for _, file in await asyncio.gather(*ends) if file is not None}
    assert len(told) == 1
    assert await bed.kept() == told, "what the slower ones had put together is gone"
    assert [one.id for one in await bed.files.all("t")] == [*told]
    assert await bed.counted() == (3, 3)
    assert await bed.refused(bed.uploads.cancel("t", upload.id)) == (
        "upload_completed",
        "upload_id",
    )
    await bed.files.delete("t", told.pop())
    again, gone = await bed.uploads.complete("t", upload.id, [part])
    assert (again.state, gone) == ("completed", None)


async def test_it_is_put_together_by_one_call_at_a_time(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is completed what is put together counts as nobody's: a hundred calls at once would
    fill the disk."""
    upload, other = await bed.begin(3), await bed.begin(3)
    parts = {one.id: await bed.add(one, b"abc") for one in (upload, other)}
    put, under_way, most = bed.blobs.put, 0, 0
    two = asyncio.Event()

    async def slow(key: str, content: Any) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        if under_way == 2:
            two.set()
        try:
            await asyncio.wait_for(two.wait(), 20)
            for _ in range(10):
                await asyncio.sleep(0)
            await put(key, content)
        finally:
            under_way -= 1

    monkeypatch.setattr(bed.blobs, "put", slow)
    wrong = [bed.uploads.complete("t", upload.id, [parts[upload.id]], "0" * 32) for _ in range(5)]
    right = bed.uploads.complete("t", other.id, [parts[other.id]])
    told = await asyncio.gather(*wrong, right, return_exceptions=True)
    assert [isinstance(one, PenstockError) for one in told] == [True] * 5 + [False]
    assert most == 2, "one of each"
    assert not bed.uploads._completing


async def test_one_that_nobody_ends_is_gone_after_an_hour(bed: Bed) -> None:
    upload, other = await bed.begin(10), await bed.begin(20)
    part = await bed.add(upload, b"x" * 10)
    await bed.age(upload, LASTS_S - 60)
    await bed.uploads.look()
    assert await bed.counted() == (30, 30)
    await bed.age(upload, 60)
    complete = bed.uploads.complete("t", upload.id, [part])
    assert await bed.refused(complete) == ("upload_expired", "upload_id")
    await bed.uploads.look()
    assert (await bed.counted(), await bed.kept()) == ((20, 20), set())
    assert await bed.refused(bed.uploads.cancel("t", upload.id)) == ("not_found", "")
    keys = {str(key) async for key in bed.redis.scan_iter(f"{bed.root}:t:*")}
    assert keys == {f"{bed.root}:t:uploads", f"{bed.root}:t:blobs"}
    assert await bed.redis.zrange(f"{bed.root}:uploads", 0, -1) == [f"t {other.id}"]


async def test_one_that_became_a_file_leaves_it_when_it_is_forgotten(bed: Bed) -> None:
    upload = await bed.begin(3)
    _, file = await bed.uploads.complete("t", upload.id, [await bed.add(upload, b"abc")])
    await bed.age(upload)
    await bed.uploads.look()
    assert file is not None
    assert await bed.files.content("t", file.id) == b"abc"
    assert await bed.counted() == (3, 3)


async def test_what_is_wrong_with_parts_is_named(bed: Bed) -> None:
    upload = await bed.begin(10)
    one, two = await bed.add(upload, b"abcde"), await bed.add(upload, b"fghij")

    def complete(*ids: str, md5: str = "") -> Any:
        return bed.uploads.complete("t", upload.id, ids, md5)

    foreign = await bed.add(await bed.begin(1), b"x")
    assert await bed.refused(complete(one)) == ("incomplete_upload", "part_ids")
    assert await bed.refused(complete(one, one)) == ("", "part_ids[1]")
    assert await bed.refused(complete(one, foreign)) == ("not_found", "part_ids[1]")
    assert await bed.refused(complete(one, PART.new())) == ("not_found", "part_ids[1]")
    assert await bed.refused(complete(one, two, md5="0" * 32)) == ("", "md5")
    assert await bed.kept() == {one, two, foreign}, "it can be completed still"
    md5 = "A925576942E94B2EF57A066101B48876"  # of abcdefghij
    assert (await complete(one, two, md5=md5))[0].state == "completed"
    assert await bed.refused(bed.add(await bed.begin(1))) == ("", "data")


@pytest.mark.parametrize(
    ("about", "reason", "param"),
    [
        ({"filename": ""}, "", "filename"),
        ({"filename": "x" * 256}, "", "filename"),
        ({"filename": "a\n[2] b\nText.txt"}, "", "filename"),
        ({"filename": "a\x00b.txt"}, "", "filename"),
        ({"filename": "\x1b]0;a.txt"}, "", "filename"),
        ({"filename": "a\x85b.txt"}, "", "filename"),
        ({"filename": "a\u2028b.txt"}, "", "filename"),
        ({"purpose": "batch"}, "unsupported_file", "filename"),
        ({"size": 81}, "file_too_large", "bytes"),
        ({"size": 41, "purpose": "batch", "filename": "a.jsonl"}, "file_too_large", "bytes"),
    ],
)
async def test_what_no_file_may_be_is_told_at_the_beginning(
    bed: Bed, about: dict[str, Any], reason: str, param: str
) -> None:
    assert await bed.refused(bed.begin(**about)) == (reason, param)


async def test_what_no_file_may_hold_is_told_at_the_end(bed: Bed) -> None:
    blank, odd = await bed.begin(3), await bed.begin(2, purpose="batch", filename="a.jsonl")
    for upload, content in ((blank, b" \n "), (odd, b"\xffa")):
        part = await bed.add(upload, content)
        complete = bed.uploads.complete("t", upload.id, [part])
        assert await bed.refused(complete) == ("invalid_file", "file")
    assert await bed.files.all("t") == []


async def test_so_many_and_no_more(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UPLOADS", 2)
    monkeypatch.setattr(module, "MAX_PARTS", 2)
    upload, other = await bed.begin(10), await bed.begin(1)
    assert await bed.refused(bed.begin(1)) == ("too_many_unfinished_uploads", "")
    await bed.uploads.cancel("t", other.id)
    third = await bed.begin(1)  # in the place of the one that has ended
    assert await bed.refused(bed.uploads.cancel("t", other.id)) == ("not_found", "")
    parts = [await bed.add(upload, b"x" * 5), await bed.add(upload, b"x" * 4)]
    assert await bed.refused(bed.add(upload, b"x")) == ("", "data")
    assert await bed.kept() == set(parts)
    for name in ("a", "b", "c"):
        await bed.files.create("t", f"{name}.txt", pieces(b"x"))
    assert await bed.refused(bed.begin(1)) == ("too_many_files", "")
    complete = bed.uploads.complete("t", third.id, [await bed.add(third, b"x")])
    assert await bed.refused(complete) == ("too_many_files", "")


async def test_parts_at_once_do_not_pass_what_was_announced_together(bed: Bed) -> None:
    upload = await bed.begin(10)
    adds = [bed.uploads.add("t", upload.id, pieces(b"x" * 4)) for _ in range(6)]
    told = await asyncio.gather(*adds, return_exceptions=True)
    assert sum(isinstance(one, PenstockError) for one in told) == 4
    assert len(await bed.kept()) == 2


async def test_a_record_of_another_version_can_be_ended(bed: Bed) -> None:
    """It may have what this one does not know, and is compared as it is."""
    upload = await bed.begin(3)
    key = f"{bed.root}:t:uploads"
    record = json.loads(await bed.redis.hget(key, upload.id))
    await bed.redis.hset(key, upload.id, json.dumps({**record, "later": True}))
    part = await bed.add(upload, b"abc")
    assert (await bed.uploads.complete("t", upload.id, [part]))[0].state == "completed"


async def test_another_tenants_is_none(bed: Bed) -> None:
    upload = await bed.begin(3)
    part = await bed.add(upload, b"abc")
    for call in (
        bed.uploads.add("u", upload.id, pieces(b"x")),
        bed.uploads.complete("u", upload.id, [part]),
        bed.uploads.cancel("u", upload.id),
    ):
        assert (await bed.refused(call))[0] == "not_found"
    assert time.time() < upload.expires_at
