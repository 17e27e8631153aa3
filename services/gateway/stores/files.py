"""Text files, in Redis, each its tenant's: uploaded, or what batches answered (batches.lua).

    {ns}:{files}:bytes                       string the bytes of all tenants' files
    {ns}:{files}:<tenant>:index              hash   file id → JSON of FileRecord
    {ns}:{files}:<tenant>:bytes              string the bytes of the tenant's
    {ns}:{files}:<tenant>:file:<id>          string the text
    {ns}:{files}:<tenant>:file:<id>:stores   set    ids of the vector stores that hold it

Redis has one memory for all tenants and all else, so there is a bound over all besides each one's,
and one function checks both. The braces keep what it needs in one slot of a Redis cluster.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import grpc
from pydantic import BaseModel

from services.common.config import GatewaySettings
from services.common.errors import PenstockError, invalid
from services.common.redis import Redis, Script
from services.gateway import metrics
from services.gateway.ids import FILE, not_found
from services.gateway.stores.storage_room import StorageRoom, storage_full

Purpose = Literal["assistants", "batch", "batch_output"]
_SUFFIXES: dict[Purpose, tuple[str, ...]] = {"assistants": (".txt", ".md"), "batch": (".jsonl",)}
PURPOSES: tuple[Purpose, ...] = tuple(_SUFFIXES)
"""Of what may be uploaded."""
_NAME_CHARS = 255

# Count, bytes and file together: uploads at the same time must not pass a limit side by side.
_CREATE = """
local all, index, sum, content = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local id, record, text, bytes = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local max_files, max_bytes, max_all = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
if redis.call('HLEN', index) >= max_files then return 'files' end
if tonumber(redis.call('GET', sum) or 0) + bytes > max_bytes then return 'bytes of files' end
if tonumber(redis.call('GET', all) or 0) + bytes > max_all then return 'all' end
redis.call('INCRBY', all, bytes)
redis.call('INCRBY', sum, bytes)
redis.call('SET', content, text)
redis.call('HSET', index, id, record)
return ''
"""
_DELETE = """
local all, index, sum, content, stores = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local record = redis.call('HGET', index, ARGV[1])
if not record then return 0 end
-- What frees comes first: a full Redis lets a script that has done so go on, and no other.
redis.call('DEL', content, stores)
redis.call('HDEL', index, ARGV[1])
redis.call('DECRBY', all, cjson.decode(record).bytes)
redis.call('DECRBY', sum, cjson.decode(record).bytes)
return 1
"""


class FileRecord(BaseModel):
    id: str
    filename: str
    bytes: int
    created_at: int
    purpose: Purpose = "assistants"

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


def too_many(what: str, limit: int) -> PenstockError:
    return PenstockError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"A tenant may have {limit} {what}; delete some first.",
        stage="gateway",
        reason="too_many_" + what.replace(" ", "_"),
    )


class Files:
    """Methods raise `RedisAway` when Redis is away, NOT_FOUND for an unknown id."""

    def __init__(
        self, redis: Redis, namespace: str, settings: GatewaySettings, max_chars: int
    ) -> None:
        """`max_chars`: of one file, which retrieval takes."""
        self.room = StorageRoom(redis, namespace, settings.max_file_bytes)
        self._max_chars = max_chars
        self._redis = redis
        self._prefix = f"{namespace}:{{files}}:"
        self._limits = {
            "files": settings.max_files,
            "bytes of files": settings.max_file_bytes_per_tenant,
            "all": self.room.max_file_bytes,
        }
        self._create = Script(redis, _CREATE)
        self._delete = Script(redis, _DELETE)

    async def create(
        self, tenant: str, filename: str, content: bytes, purpose: Purpose = "assistants"
    ) -> FileRecord:
        """Keeps a text file.

        Raises INVALID_ARGUMENT for anything that is not text or is too long, RESOURCE_EXHAUSTED
        when the tenant has its share ("too_many_files", "too_many_bytes_of_files"), or when all
        tenants together have theirs ("storage_full").
        """
        text = _text(filename, content, purpose, self._max_chars)
        self.room.check()
        record = FileRecord(
            id=FILE.new(),
            filename=filename,
            bytes=len(content),
            created_at=int(time.time()),
            purpose=purpose,
        )
        reached = await self._create(
            [
                self.room.file_bytes_key,
                self._index(tenant),
                self._sum(tenant),
                self._one(tenant, record.id),
            ],
            [record.id, record.model_dump_json(), text, record.bytes, *self._limits.values()],
        )
        if reached == "all":
            raise storage_full()
        if reached:
            metrics.files_refused.labels("tenant").inc()
            raise too_many(reached, self._limits[reached])
        return record

    async def get(self, tenant: str, id: str, param: str = "") -> FileRecord:
        stored = await self._redis.hget(self._index(tenant), FILE.checked(id, param))
        if stored is None:
            raise not_found("file", id, param)
        return FileRecord.model_validate_json(stored)

    async def some(self, tenant: str, named: Sequence[tuple[str, str]]) -> list[FileRecord]:
        """`named`: ids, and the parameters that named them. Raises NOT_FOUND for the first that
        there is not."""
        ids = [FILE.checked(id, param) for id, param in named]
        stored = await self._redis.hmget(self._index(tenant), ids) if ids else []
        for (id, param), one in zip(named, stored, strict=True):
            if one is None:
                raise not_found("file", id, param)
        return [FileRecord.model_validate_json(str(one)) for one in stored]

    async def all(self, tenant: str) -> list[FileRecord]:
        stored = await self._redis.hvals(self._index(tenant))
        return [FileRecord.model_validate_json(one) for one in stored]

    async def content(self, tenant: str, id: str) -> str:
        text = await self._redis.get(self._one(tenant, id))
        if text is None:
            raise not_found("file", id)
        return str(text)

    async def piece(self, tenant: str, id: str, at: int, size: int) -> str:
        """Some bytes of a file, which are whole characters; empty when it was deleted."""
        return str(await self._redis.getrange(self._one(tenant, id), at, at + size - 1))

    async def has_room(self, tenant: str) -> bool:
        """Whether the tenant and all together have not reached what their files may be."""
        own, all = await self._redis.mget(self._sum(tenant), self.room.file_bytes_key)
        fits = int(own or 0) < self._limits["bytes of files"]
        return fits and int(all or 0) < self._limits["all"] and not self.room.full

    async def delete(self, tenant: str, id: str) -> None:
        """To call after the vector stores gave it up (VectorStores.delete_file)."""
        own = self._one(tenant, id)
        keys = [
            self.room.file_bytes_key,
            self._index(tenant),
            self._sum(tenant),
            own,
            own + ":stores",
        ]
        await self._delete(keys, [id])

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
        return f"{self._prefix}{tenant}:bytes"

    def _one(self, tenant: str, id: str) -> str:
        return f"{self._prefix}{tenant}:file:{FILE.checked(id)}"


def _text(filename: str, content: bytes, purpose: Purpose, max_chars: int) -> str:
    if len(filename) > _NAME_CHARS:
        raise invalid(
            f"The file's name is longer than {_NAME_CHARS} characters.", "file", stage="gateway"
        )
    suffixes = _SUFFIXES[purpose]
    if not filename.lower().endswith(suffixes):
        raise invalid(
            f"Only text files are taken ({', '.join(suffixes)}).",
            "file",
            reason="unsupported_file",
            stage="gateway",
        )
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise invalid(
            f"The file is not UTF-8 text: bad byte at {error.start}.",
            "file",
            reason="invalid_file",
            stage="gateway",
        ) from None
    if not text.strip():
        raise invalid("The file is empty.", "file", reason="invalid_file", stage="gateway")
    if purpose == "assistants" and len(text) > max_chars:  # retrieval takes no more
        raise invalid(
            f"The file has {len(text):,} characters; at most {max_chars:,} are taken.",
            "file",
            reason="file_too_long",
            stage="gateway",
        )
    return text
