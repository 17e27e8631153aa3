"""What is said in conversations, in Redis (conversations.lua): records of their own, which stay for
so long after their last use."""

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import orjson
from pydantic import BaseModel

from services.common.config import RunsSettings
from services.common.errors import PenstockError, invalid
from services.common.redis import Redis, Script
from services.gateway.identity.principal import Principal
from services.gateway.ids import CONVERSATION, no_such_item, not_found
from services.gateway.intake import Holding
from services.gateway.stores.files.storage_room import StorageRoom, too_many

_SOURCE = Path(__file__).with_name("conversations.lua").read_text()

Item = Mapping[str, Any]
"""As clients have it, with an id of its own."""


class Conversation(BaseModel):
    id: str
    created_at: int
    metadata: dict[str, str] = {}
    notes_models: bool = False
    """Those that answered in it are known; of one that was made before that was noted they are
    not."""

    def as_json(self) -> dict[str, Any]:
        return {"object": "conversation", **self.model_dump(exclude={"notes_models"})}


class Conversations:
    """Methods raise `RedisAway` when Redis is away, NOT_FOUND for an unknown id, and where
    something is added RESOURCE_EXHAUSTED ("too_many_conversations", "storage_full",
    "too_many_bytes_of_conversations") or INVALID_ARGUMENT ("too_many_items"). What is read of items
    is told to `hold` before, which may raise."""

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
        id = CONVERSATION.new()
        made = Conversation(id=id, created_at=now, metadata=dict(metadata), notes_models=True)
        told = (made.model_dump_json(), *_stored(items))
        self._check(made.id, await self._call("create", tenant, made.id, *told))
        return made

    async def authorize(self, principal: Principal, id: str, param: str = "") -> None:
        """Raises PERMISSION_DENIED to who may not use each model that has answered in it, where
        that is not known any model."""
        CONVERSATION.checked(id, param)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.get(self._key("of", principal.tenant, id))
            pipe.smembers(self._key("models", principal.tenant, id))
            stored, models = await pipe.execute()
        if stored is None:
            raise not_found(CONVERSATION.what, id, param)
        for model in sorted(map(str, models)):
            principal.authorize(model)
        known = Conversation.model_validate_json(stored).notes_models
        if not known and principal.models is not None:
            raise _of_any_model()

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
        self,
        tenant: str,
        id: str,
        items: Sequence[Item],
        models: Collection[str] = (),
        turn: str = "",
    ) -> None:
        """All of them, behind what is there. `models`: whose answer is among them. `turn`: the
        request whose turn they are: it is added once, however often that is asked for."""
        self._room.check()
        told = (self._max_items, orjson.dumps([*models]).decode(), turn, *_stored(items))
        self._check(id, await self._call("add", tenant, CONVERSATION.checked(id), *told))

    async def items(
        self, tenant: str, id: str, hold: Holding, param: str = "", before: str = ""
    ) -> list[bytes]:
        """JSON of all, first to last; or of those before the turn of the request `before`, where
        that was added."""
        await self.find(tenant, id, param)
        place = await self._redis.hget(self._key("turns", tenant, id), before) if before else None
        last = "+inf" if place is None else f"({int(place)}"
        order = await self._redis.zrangebyscore(self._key("order", tenant, id), "-inf", last)
        return [*(await self._told(tenant, id, hold, order)).values()]

    async def page(
        self,
        tenant: str,
        id: str,
        hold: Holding,
        after: str | None,
        most: int,
        *,
        newest_first: bool,
    ) -> dict[str, bytes]:
        """JSON of `most` items behind the item `after`, by their ids, in their order. Raises
        INVALID_ARGUMENT where that is none of it."""
        await self.find(tenant, id)
        order, place = self._key("order", tenant, id), None
        if after is not None and (place := await self._redis.zscore(order, after)) is None:
            raise no_such_item(after, "after")
        if newest_first:
            first = "+inf" if place is None else f"({place:.0f}"
            found = await self._redis.zrevrangebyscore(order, first, "-inf", start=0, num=most)
        else:
            first = "-inf" if place is None else f"({place:.0f}"
            found = await self._redis.zrangebyscore(order, first, "+inf", start=0, num=most)
        return await self._told(tenant, id, hold, found)

    async def _told(
        self, tenant: str, id: str, hold: Holding, order: Sequence[Any]
    ) -> dict[str, bytes]:
        if not order:
            return {}
        key, names = self._key("items", tenant, id), list(map(str, order))
        async with self._redis.pipeline(transaction=False) as sizes:
            for name in names:
                sizes.hstrlen(key, name)
            hold(sum(await sizes.execute()))
        stored = await self._redis.hmget(key, names)
        return {
            name: str(one).encode()
            for name, one in zip(names, stored, strict=True)
            if one is not None
        }

    async def item(self, tenant: str, id: str, hold: Holding, item: str) -> bytes:
        """Its JSON."""
        await self.find(tenant, id)
        for stored in (await self._told(tenant, id, hold, [item])).values():
            return stored
        raise not_found("item in this conversation", item)

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


def _of_any_model() -> PenstockError:
    return PenstockError(
        grpc.StatusCode.PERMISSION_DENIED,
        "This conversation is older than the note of which models have answered in it: it is for "
        "keys that may use any model.",
        stage="gateway",
        reason="model_not_allowed",
    )


def _full(most: int) -> PenstockError:
    message = f"A conversation has at most {most} items; delete some first."
    return invalid(message, "items", reason="too_many_items", stage="gateway")
