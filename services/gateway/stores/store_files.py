"""Which files a vector store holds, and how far each of them is. In Redis:

{ns}:{tenant}:store:<id>          hash   file id → JSON of AttachedFile
{ns}:{tenant}:store:<id>:unready  set    ids of files that searches do not find, yet or ever
"""

import secrets
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import grpc
from pydantic import BaseModel, Field

from services.common.errors import PenstockError
from services.common.redis import Redis, Script
from services.gateway.ids import FILE, STORE, not_found

_NAMED = 5  # files in one warning
_SHOWN_CHARS = 60  # of a file's name in it
_ERROR_CHARS = 160

# The outcome of one attachment is noted unless the file was taken out meanwhile, or attached anew.
_SETTLE = """
local files, unready = KEYS[1], KEYS[2]
local id, record, attachment, ready = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local stored = redis.call('HGET', files, id)
if not stored then return 'gone' end
if cjson.decode(stored).attachment ~= attachment then return 'replaced' end
redis.call('HSET', files, id, record)
if ready == '1' then redis.call('SREM', unready, id) end
return 'kept'
"""
# Of all stores (a hash and a set each): so many records at most, and how many there are.
_UNREADY = """
local found, total = {}, 0
for n = 1, #KEYS, 2 do
  local ids = redis.call('SMEMBERS', KEYS[n + 1])
  table.sort(ids)
  total = total + #ids
  for _, id in ipairs(ids) do
    if #found >= tonumber(ARGV[1]) then break end
    local record = redis.call('HGET', KEYS[n], id)
    if record then table.insert(found, record) end
  end
end
return {total, found}
"""

ErrorCode = Literal["server_error", "unsupported_file", "invalid_file"]  # as OpenAI has them


class AttachedFile(BaseModel):
    """A file in a store."""

    id: str
    store: str
    filename: str
    created_at: int
    bytes: int
    attachment: str = Field(default_factory=lambda: secrets.token_hex(8))
    state: Literal["in_progress", "completed", "failed"] = "in_progress"
    error: str = ""
    error_code: ErrorCode = "server_error"

    def fail(self, error: PenstockError | str) -> None:
        """INVALID_ARGUMENT is the file's own fault, anything else the service's."""
        self.state = "failed"
        if isinstance(error, PenstockError):
            self.error = error.message
            if error.code == grpc.StatusCode.INVALID_ARGUMENT:
                self.error_code = "invalid_file"
        else:
            self.error = error

    def as_json(self) -> dict[str, Any]:
        status = self.state
        return {
            "id": self.id,
            "object": "vector_store.file",
            "created_at": self.created_at,
            "vector_store_id": self.store,
            "status": status,
            "usage_bytes": self.bytes if status == "completed" else 0,
            "last_error": {"code": self.error_code, "message": self.error}
            if status == "failed"
            else None,
            "attributes": {},
        }

    def why_unready(self) -> str:
        name = self.filename
        name = name if len(name) <= _SHOWN_CHARS else name[: _SHOWN_CHARS - 1] + "…"
        if self.state == "failed":
            return f"{name} ({self.id}) failed: {self.error[:_ERROR_CHARS]}"
        return f"{name} ({self.id}) is still being indexed"


class Unready(NamedTuple):
    """Files that a search of some stores cannot find: some of them, and how many in all."""

    files: Sequence[AttachedFile] = ()
    total: int = 0

    def warning(self) -> str:
        """For the answer; empty when there is none."""
        told = [file.why_unready() for file in self.files if file.state != "completed"]
        more = self.total - len(told)
        if more > 0:
            told.append(f"and {more} more")
        return f"not searched: {'; '.join(told)}" if told else ""


def tenant_key(namespace: str, tenant: str, *parts: str) -> str:
    """The braces keep a tenant's stores in one slot of a Redis cluster."""
    return ":".join((namespace, "{" + tenant + "}", *parts))


class StoreFiles:
    """Methods raise `RedisAway` when Redis is away, NOT_FOUND for an unknown id."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self._redis = redis
        self._namespace = namespace
        self._settle = Script(redis, _SETTLE)
        self._unready = Script(redis, _UNREADY)

    async def put(self, tenant: str, file: AttachedFile) -> None:
        """Begins an attachment, in the place of an earlier one of the same file."""
        files, unready = self._keys(tenant, file.store)
        async with self._redis.pipeline(transaction=True) as both:
            both.hset(files, file.id, file.model_dump_json())
            both.sadd(unready, file.id)
            await both.execute()

    async def settle(self, tenant: str, file: AttachedFile) -> str:
        """Notes how the attachment ended. "kept"; "gone" when the file is no longer in the store;
        "replaced" when it was attached anew meanwhile.
        """
        ready = "1" if file.state == "completed" else "0"
        told = [file.id, file.model_dump_json(), file.attachment, ready]
        return str(await self._settle(self._keys(tenant, file.store), told))

    async def all(self, tenant: str, store: str) -> list[AttachedFile]:
        stored = await self._redis.hvals(self._keys(tenant, store)[0])
        return [AttachedFile.model_validate_json(one) for one in stored]

    async def get(self, tenant: str, store: str, file_id: str) -> AttachedFile:
        key = self._keys(tenant, store)[0]
        stored = await self._redis.hget(key, file_id) if FILE.fits(file_id) else None
        if stored is None:
            raise not_found("file in this vector store", file_id)
        return AttachedFile.model_validate_json(stored)

    async def unready(self, tenant: str, stores: Sequence[str]) -> Unready:
        keys = [key for store in stores for key in self._keys(tenant, store)]
        total, found = await self._unready(keys, [_NAMED])
        return Unready([AttachedFile.model_validate_json(one) for one in found], int(total))

    async def drop(self, tenant: str, store: str, file_id: str) -> None:
        files, unready = self._keys(tenant, store)
        async with self._redis.pipeline(transaction=True) as both:
            both.hdel(files, file_id)
            both.srem(unready, file_id)
            await both.execute()

    async def drop_all(self, tenant: str, store: str) -> None:
        await self._redis.delete(*self._keys(tenant, store))

    def _keys(self, tenant: str, store: str) -> tuple[str, str]:
        key = tenant_key(self._namespace, tenant, "store", STORE.checked(store))
        return key, key + ":unready"
