"""Uploaded text files, in Redis, each under its tenant.

    {ns}:{tenant}:files             hash   file id → JSON of FileRecord
    {ns}:{tenant}:file:<id>         string the text
    {ns}:{tenant}:file:<id>:stores  set    ids of the vector stores that hold it

The braces around the tenant keep its keys in one slot of a Redis cluster.
"""

import time
from typing import Any

import grpc
from pydantic import BaseModel

from services.common.errors import PenstockError, invalid
from services.common.redis import Redis
from services.gateway.prompt import new_id

SUFFIXES = (".txt", ".md")
PURPOSE = "assistants"
_NAME_CHARS = 255


class FileRecord(BaseModel):
    id: str
    filename: str
    bytes: int
    created_at: int

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": PURPOSE,
            "status": "processed",
        }


def not_found(what: str, id: str, param: str = "") -> PenstockError:
    """Also for what belongs to another tenant: its existence is not told."""
    return PenstockError(
        grpc.StatusCode.NOT_FOUND,
        f"No such {what}: '{id[:100]}'.",
        stage="gateway",
        param=param,
        reason="not_found",
    )


def too_many(what: str, limit: int) -> PenstockError:
    return PenstockError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"A tenant may have {limit} {what}; delete some first.",
        stage="gateway",
        reason="too_many_" + what.replace(" ", "_"),
    )


def tenant_key(namespace: str, tenant: str, *parts: str) -> str:
    return ":".join((namespace, "{" + tenant + "}", *parts))


class Files:
    """Methods raise `RedisAway` when Redis is away, NOT_FOUND for an unknown id."""

    def __init__(self, redis: Redis, namespace: str, max_files: int) -> None:
        self._redis = redis
        self._namespace = namespace
        self._max_files = max_files

    async def create(self, tenant: str, filename: str, content: bytes) -> FileRecord:
        """Keeps a text file. Raises INVALID_ARGUMENT for anything that is not text."""
        text = _text(filename, content)
        if await self._redis.hlen(self._index(tenant)) >= self._max_files:
            raise too_many("files", self._max_files)
        record = FileRecord(
            id=new_id("file-"),
            filename=filename,
            bytes=len(content),
            created_at=int(time.time()),
        )
        async with self._redis.pipeline(transaction=True) as both:
            both.set(self._one(tenant, record.id), text)
            both.hset(self._index(tenant), record.id, record.model_dump_json())
            await both.execute()
        return record

    async def get(self, tenant: str, id: str, param: str = "") -> FileRecord:
        stored = await self._redis.hget(self._index(tenant), id)
        if stored is None:
            raise not_found("file", id, param)
        return FileRecord.model_validate_json(stored)

    async def all(self, tenant: str) -> list[FileRecord]:
        stored = await self._redis.hvals(self._index(tenant))
        return [FileRecord.model_validate_json(one) for one in stored]

    async def content(self, tenant: str, id: str) -> str:
        text = await self._redis.get(self._one(tenant, id))
        if text is None:
            raise not_found("file", id)
        return str(text)

    async def delete(self, tenant: str, id: str) -> None:
        """To call after the vector stores gave it up (VectorStores.forget_file)."""
        async with self._redis.pipeline(transaction=True) as both:
            both.hdel(self._index(tenant), id)
            both.delete(self._one(tenant, id), self._one(tenant, id) + ":stores")
            await both.execute()

    async def stores_of(self, tenant: str, id: str) -> set[str]:
        return {str(id) for id in await self._redis.smembers(self._one(tenant, id) + ":stores")}

    async def note_store(self, tenant: str, id: str, store: str, *, held: bool) -> None:
        key = self._one(tenant, id) + ":stores"
        await (self._redis.sadd(key, store) if held else self._redis.srem(key, store))

    def _index(self, tenant: str) -> str:
        return tenant_key(self._namespace, tenant, "files")

    def _one(self, tenant: str, id: str) -> str:
        return tenant_key(self._namespace, tenant, "file", id)


def _text(filename: str, content: bytes) -> str:
    if len(filename) > _NAME_CHARS:
        raise invalid(
            f"The file's name is longer than {_NAME_CHARS} characters.", "file", stage="gateway"
        )
    if not filename.lower().endswith(SUFFIXES):
        raise invalid(
            f"Only text files are taken ({', '.join(SUFFIXES)}).",
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
    return text
