"""Tenants' files: what they uploaded, in the blob store, and what batches answered, in Redis.

    {ns}:{files}:blobs                       string the bytes of all tenants' blobs
    {ns}:{files}:kept                        set    keys of all blobs that a record is of
    {ns}:{files}:bytes                       string the bytes of all tenants' files in Redis
    {ns}:{files}:expiring                    zset   "<tenant> <file id>" by when the file expires
    {ns}:{files}:<tenant>:index              hash   file id → JSON of FileRecord
    {ns}:{files}:<tenant>:blobs              string the bytes of the tenant's blobs
    {ns}:{files}:<tenant>:bytes              string the bytes of the tenant's files in Redis
    {ns}:{files}:<tenant>:file:<id>          string the text of one that Redis holds
    {ns}:{files}:<tenant>:file:<id>:stores   set    ids of the vector stores that hold it

Redis holds what grows line by line, in one step with the mark that a line is answered
(batches.lua), and what was uploaded before there was a blob store. It has one memory for all
tenants and all else: so each kind has a bound over all besides each tenant's, which one function
checks. The braces keep what it needs in one slot of a Redis cluster.
"""

import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence

import grpc

from services.common.blobs import Blobs, NoBlobError
from services.common.config import GatewaySettings
from services.common.errors import PenstockError
from services.common.redis import Redis, Script
from services.gateway import metrics
from services.gateway.ids import FILE, not_found
from services.gateway.stores.files.file_record import FileRecord, Purpose
from services.gateway.stores.files.storage_room import StorageRoom, storage_full, too_many
from services.gateway.stores.files.upload import Upload, check_name, max_bytes

# Count, bytes and file together: uploads at the same time must not pass a limit side by side.
_CREATE = """
local all, index, sum, kept = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local id, record, blob, bytes = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local expires, name = ARGV[5], ARGV[6]
local max_files, max_bytes, max_all = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
if redis.call('HLEN', index) >= max_files then return 'files' end
if tonumber(redis.call('GET', sum) or 0) + bytes > max_bytes then return 'bytes of files' end
if tonumber(redis.call('GET', all) or 0) + bytes > max_all then return 'all' end
if blob == '' then return '' end
redis.call('INCRBY', all, bytes)
redis.call('INCRBY', sum, bytes)
redis.call('SADD', kept, blob)
redis.call('HSET', index, id, record)
if expires ~= '' then redis.call('ZADD', KEYS[5], expires, name) end
return ''
"""
_DELETE = """
local index, content, stores, kept = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
redis.call('ZREM', KEYS[9], ARGV[2])
local stored = redis.call('HGET', index, ARGV[1])
if not stored then return 0 end
local record = cjson.decode(stored)
local blob = record.blob or ''
local all, sum = KEYS[5], KEYS[6]
if blob ~= '' then all, sum = KEYS[7], KEYS[8] end
-- What frees comes first: a full Redis lets a script that has done so go on, and no other.
redis.call('DEL', content, stores)
redis.call('HDEL', index, ARGV[1])
redis.call('DECRBY', all, record.bytes)
redis.call('DECRBY', sum, record.bytes)
if blob ~= '' then redis.call('SREM', kept, blob) end
return 1
"""


class Files:
    """Methods raise `RedisAway` when Redis is away, NOT_FOUND for an unknown id."""

    def __init__(
        self, redis: Redis, namespace: str, settings: GatewaySettings, blobs: Blobs
    ) -> None:
        self.room = StorageRoom(redis, namespace, settings)
        self._blobs = blobs
        self._redis = redis
        self._prefix = f"{namespace}:{{files}}:"
        self._settings = settings
        self._limits = {
            "files": settings.max_files,
            "bytes of files": settings.max_blob_bytes_per_tenant,
            "all": settings.max_blob_bytes,
        }
        self._in_redis = settings.max_file_bytes_per_tenant, settings.max_file_bytes
        self._create = Script(redis, _CREATE)
        self._delete = Script(redis, _DELETE)

    async def create(
        self,
        tenant: str,
        filename: str,
        content: AsyncIterable[bytes],
        purpose: Purpose = "assistants",
        expires_after_s: int | None = None,
    ) -> FileRecord:
        """Keeps a file, as it comes: none of it is seen before all of it is here.

        Raises INVALID_ARGUMENT for what is empty, too large, or no text where that is needed,
        RESOURCE_EXHAUSTED when the tenant has its share ("too_many_files",
        "too_many_bytes_of_files"), or when all tenants together have theirs ("storage_full"), and
        what `content` raises.
        """
        check_name(filename, purpose)
        self.room.check()
        await self._take(tenant, None)
        now = int(time.time())
        record = FileRecord(
            id=FILE.new(),
            filename=filename,
            bytes=0,
            created_at=now,
            purpose=purpose,
            expires_at=now + expires_after_s if expires_after_s is not None else None,
        )
        record.blob = self._blobs.key(tenant, record.id)
        upload = Upload(purpose, max_bytes(purpose, self._settings))
        try:
            await self._blobs.put(record.blob, upload.pieces(content))
            upload.check_whole()
            record.bytes = upload.bytes
            await self._take(tenant, record)
        except PenstockError:  # after any other error it may have its record (orphans.py)
            await self._blobs.delete(record.blob)
            raise
        return record

    async def _take(self, tenant: str, record: FileRecord | None) -> None:
        """Room for it, and its place in the list; of None, whether there is any room."""
        told: tuple[str | int, ...] = ("", "", "", 1, "", "")
        if record is not None:
            text, end = record.model_dump_json(), record.expires_at or ""
            told = (record.id, text, record.blob, record.bytes, end, _named(tenant, record.id))
        keys = [self._all, self._index(tenant), self._sum(tenant), self._kept, self._expiring]
        reached = await self._create(keys, [*told, *self._limits.values()])
        if reached == "all":
            raise storage_full()
        if reached:
            metrics.files_refused.labels("tenant").inc()
            raise too_many(reached, self._limits[reached])

    async def get(self, tenant: str, id: str, param: str = "") -> FileRecord:
        """One that has expired is gone, for all but the batch that was reading it."""
        record = await self.kept(tenant, id, param)
        if record.expired:
            raise not_found("file", id, param)
        return record

    async def kept(self, tenant: str, id: str, param: str = "") -> FileRecord:
        """It may have expired."""
        stored = await self._redis.hget(self._index(tenant), FILE.checked(id, param))
        if stored is None:
            raise not_found("file", id, param)
        return FileRecord.model_validate_json(stored)

    async def some(self, tenant: str, named: Sequence[tuple[str, str]]) -> list[FileRecord]:
        """`named`: ids, and the parameters that named them. Raises NOT_FOUND for the first that
        there is not."""
        ids = [FILE.checked(id, param) for id, param in named]
        stored = await self._redis.hmget(self._index(tenant), ids) if ids else []
        records = list[FileRecord]()
        for (id, param), one in zip(named, stored, strict=True):
            record = FileRecord.model_validate_json(str(one)) if one is not None else None
            if record is None or record.expired:
                raise not_found("file", id, param)
            records.append(record)
        return records

    async def all(self, tenant: str) -> list[FileRecord]:
        stored = await self._redis.hvals(self._index(tenant))
        records = [FileRecord.model_validate_json(one) for one in stored]
        return [record for record in records if not record.expired]

    async def expired(self, most: int) -> list[tuple[str, str]]:
        """Tenants and ids of files whose time has come, the earliest first."""
        now = time.time()
        named = await self._redis.zrangebyscore(self._expiring, "-inf", now, start=0, num=most)
        return [_of_name(str(name)) for name in named]

    async def put_off(self, tenant: str, id: str, delay_s: float) -> None:
        """One that has expired is told by `expired` again after that."""
        name = _named(tenant, id)
        await self._redis.zadd(self._expiring, {name: time.time() + delay_s}, xx=True)

    async def pieces(self, tenant: str, id: str) -> AsyncIterator[bytes]:
        """Of what it holds, as of `kept`."""
        record = await self.kept(tenant, id)
        if record.blob:
            try:
                async for piece in self._blobs.read(record.blob):
                    yield piece
            except NoBlobError:
                raise not_found("file", id) from None
            return
        text = await self._redis.get(self._one(tenant, id))
        if text is None:
            raise not_found("file", id)
        yield str(text).encode()

    async def content(self, tenant: str, id: str) -> bytes:
        return b"".join([piece async for piece in self.pieces(tenant, id)])

    async def piece(self, tenant: str, id: str, at: int, size: int) -> bytes:
        """Some bytes of a file, as of `kept`; empty when it was deleted."""
        try:
            record = await self.kept(tenant, id)
            if record.blob:
                return await self._blobs.piece(record.blob, at, size)
        except NoBlobError:
            return b""
        except PenstockError as error:
            if error.code is not grpc.StatusCode.NOT_FOUND:
                raise
            return b""
        return str(await self._redis.getrange(self._one(tenant, id), at, at + size - 1)).encode()

    async def in_blob(self, tenant: str, id: str) -> str:
        """The key of its blob, to which one that Redis holds is copied first."""
        record = await self.get(tenant, id)
        if record.blob:
            return record.blob
        key = self._blobs.key(tenant, id)
        await self._blobs.put(key, self.pieces(tenant, id))
        return key

    async def require_place(self, tenant: str) -> None:
        """For what a batch will answer, which has its place in the list when the batch ends. Raises
        RESOURCE_EXHAUSTED ("too_many_files", "storage_full")."""
        self.room.check()
        most = self._limits["files"]
        if await self._redis.hlen(self._index(tenant)) >= most:
            metrics.files_refused.labels("tenant").inc()
            raise too_many("files", most)

    async def has_room(self, tenant: str) -> bool:
        """Whether the tenant and all together have not reached what Redis may hold of theirs."""
        of_tenant, of_all = self._in_redis
        keys = f"{self._prefix}{tenant}:bytes", self.room.file_bytes_key
        own, all = await self._redis.mget(*keys)
        return int(own or 0) < of_tenant and int(all or 0) < of_all and not self.room.full

    async def delete(self, tenant: str, id: str) -> bool:
        """To call after the vector stores gave it up (VectorStores.delete_file). False: it was gone
        already."""
        own = self._one(tenant, id)
        keys = [
            self._index(tenant),
            own,
            own + ":stores",
            self._kept,
            self.room.file_bytes_key,
            f"{self._prefix}{tenant}:bytes",
            self._all,
            self._sum(tenant),
            self._expiring,
        ]
        was_there = bool(await self._delete(keys, [id, _named(tenant, id)]))
        await self._blobs.delete(self._blobs.key(tenant, id))
        return was_there

    async def stores_of(self, tenant: str, id: str) -> set[str]:
        return {str(id) for id in await self._redis.smembers(self._one(tenant, id) + ":stores")}

    async def note_store(self, tenant: str, ids: Iterable[str], store: str, *, held: bool) -> None:
        keys = [self._one(tenant, id) + ":stores" for id in ids]
        async with self._redis.pipeline(transaction=False) as all:
            for key in keys:
                (all.sadd if held else all.srem)(key, store)
            await all.execute()

    def _index(self, tenant: str) -> str:
        return f"{self._prefix}{tenant}:index"

    def _sum(self, tenant: str) -> str:
        return f"{self._prefix}{tenant}:blobs"

    @property
    def _all(self) -> str:
        return f"{self._prefix}blobs"

    @property
    def _expiring(self) -> str:
        return f"{self._prefix}expiring"

    @property
    def _kept(self) -> str:
        return kept_key(self._prefix)

    def _one(self, tenant: str, id: str) -> str:
        return f"{self._prefix}{tenant}:file:{FILE.checked(id)}"


def _named(tenant: str, id: str) -> str:
    return f"{tenant} {id}"


def _of_name(name: str) -> tuple[str, str]:
    tenant, _, id = name.rpartition(" ")
    return tenant, id


def kept_key(prefix: str) -> str:
    return prefix + "kept"
