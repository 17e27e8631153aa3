"""What conversations take of a tenant's room, and their end."""

import json
import tracemalloc
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import orjson
import pytest

from services.common.config import GatewaySettings, RunsSettings
from services.common.errors import PenstockError
from services.common.fairness.shares import Shares
from services.common.redis import Redis, connect
from services.gateway.api.resources.conversations import list_items, parsed_item
from services.gateway.api.resources.pages import PageQuery, page_json
from services.gateway.api.rest.stored_responses import said_before
from services.gateway.api.schema import parsed_bytes
from services.gateway.intake import Place
from services.gateway.runs.conversations.conversations import Conversations
from services.gateway.stores.files.storage_room import StorageRoom
from tests.support.gateway_parts import principal


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
        return [
            json.loads(one)["text"] for one in await self.conversations.items("t", id, any_size)
        ]


def any_size(size: int) -> None:
    """There is room for it."""


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
    assert len(await own.items("t", made.id, any_size)) == most
    assert await bed.refused(own.add("t", made.id, [item("more")])) == "too_many_items"


async def test_a_turn_is_added_once(bed: Bed) -> None:
    made = await bed.conversations.create("t", {}, [item("a")])
    empty = await bed.bytes()
    for _ in range(2):
        await bed.conversations.add("t", made.id, [item("b", "y")], ["m"], turn="req_1")
    assert await bed.texts(made.id) == ["x", "y"]
    await bed.conversations.drop("t", made.id, "b")
    await bed.conversations.add("t", made.id, [item("b", "y")], ["m"], turn="req_1")
    assert await bed.texts(made.id) == ["x"], "what was taken out does not come back"
    assert await bed.bytes() == empty + len("req_1")
    await bed.conversations.delete("t", made.id)
    assert await bed.bytes() == 0
    assert not [key async for key in bed.redis.scan_iter(f"{bed.root}:*t:{made.id}")]


async def test_what_was_there_before_a_turn(bed: Bed) -> None:
    made = await bed.conversations.create("t", {}, [item("a"), item("gone")])
    await bed.conversations.drop("t", made.id, "gone")
    await bed.conversations.add("t", made.id, [item("b"), item("c")], turn="req_1")

    async def before(turn: str) -> list[str]:
        stored = await bed.conversations.items("t", made.id, any_size, before=turn)
        return [json.loads(one)["id"] for one in stored]

    assert await before("req_1") == ["a"]
    assert await before("req_2") == ["a", "b", "c"], "its turn was not added yet"
    assert await before("") == ["a", "b", "c"]


async def test_a_page_is_read_and_no_more(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await bed.conversations.create("t", {}, [item(id) for id in ("d", "b", "c", "a")])
    await bed.conversations.drop("t", made.id, "b")
    read: list[str] = []
    hmget = bed.redis.hmget

    async def reading(key: str, fields: list[str]) -> Any:
        read.extend(fields)
        return await hmget(key, fields)

    monkeypatch.setattr(bed.redis, "hmget", reading)

    async def page(after: str | None, most: int, newest_first: bool) -> list[str]:
        own = bed.conversations
        told = ("t", made.id, any_size, after, most)
        stored = await own.page(*told, newest_first=newest_first)
        assert [json.loads(one)["id"] for one in stored.values()] == [*stored]
        return [*stored]

    assert await page(None, 2, False) == ["d", "c"]
    assert await page("c", 2, False) == ["a"]
    assert await page(None, 1, True) == ["a"]
    assert await page("c", 2, True) == ["d"]
    assert read == ["d", "c", "a", "a", "d"]
    with pytest.raises(PenstockError) as refused:
        await page("b", 2, False)
    assert refused.value.param == "after"


async def test_of_older_ones_it_is_not_known_which_models_answered(bed: Bed) -> None:
    made = await bed.conversations.create("t", {}, [])
    key = f"{bed.root}:of:t:{made.id}"
    few, any_model = principal("t", models=frozenset({"m"})), principal("t")
    await bed.conversations.authorize(few, made.id)
    stored = json.loads(str(await bed.redis.get(key)))
    del stored["notes_models"]
    await bed.redis.set(key, json.dumps(stored))
    assert await bed.refused(bed.conversations.authorize(few, made.id)) == "model_not_allowed"
    await bed.conversations.authorize(any_model, made.id)
    await bed.conversations.describe("t", made.id, {"a": "b"})
    assert await bed.refused(bed.conversations.authorize(few, made.id)) == "model_not_allowed"


async def test_what_is_read_is_held_before_it_is_read(bed: Bed) -> None:
    """Items of a conversation may fill a tenant's whole room: many who look at once would fill the
    gateway."""
    own = bed.conversations
    made = await own.create("t", {}, [item("a", "x" * 300), item("b", "y" * 30)])

    async def held(call: Any) -> int:
        with pytest.raises(Full) as refused:
            await call
        return refused.value.size

    first, second = (
        len(json.dumps(one, separators=(",", ":")))
        for one in (item("a", "x" * 300), item("b", "y" * 30))
    )
    assert await held(own.items("t", made.id, full)) == first + second
    assert await held(own.item("t", made.id, full, "b")) == second
    one = own.page("t", made.id, full, None, 1, newest_first=True)
    assert await held(one) == second
    both = own.page("t", made.id, full, None, 2, newest_first=False)
    assert await held(both) == first + second
    assert await bed.refused(own.item("t", made.id, any_size, "c")) == "not_found"


async def test_a_page_is_told_as_it_is_stored(bed: Bed) -> None:
    """Parsed, what is read would take many times its bytes."""
    made = await bed.conversations.create("t", {}, [item("a"), item("b")])
    stored = '{"id":"a",  "n":1.000}'
    await bed.redis.hset(f"{bed.root}:items:t:{made.id}", "a", stored)
    gateway: Any = SimpleNamespace(conversations=bed.conversations)
    query = PageQuery(limit=1, order="asc")
    told = page_json(await list_items(gateway, "t", made.id, query, any_size))
    assert stored.encode() in told
    about = {"object": "list", "first_id": "a", "last_id": "a", "has_more": True}
    assert json.loads(told) == {**about, "data": [{"id": "a", "n": 1.0}]}
    assert await bed.conversations.item("t", made.id, any_size, "a") == stored.encode()


async def test_what_is_parsed_counts_with_its_values(bed: Bed) -> None:
    found = {"id": "a", "type": "file_search_call", "queries": [], "results": [{}] * 100}
    text = json.dumps(found, separators=(",", ":")).encode()
    with pytest.raises(Full) as refused:
        await parsed_item(text, full)
    assert refused.value.size == parsed_bytes(text) > 10 * len(text)

    made = await bed.conversations.create("t", {}, [found])
    memory = Shares(10**6)
    gateway: Any = SimpleNamespace(
        conversations=bed.conversations, settings=SimpleNamespace(gateway=GatewaySettings())
    )
    request: Any = SimpleNamespace(conversation=SimpleNamespace(id=made.id))
    await said_before(gateway, principal("t"), Place("t", memory), request)
    assert memory.taken == len(text) + parsed_bytes(text)


@pytest.mark.parametrize("value", ["{}", "[]", "[0]", '{"a":0}', "0.5", '"ab"', '{"a":[{}]}'])
def test_values_take_about_what_is_counted(value: str) -> None:
    text = b"[" + b",".join([value.encode()] * 10_000) + b"]"
    tracemalloc.start()
    try:
        kept = orjson.loads(text)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(kept) == 10_000
    assert taken < 1.5 * (len(text) + parsed_bytes(text))


class Full(Exception):
    def __init__(self, size: int) -> None:
        self.size = size


def full(size: int) -> None:
    raise Full(size)
