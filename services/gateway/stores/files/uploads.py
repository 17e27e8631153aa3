"""Files that are uploaded in parts (decision 0068): these are blobs of their own until the upload
is completed, which makes a file of them, cancelled or an hour old."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from services.common.blobs import Blobs, NoBlobError
from services.common.config import GatewaySettings
from services.common.errors import PenstockError, invalid
from services.common.redis import Redis, Script
from services.gateway import metrics
from services.gateway.ids import FILE, PART, UPLOAD, not_found
from services.gateway.stores.files.file_record import FileRecord, Purpose
from services.gateway.stores.files.files import Files
from services.gateway.stores.files.storage_room import storage_full, too_many
from services.gateway.stores.files.upload import Upload, check_name, max_bytes, too_large
from services.gateway.stores.files.upload_record import Part, UploadRecord

_SOURCE = Path(__file__).with_name("uploads.lua").read_text()
MAX_UPLOADS = 100  # of a tenant; those that have ended make place
MAX_PARTS = 1000
_AT_ONCE = 16


class Kept(NamedTuple):
    """An upload as it is kept."""

    stored: str  # its record
    record: UploadRecord
    parts: Mapping[str, int]  # their bytes, by their ids

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())


class Uploads:
    """Methods raise `RedisAway` when Redis is away, NOT_FOUND for an unknown id, INVALID_ARGUMENT
    for an upload that has ended ("upload_completed", "upload_cancelled", "upload_expired")."""

    def __init__(
        self, redis: Redis, namespace: str, settings: GatewaySettings, blobs: Blobs, files: Files
    ) -> None:
        self._redis = redis
        self._root = f"{namespace}:{{files}}"
        self._settings = settings
        self._blobs = blobs
        self._files = files
        self._script = Script(redis, _SOURCE)
        self._completing: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    async def create(
        self, tenant: str, filename: str, size: int, purpose: Purpose, file_expires_s: int | None
    ) -> UploadRecord:
        """Its `size`, in bytes, counts as the tenant's from now on. Raises INVALID_ARGUMENT for
        what no file may be, RESOURCE_EXHAUSTED for what has no room."""
        own = self._settings
        check_name(filename, purpose, "filename")
        if size > (most := max_bytes(purpose, own)):
            raise too_large(most, "bytes")
        self._files.room.check()
        record = UploadRecord(
            id=UPLOAD.new(),
            filename=filename,
            bytes=size,
            created_at=int(time.time()),
            purpose=purpose,
            file_expires_s=file_expires_s,
        )
        limits = {
            "uploads": ("unfinished uploads", MAX_UPLOADS),
            "files": ("files", own.max_files),
            "bytes": ("bytes of files", own.max_blob_bytes_per_tenant),
        }
        bounds = [MAX_UPLOADS, own.max_files, own.max_blob_bytes_per_tenant, own.max_blob_bytes]
        told = (record.model_dump_json(), size, record.expires_at, *bounds)
        outcome = await self._call("create", tenant, record.id, *told)
        if outcome == "all":
            raise storage_full()
        if outcome in limits:
            metrics.files_refused.labels("tenant").inc()
            raise too_many(*limits[outcome])
        return record

    async def add(self, tenant: str, id: str, content: AsyncIterable[bytes]) -> Part:
        """Raises INVALID_ARGUMENT for an empty part, and for bytes beyond those announced."""
        kept = await self._read(tenant, id)
        record, left = kept.record, kept.record.bytes - kept.bytes
        _check_pending(record)
        self._files.room.check()
        part = Part(id=PART.new(), upload=id, created_at=int(time.time()))
        size = 0

        async def counted() -> AsyncIterator[bytes]:
            nonlocal size
            async for piece in content:
                size += len(piece)
                if size > left:
                    raise _too_many_bytes(record)
                yield piece

        key = self._blobs.key(tenant, part.id)
        try:
            await self._blobs.put(key, counted())
            if not size:
                raise invalid("The part is empty.", "data", stage="gateway")
            outcome = await self._call("add", tenant, id, kept.stored, part.id, size, MAX_PARTS)
            if outcome == "changed":
                raise _ended((await self._read(tenant, id)).record)
            if outcome == "parts":
                raise invalid(f"An upload has at most {MAX_PARTS} parts.", "data", stage="gateway")
            if outcome == "bytes":
                raise _too_many_bytes(record)
        except PenstockError:
            await self._blobs.delete(key)
            raise
        return part

    async def complete(
        self, tenant: str, id: str, part_ids: Sequence[str], md5: str = ""
    ) -> tuple[UploadRecord, FileRecord | None]:
        """The file that it has become: the parts in this order. One that was completed before is
        told again, as a retry asks for it; None: its file is gone. Raises INVALID_ARGUMENT for
        parts that are not all of its bytes, or not those of the checksum.

        One call of an upload at a time: each writes all of its bytes once more, which count as
        nobody's until it is completed."""
        async with self._completing.setdefault((tenant, id), asyncio.Lock()):
            return await self._complete(tenant, id, part_ids, md5)

    async def _complete(
        self, tenant: str, id: str, part_ids: Sequence[str], md5: str
    ) -> tuple[UploadRecord, FileRecord | None]:
        kept = await self._read(tenant, id)
        record = kept.record
        if record.state == "completed":
            return record, await self._file_of(tenant, record)
        _check_pending(record)
        _check_parts(kept, part_ids)
        now, own = int(time.time()), record.file_expires_s
        file = FileRecord(
            id=FILE.new(),
            filename=record.filename,
            bytes=record.bytes,
            created_at=now,
            purpose=record.purpose,
            expires_at=None if own is None else now + own,
        )
        file.blob = self._blobs.key(tenant, file.id)
        upload, digest = Upload(record.purpose, record.bytes), hashlib.md5(usedforsecurity=False)
        try:
            try:
                whole = self._joined(tenant, part_ids, digest)
                await self._blobs.put(file.blob, upload.pieces(whole))
            except NoBlobError:  # it has ended meanwhile
                return await self._as_it_is(tenant, id)
            upload.check_whole()
            if md5 and digest.hexdigest() != md5.lower():
                raise invalid("The parts have another MD5.", "md5", stage="gateway")
            after = record.model_copy(update={"state": "completed", "file": file.id})
            told = (kept.stored, after.model_dump_json(), file.id)
            as_file = (file.model_dump_json(), file.blob, file.expires_at or "")
            most = self._settings.max_files
            outcome = await self._call("complete", tenant, id, *told, *as_file, most)
            if outcome == "files":
                metrics.files_refused.labels("tenant").inc()
                raise too_many("files", most)
        except PenstockError:  # after any other error it may have its record (orphans.py)
            await self._blobs.delete(file.blob)
            raise
        if outcome == "changed":
            await self._blobs.delete(file.blob)
            return await self._as_it_is(tenant, id)
        await self._drop(tenant, kept.parts)
        return after, file

    async def cancel(self, tenant: str, id: str) -> UploadRecord:
        """Also one that was cancelled before, as a retry asks for it."""
        while True:
            kept = await self._read(tenant, id)
            if kept.record.state == "cancelled":
                return kept.record
            _check_pending(kept.record)
            after = kept.record.model_copy(update={"state": "cancelled"})
            if await self._end(tenant, id, kept.stored, after.model_dump_json()):
                return after

    async def look(self) -> None:
        """Forgets those whose time has come (lookout.py)."""
        due = f"{self._root}:uploads"
        while some := await self._redis.zrangebyscore(
            due, "-inf", time.time(), start=0, num=_AT_ONCE
        ):
            for name in map(str, some):
                tenant, _, id = name.rpartition(" ")
                stored = await self._redis.hget(self._records(tenant), id)
                if stored is None:
                    await self._redis.zrem(due, name)
                else:
                    await self._end(tenant, id, str(stored), "")

    async def _end(self, tenant: str, id: str, before: str, after: str) -> bool:
        """False: it was changed meanwhile."""
        outcome, parts = await self._call("end", tenant, id, before, after)
        await self._drop(tenant, [str(part) for part in parts])
        return bool(outcome == "ok")

    async def _as_it_is(self, tenant: str, id: str) -> tuple[UploadRecord, FileRecord | None]:
        """Another call was faster."""
        record = (await self._read(tenant, id)).record
        if record.state != "completed":
            raise _ended(record)
        return record, await self._file_of(tenant, record)

    async def _read(self, tenant: str, id: str) -> Kept:
        key = f"{self._root}:{tenant}:upload:{UPLOAD.checked(id)}"
        async with self._redis.pipeline(transaction=True) as both:
            both.hget(self._records(tenant), id)
            both.hgetall(key)
            stored, parts = await both.execute()
        if stored is None:
            raise not_found("upload", id)
        sizes = {str(part): int(size) for part, size in parts.items()}
        return Kept(str(stored), UploadRecord.model_validate_json(stored), sizes)

    async def _file_of(self, tenant: str, record: UploadRecord) -> FileRecord | None:
        try:
            return await self._files.get(tenant, record.file)
        except PenstockError as error:
            if error.reason != "not_found":
                raise
            return None

    async def _joined(
        self, tenant: str, part_ids: Sequence[str], digest: Any
    ) -> AsyncIterator[bytes]:
        for part in part_ids:
            async for piece in self._blobs.read(self._blobs.key(tenant, part)):
                digest.update(piece)
                yield piece

    async def _drop(self, tenant: str, parts: Sequence[str] | Mapping[str, int]) -> None:
        """What is left of them when this breaks off is an orphan (orphans.py)."""
        for part in parts:
            await self._blobs.delete(self._blobs.key(tenant, part))

    async def _call(self, op: str, tenant: str, id: str, *args: Any) -> Any:
        return await self._script([self._root], [op, tenant, id, *args])

    def _records(self, tenant: str) -> str:
        return f"{self._root}:{tenant}:uploads"


def _check_pending(record: UploadRecord) -> None:
    if record.state != "pending" or record.expired:
        raise _ended(record)


def _ended(record: UploadRecord) -> PenstockError:
    state = record.state if record.state != "pending" else "expired"
    why = {"completed": "was completed", "cancelled": "was cancelled", "expired": "has expired"}
    message = f"The upload '{record.id}' {why[state]}."
    return invalid(message, "upload_id", reason=f"upload_{state}", stage="gateway")


def _check_parts(kept: Kept, ids: Sequence[str]) -> None:
    """Each is there once, and all the bytes are."""
    record, parts = kept.record, kept.parts
    seen = set[str]()
    for index, id in enumerate(ids):
        if id not in parts:
            raise not_found("part of this upload", id, f"part_ids[{index}]")
        if id in seen:
            message = f"The part '{id}' is there twice."
            raise invalid(message, f"part_ids[{index}]", stage="gateway")
        seen.add(id)
    if (found := sum(parts[id] for id in ids)) != record.bytes:
        message = f"These parts have {found:,} bytes; {record.bytes:,} were announced."
        raise invalid(message, "part_ids", reason="incomplete_upload", stage="gateway")


def _too_many_bytes(record: UploadRecord) -> PenstockError:
    message = f"Its parts have more than the {record.bytes:,} bytes that were announced."
    return invalid(message, "data", reason="too_many_bytes_in_upload", stage="gateway")
