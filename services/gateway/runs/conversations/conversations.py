"""What is said in conversations, in Redis (conversations.lua): records of their own, which stay for
so long after their last use."""

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel

from services.common.config import RunsSettings
from services.common.errors import PenstockError, invalid
from services.common.redis import Redis, Script
from services.gateway.identity.principal import Principal
from services.gateway.ids import CONVERSATION, not_found
from services.gateway.stores.storage_room import StorageRoom, too_many

_SOURCE = Path(__file__).with_name("conversations.lua").read_text()

Item = Mapping[str, Any]
"""As clients have it, with an id of its own."""


class Conversation(BaseModel):
    id: str
    created_at: int
    metadata: dict[str, str] = {}

    def as_json(self) -> dict[str, Any]:
        return {"object": "conversation", **self.model_dump()}


class Conversations:
    """Methods raise `RedisAway` when Redis is away, NOT_FOUND for an unknown id, and where
    something is added RESOURCE_EXHAUSTED ("too_many_conversations", "storage_full",
    "too_many_bytes_of_conversations") or INVALID_ARGUMENT ("too_many_items")."""

    def __init__(
        self,
        redis: Redis,
        namespace: str,
        settings: RunsSettings,
        max_items: int,
        room: StorageRoom,
    ) -> None:
        """`max_items`: in one."""
        self._redis = redis
        self._script = Script(redis, _SOURCE)
        self._root = f"{namespace}:{{conversations}}"
        self._most = settings.conversations
        self._max_bytes = settings.max_conversation_bytes_per_tenant
        self._bounds = (round(settings.conversations_kept_s), self._most, self._max_bytes)
        self._max_items = max_items
        self._room = room

    async def create(
        self, tenant: str, metadata: Mapping[str, str], items: Sequence[Item]
    ) -> Conversation:
        self._room.check()
        now = int(time.time())
        made = Conversation(id=CONVERSATION.new(), created_at=now, metadata=dict(metadata))
        told = (made.model_dump_json(), *_stored(items))
        self._check(made.id, await self._call("create", tenant, made.id, *told))
        return made

    async def authorize(self, principal: Principal, id: str, param: str = "") -> None:
        """Raises PERMISSION_DENIED to who may not use each model that has answered in it."""
        key = self._key("models", principal.tenant, CONVERSATION.checked(id, param))
        for model in sorted(map(str, await self._redis.smembers(key))):
            principal.authorize(model)

    async def find(self, tenant: str, id: str, param: str = "") -> Conversation:
        stored = await self._redis.get(self._key("of", tenant, CONVERSATION.checked(id, param)))
        if stored is None:
            raise not_found(CONVERSATION.what, id, param)
        return Conversation.model_validate_json(stored)

    async def describe(self, tenant: str, id: str, metadata: Mapping[str, str]) -> Conversation:
        """With this metadata in the place of what it had."""
        key, outcome = self._key("of", tenant, CONVERSATION.checked(id)), "changed"
        while outcome == "changed":
            if (before := await self._redis.get(key)) is None:
                raise not_found(CONVERSATION.what, id)
            after = Conversation.model_validate_json(before)
            after.metadata = dict(metadata)
            told = (before, after.model_dump_json())
            outcome = await self._call("change", tenant, id, *told)
        self._check(id, outcome)
        return after

    async def delete(self, tenant: str, id: str) -> None:
        if not await self._call("delete", tenant, CONVERSATION.checked(id)):
            raise not_found(CONVERSATION.what, id)

    async def add(
        self, tenant: str, id: str, items: Sequence[Item], models: Collection[str] = ()
    ) -> None:
        """All of them, behind what is there. `models`: whose answer is among them."""
        self._room.check()
        told = (self._max_items, orjson.dumps([*models]).decode(), *_stored(items))
        self._check(id, await self._call("add", tenant, CONVERSATION.checked(id), *told))

    async def items(self, tenant: str, id: str, param: str = "") -> list[bytes]:
        """JSON of all, first to last."""
        await self.find(tenant, id, param)
        order = await self._redis.zrange(self._key("order", tenant, id), 0, -1)
        if not order:
            return []
        stored = await self._redis.hmget(self._key("items", tenant, id), list(map(str, order)))
        return [str(one).encode() for one in stored if one is not None]

    async def item(self, tenant: str, id: str, item: str) -> Any:
        await self.find(tenant, id)
        stored = await self._redis.hget(self._key("items", tenant, id), item)
        if stored is None:
            raise not_found("item in this conversation", item)
        return orjson.loads(str(stored))

    async def drop(self, tenant: str, id: str, item: str) -> Conversation:
        found = await self.find(tenant, id)
        if not await self._call("drop", tenant, id, item):
            raise not_found("item in this conversation", item)
        return found

    def _check(self, id: str, outcome: str) -> None:
        if outcome == "gone":
            raise not_found(CONVERSATION.what, id)
        if outcome == "many":
            raise too_many("conversations", self._most)
        if outcome == "bytes":
            raise too_many("bytes of conversations", self._max_bytes)
        if outcome == "items":
            raise _full(self._max_items)

    async def _call(self, op: str, tenant: str, id: str, *args: Any) -> Any:
        return await self._script([self._root], [op, *self._bounds, tenant, id, *args])

    def _key(self, part: str, tenant: str, id: str) -> str:
        return f"{self._root}:{part}:{tenant}:{id}"


def _stored(items: Sequence[Item]) -> list[str]:
    return [part for item in items for part in (item["id"], orjson.dumps(item).decode())]


def _full(most: int) -> PenstockError:
    message = f"A conversation has at most {most} items; delete some first."
    return invalid(message, "items", reason="too_many_items", stage="gateway")
