"""What conversations take of a tenant's room, and their end."""

import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest

from services.common.config import GatewaySettings, RunsSettings
from services.common.errors import PenstockError
from services.common.redis import Redis, connect
from services.gateway.runs.conversations.conversations import Conversations
from services.gateway.stores.storage_room import StorageRoom


class Bed(NamedTuple):
    redis: Redis
    root: str
    conversations: Conversations
    room: StorageRoom

    async def refused(self, call: Any) -> str:
        with pytest.raises(PenstockError) as refused:
            await call
        return refused.value.reason

    async def bytes(self, tenant: str = "t") -> int:
        return int(await self.redis.get(f"{self.root}:bytes:{tenant}") or 0)

    async def texts(self, id: str) -> list[str]:
        return [json.loads(one)["text"] for one in await self.conversations.items("t", id)]


@pytest.fixture
async def bed(redis_url: str, namespace: str) -> AsyncIterator[Bed]:
    redis = connect(redis_url)
    settings = RunsSettings(conversations=3, max_conversation_bytes_per_tenant=1000)
    room = StorageRoom(redis, namespace, GatewaySettings())
    own = Conversations(redis, namespace, settings, 4, room)
    yield Bed(redis, f"{namespace}:{{conversations}}", own, room)
    await redis.aclose()


def item(id: str, text: str = "x") -> dict[str, str]:
    return {"id": id, "text": text}


async def test_items_keep_their_order_whatever_is_taken_out(bed: Bed) -> None:
    made = await bed.conversations.create("t", {}, [item("b"), item("a", "y")])
    await bed.conversations.drop("t", made.id, "a")
    await bed.conversations.add("t", made.id, [item("c", "z"), item("a", "w")])
    assert await bed.texts(made.id) == ["x", "z", "w"]
    await bed.conversations.drop("t", made.id, "c")
    order = await bed.redis.zrange(f"{bed.root}:order:t:{made.id}", 0, -1)
    assert order == ["b", "a"], "of what was taken out nothing is left"


async def test_its_bytes_are_counted_and_given_back(bed: Bed) -> None:
    made = await bed.conversations.create("t", {"k": "v"}, [item("a")])
    first = await bed.bytes()
    await bed.conversations.add("t", made.id, [item("b", "x" * 100)])
    assert await bed.bytes() > first + 100
    await bed.conversations.drop("t", made.id, "b")
    assert await bed.bytes() == first
    await bed.conversations.describe("t", made.id, {"k": "v" * 51})
    assert await bed.bytes() == first + 50
    await bed.conversations.delete("t", made.id)
    assert await bed.bytes() == 0
    assert not [key async for key in bed.redis.scan_iter(f"{bed.root}:*t:{made.id}")]


async def test_so_much_and_no_more(bed: Bed) -> None:
    made = await bed.conversations.create("t", {}, [item("a"), item("b")])
    full = bed.conversations.add("t", made.id, [item("c"), item("d"), item("e")])
    assert await bed.refused(full) == "too_many_items"
    large = bed.conversations.add("t", made.id, [item("c", "x" * 900)])
    assert await bed.refused(large) == "too_many_bytes_of_conversations"
    assert await bed.texts(made.id) == ["x", "x"]
    long = bed.conversations.describe("t", made.id, {"k": "v" * 900})
    assert await bed.refused(long) == "too_many_bytes_of_conversations"
    for _ in range(2):
        await bed.conversations.create("t", {}, [])
    assert await bed.refused(bed.conversations.create("t", {}, [])) == "too_many_conversations"
    await bed.conversations.create("u", {}, [item("c", "x" * 800)])
    bed.room.full = True
    assert await bed.refused(bed.conversations.add("t", made.id, [item("c")])) == "storage_full"


async def test_one_whose_time_is_over_is_in_nobodys_account(bed: Bed) -> None:
    old = await bed.conversations.create("t", {}, [item("a", "x" * 700)])
    kept = round(RunsSettings().conversations_kept_s)
    for part in ("of", "items", "order"):
        key = f"{bed.root}:{part}:t:{old.id}"
        assert 0 < await bed.redis.ttl(key) <= kept
        await bed.redis.delete(key)  # as it does then
    await bed.redis.zincrby(f"{bed.root}:all:t", -kept - 1, old.id)
    assert await bed.refused(bed.conversations.find("t", old.id)) == "not_found"
    await bed.conversations.create("t", {}, [item("a", "x" * 700)])
    assert await bed.redis.zcard(f"{bed.root}:all:t") == 1


async def test_as_many_items_come_at_once_as_there_may_be(bed: Bed, namespace: str) -> None:
    """More than a script of Redis can give a function as its arguments."""
    most = 10_000
    settings = RunsSettings()
    own = Conversations(bed.redis, namespace, settings, most, bed.room)
    made = await own.create("t", {}, [])
    items = [item(str(n)) for n in range(most)]
    await own.add("t", made.id, items)
    assert len(await own.items("t", made.id)) == most
    assert await bed.refused(own.add("t", made.id, [item("more")])) == "too_many_items"
