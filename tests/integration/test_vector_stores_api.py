"""OpenAI's vector_stores API by OpenAI's own client: attributes and filters, batches of files,
chunking, expiry, updates, what a chat and a response search for."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import openai
import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.struct_pb2 import Value

from protos import gateway_pb2_grpc, gateway_stores_pb2_grpc
from protos import gateway_stores_pb2 as pb
from protos.gateway_pb2 import ChatRequest, HybridSearch, PublicSearchStoreRequest
from protos.retrieval_pb2 import Filter, Ranking
from protos.tokenizer_pb2 import PromptRequest
from services.common.config import JobsSettings
from services.common.content import said
from services.common.errors import invalid, unavailable
from services.common.link import LinkCall
from services.gateway.jobs.queue import Queue
from services.gateway.server import GatewayService
from tests.support.gateway_rig import EMBEDDING_MODEL, MODEL, Rig, gateway_rig, say_numbers
from tests.support.waiting import until

DAY_S = 86_400
QUESTION = "When does the harbour open?"


@pytest.fixture
async def rig(redis_url: str, namespace: str) -> AsyncIterator[Rig]:
    async with gateway_rig(redis_url, namespace, jobs=JobsSettings(lease_s=1.0)) as rig:
        yield rig


class Port:
    """A tenant's files about a port, in a store."""

    def __init__(self, rig: Rig, client: openai.AsyncOpenAI, store: str) -> None:
        self.rig = rig
        self.client = client
        self.stores: Any = client.vector_stores
        self.id = store

    @classmethod
    async def of(cls, rig: Rig, key: str | None = None, **about: Any) -> "Port":
        client = await rig.openai(key)
        return cls(rig, client, (await client.vector_stores.create(name="s", **about)).id)

    async def file(self, name: str, text: str = "The harbour opens.") -> str:
        content = (name, text.encode())
        return (await self.client.files.create(file=content, purpose="assistants")).id

    async def add(self, name: str, **about: Any) -> str:
        file = await self.file(name)
        await self.stores.files.create_and_poll(file, vector_store_id=self.id, **about)
        return file

    async def found(self, query: Any = QUESTION, **about: Any) -> list[str]:
        page = await self.stores.search(self.id, query=query, **about)
        return sorted(one.filename for one in page.data)

    async def age(self, seconds: int) -> None:
        """Nobody has used the store for so long."""
        facts = f"{self.rig.settings.namespace}:{{acme}}:store:{self.id}:facts"
        await self.rig.redis.hincrby(facts, "active", -seconds)


async def refusal(call: Any) -> tuple[int, str | None, str | None]:
    with pytest.raises(openai.APIStatusError) as refused:
        await call
    return refused.value.status_code, refused.value.param, refused.value.code  # type: ignore[attr-defined]


# ---- attributes ---------------------------------------------------------------------------------


async def test_files_are_found_by_their_attributes(rig: Rig) -> None:
    port = await Port.of(rig)
    await port.add("old.md", attributes={"year": 1999, "town": "Kiel", "open": True})
    await port.add("new.md", attributes={"year": 2024.5, "town": "Bremen", "open": False})
    await port.add("none.md")
    every = ["new.md", "none.md", "old.md"]

    def one(type: str, key: str, value: Any) -> dict[str, Any]:
        return {"type": type, "key": key, "value": value}

    is_old, is_new = one("lt", "year", 2000), one("eq", "town", "Bremen")
    either = {"type": "or", "filters": [is_old, is_new]}
    for filters, found in (
        (one("eq", "town", "Kiel"), ["old.md"]),
        (one("ne", "town", "Kiel"), ["new.md", "none.md"]),
        (one("eq", "open", True), ["old.md"]),
        (one("gt", "year", 1999), ["new.md"]),
        (one("gte", "year", 1999), ["new.md", "old.md"]),
        (one("lte", "year", 2024.5), ["new.md", "old.md"]),
        (is_old, ["old.md"]),
        (one("in", "town", ["Kiel", "Bremen"]), ["new.md", "old.md"]),
        (one("nin", "town", ["Kiel", "Bremen"]), ["none.md"]),
        ({"type": "and", "filters": [is_old, is_new]}, []),
        (either, ["new.md", "old.md"]),
        (
            {"type": "and", "filters": [{"type": "or", "filters": [is_old, is_new]}, is_new]},
            ["new.md"],
        ),
        (None, every),
    ):
        assert await port.found(filters=filters) == found, filters
    (told,) = (await port.stores.search(port.id, query=QUESTION, filters=is_old)).data
    assert told.attributes == {"year": 1999.0, "town": "Kiel", "open": True}


async def test_attributes_are_changed_where_searches_look(rig: Rig) -> None:
    port = await Port.of(rig)
    file = await port.add("a.md", attributes={"year": 1, "town": "Kiel"})
    is_two = {"type": "eq", "key": "year", "value": 2}
    assert await port.found(filters=is_two) == []
    changed = await port.stores.files.update(file, vector_store_id=port.id, attributes={"year": 2})
    assert (changed.attributes, changed.status) == ({"year": 2.0}, "completed")
    assert await port.found(filters=is_two) == ["a.md"]
    assert await port.found(filters={**is_two, "key": "town", "value": "Kiel"}) == []
    await port.stores.files.update(file, vector_store_id=port.id, attributes=None)
    assert await port.found(filters=is_two) == []


async def test_attributes_that_change_while_a_file_is_indexed_are_found(rig: Rig) -> None:
    port = await Port.of(rig)
    rig.retrieval.hold_index.clear()
    file = await port.file("a.md")
    await port.stores.files.create(port.id, file_id=file, attributes={"n": 1})
    await until(lambda: rig.retrieval.servicer.calls == 1, 10)
    await port.stores.files.update(file, vector_store_id=port.id, attributes={"n": 2})
    rig.retrieval.hold_index.set()
    done = await port.stores.files.poll(file, vector_store_id=port.id)
    assert (done.status, done.attributes) == ("completed", {"n": 2.0})
    assert await port.found(filters={"type": "eq", "key": "n", "value": 2}) == ["a.md"]


@pytest.mark.parametrize(
    ("attributes", "param"),
    [
        ({str(n): n for n in range(17)}, "attributes"),
        ({"k": "x" * 513}, "attributes.k"),
        ({"k" * 65: 1}, "attributes." + "k" * 64),
        ({"": 1}, "attributes."),
        ({'a"b': 1}, 'attributes.a"b'),
        ({"k": [1]}, "attributes.k"),
        ({"k": None}, "attributes.k"),
        ({"k": 2**53 + 2}, "attributes.k"),
        ("x", "attributes"),
    ],
)
async def test_bad_attributes_are_named(rig: Rig, attributes: Any, param: str) -> None:
    port = await Port.of(rig)
    file = await port.add("a.md")
    ways = (
        ("files", {"file_id": file}),
        (f"files/{file}", {}),
        ("file_batches", {"file_ids": [file]}),
    )
    http = await rig.http()
    for path, body in ways:
        whole = f"/v1/vector_stores/{port.id}/{path}"
        answer = await http.post(whole, json={**body, "attributes": attributes})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), path
    batch = {"files": [{"file_id": file, "attributes": attributes}]}
    answer = await http.post(f"/v1/vector_stores/{port.id}/file_batches", json=batch)
    assert answer.json()["error"]["param"] == f"files[0].{param}"


DEEP: dict[str, Any] = {"type": "eq", "key": "k", "value": 1}
for _ in range(8):
    DEEP = {"type": "and", "filters": [DEEP]}


@pytest.mark.parametrize(
    ("filters", "param"),
    [
        ({"type": "like", "key": "k", "value": 1}, "filters.type"),
        ({"type": "eq", "value": 1}, "filters.key"),
        ({"type": "eq", "key": "k"}, "filters.value"),
        ({"type": "eq", "key": "k", "value": [1]}, "filters.value"),
        ({"type": "in", "key": "k", "value": 1}, "filters.value"),
        ({"type": "in", "key": "k", "value": []}, "filters.value"),
        ({"type": "in", "key": "k", "value": [1] * 101}, "filters.value"),
        ({"type": "gt", "key": "k", "value": "a"}, "filters.value"),
        ({"type": "gt", "key": "k", "value": True}, "filters.value"),
        ({"type": "and", "key": "k", "filters": [DEEP]}, "filters"),
        ({"type": "and", "filters": []}, "filters.filters"),
        ({"type": "or", "filters": [{"type": "eq", "key": "k"}]}, "filters.filters[0].value"),
        ({"type": "eq", "key": "k", "value": 1, "filters": []}, "filters.filters"),
        ({"type": "eq", "key": "k", "value": 1, "odd": 1}, "filters.odd"),
        ({"type": "and", "filters": [{"type": "eq", "key": "k", "value": 1}] * 100}, "filters"),
        ({"type": "and", "filters": [DEEP]}, "filters"),
        ("x", "filters"),
    ],
)
async def test_bad_filters_are_named(rig: Rig, filters: Any, param: str) -> None:
    port = await Port.of(rig)
    search = port.stores.search(port.id, query="x", filters=filters)
    assert (await refusal(search))[:2] == (400, param)
    tool = {"type": "file_search", "vector_store_ids": [port.id], "filters": filters}
    asked: Any = {"model": MODEL, "input": QUESTION, "tools": [tool]}
    assert (await refusal(port.client.responses.create(**asked)))[:2] == (400, f"tools[0].{param}")
    assert rig.retrieval.servicer.searches == []


async def test_several_queries_find_each_passage_once(rig: Rig) -> None:
    port = await Port.of(rig)
    await port.add("a.md")
    other = await port.file("b.md", "The bridge closes.")
    await port.stores.files.create_and_poll(other, vector_store_id=port.id)
    page = await port.stores.search(port.id, query=["harbour", "the opens.", "bridge quickly"])
    assert [(one.filename, one.score) for one in page.data] == [("a.md", 1.0), ("b.md", 0.5)]
    assert await port.found(["harbour", "bridge"], max_num_results=1) in (["a.md"], ["b.md"])
    assert (await refusal(port.stores.search(port.id, query=["x"] * 9)))[1] == "query"


# ---- chunking, text -----------------------------------------------------------------------------


async def test_how_a_file_is_cut(rig: Rig) -> None:
    port = await Port.of(rig)
    file = await port.file("a.md")
    rig.gateway.retrieval.max_chunk_tokens = 254

    def static(size: int, overlap: int) -> dict[str, Any]:
        told = {"max_chunk_size_tokens": size, "chunk_overlap_tokens": overlap}
        return {"chunking_strategy": {"type": "static", "static": told}}

    at = "chunking_strategy.static."
    for size, overlap, param in (
        (99, 0, "max_chunk_size_tokens"),
        (4097, 0, "max_chunk_size_tokens"),
        (800, 400, "max_chunk_size_tokens"),
        (255, 0, "max_chunk_size_tokens"),
        (200, 101, "chunk_overlap_tokens"),
        (200, -1, "chunk_overlap_tokens"),
    ):
        create = port.stores.files.create(port.id, file_id=file, **static(size, overlap))
        assert (await refusal(create))[:2] == (400, at + param)
    with pytest.raises(openai.BadRequestError, match="at most 254: the embedding model"):
        await port.stores.create(file_ids=[file], **static(800, 400))
    told = await port.stores.files.create_and_poll(
        file, vector_store_id=port.id, **static(254, 127)
    )
    assert told.chunking_strategy.type == "static"
    assert told.chunking_strategy.static.max_chunk_size_tokens == 254
    auto: Any = {"type": "auto"}
    again = await port.stores.files.create(port.id, file_id=file, chunking_strategy=auto)
    assert again.chunking_strategy.type == "other"


async def test_how_no_file_is_cut_is_not_taken_silently(rig: Rig) -> None:
    """It would be forgotten: files that are attached later are cut as their calls say."""
    size = {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 0}
    static: Any = {"type": "static", "static": size}
    port = await Port.of(rig)
    for more in ({}, {"file_ids": []}):
        with pytest.raises(openai.BadRequestError, match="goes with 'file_ids'") as refused:
            await port.stores.create(name="a", chunking_strategy=static, **more)
        assert refused.value.param == "chunking_strategy"
    made = await port.stores.create(name="a", chunking_strategy={"type": "auto"})
    assert made.file_counts.total == 0


async def test_what_a_file_in_a_store_says(rig: Rig) -> None:
    port = await Port.of(rig)
    file = await port.add("a.md")
    page = await port.stores.files.content(file, vector_store_id=port.id)
    assert [(part.type, part.text) for part in page.data] == [("text", "The harbour opens.")]
    other = await port.file("b.md")
    content = port.stores.files.content(other, vector_store_id=port.id)
    assert (await refusal(content))[0] == 404, "it is not in this store"
    asked = rig.retrieval.servicer.calls
    await port.client.files.content(file)
    assert rig.retrieval.servicer.calls == asked, "its bytes are the gateway's own to tell"
    rig.retrieval.failure = invalid(
        "a scanned PDF", "file", reason="invalid_file", stage="retrieval"
    )
    content = port.stores.files.content(file, vector_store_id=port.id)
    assert await refusal(content) == (400, "file_id", "invalid_file")


# ---- batches of files ---------------------------------------------------------------------------


async def test_a_batch_of_files(rig: Rig) -> None:
    port = await Port.of(rig)
    files = [await port.file(f"{n}.md") for n in range(3)]
    done = await port.stores.file_batches.create_and_poll(
        port.id, file_ids=[*files, files[0]], attributes={"of": "all"}
    )
    assert (done.status, done.object) == ("completed", "vector_store.files_batch")
    assert (done.file_counts.completed, done.file_counts.total) == (3, 3)
    listed = port.stores.file_batches.list_files(done.id, vector_store_id=port.id)
    told = [(one.id, one.attributes) async for one in listed]
    assert told == [(file, {"of": "all"}) for file in reversed(files)]
    each: Any = [{"file_id": files[0], "attributes": {"n": 0}}, {"file_id": files[1]}]
    again = await port.stores.file_batches.create_and_poll(port.id, files=each)
    assert (again.file_counts.completed, again.file_counts.total) == (2, 2)
    listed = port.stores.file_batches.list_files(done.id, vector_store_id=port.id)
    assert [one.id async for one in listed] == files[2:], "the others are there by another"
    told_again = await port.stores.file_batches.retrieve(done.id, vector_store_id=port.id)
    assert told_again.file_counts.completed == 3, "what became of them"
    assert (await port.stores.retrieve(port.id)).file_counts.total == 3


async def test_a_batch_that_is_cancelled_keeps_what_has_arrived(rig: Rig) -> None:
    port = await Port.of(rig)
    first = await port.add("first.md")
    rig.retrieval.hold_index.clear()
    files = [await port.file(f"{n}.md") for n in range(4)]
    batch = await port.stores.file_batches.create(port.id, file_ids=files)
    assert (batch.status, batch.file_counts.in_progress) == ("in_progress", 4)
    await until(lambda: rig.retrieval.servicer.calls == 3, 10)
    told = await port.stores.file_batches.cancel(batch.id, vector_store_id=port.id)
    assert (told.status, told.file_counts.cancelled) == ("cancelled", 4)
    rig.retrieval.hold_index.set()
    documents = rig.retrieval.servicer.documents

    async def over() -> bool:
        waiting = await rig.gateway.jobs.queues.counts("index")
        return waiting == (0, 0) and [file for _, _, file in documents] == [first]

    await until(over, 10, "what was on its way is found nowhere")
    cancelled = port.stores.files.list(port.id, filter="cancelled")
    assert {one.id async for one in cancelled} == set(files)
    await port.stores.file_batches.cancel(batch.id, vector_store_id=port.id)


async def test_bad_batches_are_named(rig: Rig) -> None:
    port = await Port.of(rig)
    file, gone = await port.file("a.md"), "file-" + "0" * 30
    http, path = await rig.http(), f"/v1/vector_stores/{port.id}/file_batches"
    for body, status, param in (
        ({}, 400, "file_ids"),
        ({"file_ids": []}, 400, "file_ids"),
        ({"file_ids": [file] * 2001}, 400, "file_ids"),
        ({"file_ids": [file, gone]}, 404, "file_ids[1]"),
        ({"files": [{"file_id": file}, {"file_id": gone}]}, 404, "files[1].file_id"),
        ({"files": [{"file_id": file}] * 2}, 400, "files[1].file_id"),
        ({"files": [{"file_id": file}], "file_ids": [file]}, 400, "files"),
        ({"files": [{"file_id": file}], "attributes": {"a": 1}}, 400, "attributes"),
        ({"files": [{"file_id": file, "odd": 1}]}, 400, "files[0].odd"),
    ):
        answer = await http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), body
    assert (await port.stores.retrieve(port.id)).file_counts.total == 0
    missing = port.stores.file_batches.retrieve("vsfb_" + "0" * 30, vector_store_id=port.id)
    assert (await refusal(missing))[0] == 404


# ---- what is said of a store, and its end -------------------------------------------------------


async def test_a_store_is_changed(rig: Rig) -> None:
    about: Any = {"description": "d", "metadata": {"a": "1"}}
    port = await Port.of(rig, **about, expires_after={"anchor": "last_active_at", "days": 7})
    told = await port.stores.update(port.id, name="n")
    assert (told.name, told.metadata, told.expires_after.days) == ("n", {"a": "1"}, 7)
    assert told.expires_at == told.last_active_at + 7 * DAY_S
    told = await port.stores.update(port.id, metadata={"b": "2"}, expires_after=None)
    assert (told.name, told.metadata, told.expires_after) == ("n", {"b": "2"}, None)
    assert told.expires_at is None
    told = await port.stores.update(port.id, name=None, metadata=None)
    assert (told.name, told.metadata, told.description) == ("", {}, "d")
    http = await rig.http()
    for body, param in (
        ({"odd": 1}, "odd"),
        ({"description": "x"}, "description"),
        ({"expires_after": {"anchor": "created_at", "days": 1}}, "expires_after.anchor"),
        ({"expires_after": {"anchor": "last_active_at", "days": 0}}, "expires_after.days"),
    ):
        answer = await http.post(f"/v1/vector_stores/{port.id}", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_changes_of_one_store_at_several_gateways_are_all_there(rig: Rig) -> None:
    port = await Port.of(rig, metadata={"k": "v"})
    other = (await rig.start(GatewayService)).replica.facts["url"]
    theirs: Any = port.client.with_options(base_url=f"{other}/v1").vector_stores
    for n in range(5):
        days: Any = {"anchor": "last_active_at", "days": n + 1}
        await asyncio.gather(
            port.stores.update(port.id, name=f"n{n}"),
            theirs.update(port.id, metadata={"k": str(n)}),
            theirs.update(port.id, expires_after=days),
        )
        told = await port.stores.retrieve(port.id)
        assert (told.name, told.metadata, told.expires_after.days) == (
            f"n{n}",
            {"k": str(n)},
            n + 1,
        )


async def test_a_store_that_nobody_uses_expires(rig: Rig) -> None:
    days: Any = {"anchor": "last_active_at", "days": 2}
    port = await Port.of(rig, expires_after=days)
    file = await port.add("a.md")
    await port.age(DAY_S)
    before = await port.stores.retrieve(port.id)
    assert await port.found() == ["a.md"]
    after = await port.stores.retrieve(port.id)
    assert after.last_active_at >= before.last_active_at + DAY_S, "a search is use"
    await port.age(2 * DAY_S)
    assert (await port.stores.retrieve(port.id)).status == "expired"
    tool: Any = {"type": "file_search", "vector_store_ids": [port.id]}
    chat: Any = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    for call, param in (
        (port.stores.search(port.id, query="x"), None),
        (port.stores.update(port.id, name="x"), None),
        (port.stores.files.create(port.id, file_id=file), None),
        (port.stores.file_batches.create(port.id, file_ids=[file]), None),
        (port.stores.files.update(file, vector_store_id=port.id, attributes={}), None),
        (port.client.chat.completions.create(**chat), "tools[0].vector_store_ids[0]"),
    ):
        assert await refusal(call) == (400, param, "vector_store_expired")
    queues = rig.gateway.jobs.queues
    queue = Queue("expire", "acme", "stores")
    async for jobs in queues.rest(queue):
        await queues.hasten(queue, *jobs)
    rig.gateway.jobs.look("expire")

    async def empty() -> bool:
        told = await port.stores.retrieve(port.id)
        return told.file_counts.total == 0 and not rig.retrieval.servicer.documents

    await until(empty, 10, "nothing is in it any more")
    assert (await port.stores.retrieve(port.id)).status == "expired"
    assert await rig.gateway.files.stores_of("acme", file) == set()
    assert (await port.client.files.retrieve(file)).id == file
    await port.stores.delete(port.id)
    assert (await refusal(port.stores.retrieve(port.id)))[0] == 404


async def test_pages_go_both_ways(rig: Rig) -> None:
    port = await Port.of(rig)
    ids = [(await port.stores.create()).id for _ in range(5)]
    every = [port.id, *ids]
    assert [one.id async for one in port.stores.list(limit=2)] == every[::-1]
    back = await port.stores.list(before=every[1], limit=2)
    assert ([one.id for one in back.data], back.has_more) == (every[3:1:-1], True)
    back = await port.stores.list(before=every[2], order="asc")
    assert ([one.id for one in back.data], back.has_more) == (every[:2], False)
    assert (await refusal(port.stores.list(before="")))[:2] == (400, "before")
    both = port.stores.list(before=every[2], after=every[0])
    assert (await refusal(both))[:2] == (400, "before")


# ---- chats and responses that search ------------------------------------------------------------


async def test_a_response_tells_its_search(rig: Rig) -> None:
    port = await Port.of(rig)
    old = await port.add("old.md", attributes={"year": 1999})
    await port.add("new.md", attributes={"year": 2024})
    filters = {"type": "lt", "key": "year", "value": 2000}
    ranking = {"score_threshold": 0.1}
    tool = {
        "type": "file_search",
        "vector_store_ids": [port.id],
        "max_num_results": 3,
        "filters": filters,
        "ranking_options": ranking,
    }
    asked: Any = {"model": MODEL, "input": QUESTION, "tools": [tool]}
    results: Any = {"include": ["file_search_call.results"]}
    first = await port.client.responses.create(**asked, **results)
    call, message = first.output
    assert (call.type, call.status, call.queries) == ("file_search_call", "completed", [QUESTION])
    assert [(one.file_id, one.filename) for one in call.results or ()] == [(old, "old.md")]
    assert (call.results or [])[0].attributes == {"year": 1999.0}
    assert message.type == "message"
    (search,) = rig.retrieval.servicer.searches
    assert (search.limit, round(search.score_threshold, 3)) == (3, 0.1)
    assert search.filter.comparison.operator == Filter.LT
    again = await port.client.responses.retrieve(first.id)
    assert [item.to_dict() for item in again.output] == [item.to_dict() for item in first.output]
    without = await port.client.responses.create(**asked, previous_response_id=first.id)
    assert without.output[0].results is None  # type: ignore[union-attr]
    repeated: Any = [*first.output, {"role": "user", "content": QUESTION}]
    await port.client.responses.create(**{**asked, "input": repeated})

    stream = await port.client.responses.create(**asked, **results, stream=True)
    events = [event async for event in stream]
    kinds = [event.type for event in events]
    at = kinds.index("response.output_item.added")
    assert kinds[at : at + 5] == [
        "response.output_item.added",
        "response.file_search_call.in_progress",
        "response.file_search_call.searching",
        "response.file_search_call.completed",
        "response.output_item.done",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    ended = events[-1].response
    assert [item.type for item in ended.output] == ["file_search_call", "message"]
    rig.retrieval.failure = unavailable("away", stage="retrieval", reason="store")
    skipped = await port.client.responses.create(**asked)
    assert [item.type for item in skipped.output] == ["message"]


async def test_a_chat_searches_as_it_is_told_by_both_ways(rig: Rig) -> None:
    port = await Port.of(rig)
    await port.add("old.md", attributes={"year": 1999})
    filters = {"type": "and", "filters": [{"type": "gte", "key": "year", "value": 1999}]}
    tool: Any = {
        "type": "file_search",
        "vector_store_ids": [port.id],
        "filters": filters,
        "ranking_options": {
            "score_threshold": 0.25,
            "ranker": "none",
            "hybrid_search": {"embedding_weight": 0, "text_weight": 2, "late_weight": 0.5},
        },
    }
    messages: Any = [{"role": "user", "content": QUESTION}]
    told = await port.client.chat.completions.create(model=MODEL, messages=messages, tools=[tool])
    assert len(told.penstock["passages"]) == 1  # type: ignore[attr-defined]
    request = ChatRequest(
        model=MODEL, messages=[said("user", QUESTION)], vector_store_ids=[port.id]
    )
    request.file_search.filters.update(filters)
    request.file_search.score_threshold = 0.25
    request.file_search.ranker = "none"
    request.file_search.hybrid_search.embedding_weight = 0
    request.file_search.hybrid_search.text_weight = 2
    request.file_search.hybrid_search.late_weight = 0.5
    stub = gateway_pb2_grpc.InferenceStub(await rig.channel())
    own = (("authorization", f"Bearer {rig.key}"),)
    _ = [event async for event in stub.Chat(request, metadata=own)]
    first, second = rig.retrieval.servicer.searches
    assert (first.filter, first.score_threshold) == (second.filter, second.score_threshold)
    weighed = Ranking(ranker=Ranking.NONE, text_weight=2, late_weight=0.5)
    assert first.ranking == second.ranking == weighed
    assert first.filter.compound.filters[0].comparison.key == "year"


# ---- earlier searches, and queries ---------------------------------------------------------------


def last_search(rig: Rig) -> Any:
    return rig.retrieval.servicer.searches[-1]


def cached(request: Any) -> tuple[float | None, float | None]:
    fields = ("max_age_s", "similar_at_least")
    return tuple(getattr(request, one) if request.HasField(one) else None for one in fields)  # type: ignore[return-value]


async def test_a_store_says_which_earlier_searches_do(rig: Rig) -> None:
    port, plain = await Port.of(rig), await Port.of(rig)
    http = await rig.http()
    path = f"/v1/vector_stores/{port.id}"
    assert (await http.get(path)).json()["cache"] is None
    await port.found()
    assert cached(last_search(rig)) == (None, None), "as the operator has set"
    for given, told in (
        ({"max_age_s": 60, "similar_at_least": 0.95}, (60, 0.95)),
        ({"max_age_s": 0}, (0, None)),
        (None, (None, None)),
    ):
        changed = await http.post(path, json={"cache": given})
        assert changed.json()["cache"] == given
        await port.found()
        assert cached(last_search(rig)) == told
    both = []
    for age, alike in ((60, 0.95), (30, 0.0)):
        about = {"cache": {"max_age_s": age, "similar_at_least": alike}}
        both.append((await http.post("/v1/vector_stores", json=about)).json()["id"])
    tool = {"type": "file_search", "vector_store_ids": [plain.id, *both]}
    messages: Any = [{"role": "user", "content": QUESTION}]
    tools: Any = [tool]
    await port.client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
    assert cached(last_search(rig)) == (30, 0.0), "the strictest of them"
    tool["vector_store_ids"] = [plain.id, both[0]]
    await port.client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
    assert cached(last_search(rig)) == (60, 0.95)


async def test_it_says_so_over_grpc_too(rig: Rig) -> None:
    stub = gateway_stores_pb2_grpc.VectorStoresStub(await rig.channel())
    own = (("authorization", f"Bearer {rig.key}"),)
    cache = pb.StoreCache(max_age_s=0, similar_at_least=0.5)
    made = await stub.CreateVectorStore(pb.CreateVectorStoreRequest(cache=cache), metadata=own)
    assert made.cache == cache
    update = pb.UpdateVectorStoreRequest(
        vector_store_id=made.id, update_mask=FieldMask(paths=["cache"])
    )
    assert not (await stub.UpdateVectorStore(update, metadata=own)).HasField("cache")


# ---- another embedding model --------------------------------------------------------------------


@asynccontextmanager
async def another_model(rig: Rig) -> AsyncIterator[None]:
    """Retrieval was started with it."""
    retrieval, registration = rig.retrieval, rig.retrieval_host._registration
    gateway = rig.gateway.retrieval
    for model in ("e2", "e1"):
        retrieval.embedder = model
        await registration.tell(retrieval.describe())
        await until(lambda model=model: gateway.embedder == model, 10)  # type: ignore[misc]
        if model == "e2":
            yield


async def reindexed(port: Port) -> dict[str, Any] | None:
    return (await port.stores.retrieve(port.id)).model_dump()["reindexing"]  # type: ignore[no-any-return]


async def test_a_store_is_indexed_anew_once_it_is_searched_after_another_model(rig: Rig) -> None:
    port = await Port.of(rig)
    for name in ("a.md", "b.md"):
        await port.add(name)
    told = (await port.stores.retrieve(port.id)).model_dump()
    assert (told["embedding_model"], told["reindexing"]) == (EMBEDDING_MODEL, None)
    counts = {"in_progress": 2, "completed": 0, "failed": 0, "cancelled": 0, "total": 2}
    async with another_model(rig):
        pending = {"status": "pending", "reason": None, "file_counts": counts}
        assert await reindexed(port) == pending
        path = f"/vector_stores/{port.id}/reindexing"
        told = await port.client.post(f"{path}/cancel", cast_to=dict)
        assert told["reindexing"] == {**pending, "status": "cancelled"}
        assert await port.found() == ["a.md", "b.md"]
        assert await reindexed(port) == {**pending, "status": "cancelled"}
        told = await port.client.post(path, cast_to=dict)
        assert told["reindexing"]["status"] in ("in_progress", "completed")

        async def whole() -> bool:
            now = await reindexed(port)
            done = {**counts, "in_progress": 0, "completed": 2}
            return now == {"status": "completed", "reason": None, "file_counts": done}

        await until(whole, 10)
        theirs = await Port.of(rig, (await rig.keys.create("rival"))[0])
        for call in (path, f"{path}/cancel"):
            assert (await refusal(theirs.client.post(call, cast_to=dict)))[0] == 404
        await theirs.add("c.md")
        other = await Port.of(rig)
        await other.add("d.md")
    assert await reindexed(other) is not None
    await other.found()  # which begins it
    stub = gateway_stores_pb2_grpc.VectorStoresStub(await rig.channel())
    own = (("authorization", f"Bearer {rig.key}"),)

    async def begun_by_itself() -> bool:
        asked = pb.GetVectorStoreRequest(vector_store_id=other.id)
        told = await stub.GetVectorStore(asked, metadata=own)
        assert told.embedding_model == EMBEDDING_MODEL
        counts = told.reindexing.file_counts
        return (told.reindexing.status, counts.completed) == ("completed", 1)

    await until(begun_by_itself, 10)
    request = pb.ReindexVectorStoreRequest(vector_store_id=port.id)
    assert (await stub.ReindexVectorStore(request, metadata=own)).reindexing.file_counts.total == 2
    stop = pb.CancelReindexingRequest(vector_store_id=port.id)
    assert (await stub.CancelReindexing(stop, metadata=own)).HasField("reindexing")


@pytest.mark.parametrize("how", ["chat", "response"])
async def test_what_answers_ask_for_is_indexed_anew_too(rig: Rig, how: str) -> None:
    port = await Port.of(rig)
    await port.add("a.md")
    tool: Any = {"type": "file_search", "vector_store_ids": [port.id]}
    asked: Any = {"model": MODEL, "tools": [tool]}
    async with another_model(rig):
        rig.retrieval.servicer.by_words = [port.id]
        if how == "chat":
            asked["messages"] = [{"role": "user", "content": QUESTION}]
            told = await port.client.chat.completions.create(**asked)
            extra: Any = told.model_extra
            assert "found by their words alone" in extra["penstock"]["warning"]
        else:
            await port.client.responses.create(input=QUESTION, **asked)

        async def is_whole() -> bool:
            now = await reindexed(port)
            return now is not None and now["status"] == "completed"

        await until(is_whole, 10)


async def test_courtesy_is_searched_for_unless_it_is_asked_not_to_be(rig: Rig) -> None:
    port = await Port.of(rig)
    await port.add("a.md")
    polite = f"Could you please tell me: {QUESTION}"
    for rewrite, query in ((True, QUESTION), (False, polite), (openai.omit, polite)):
        page = await port.stores.search(port.id, query=polite, rewrite_query=rewrite)
        assert page.model_dump()["search_query"] == [query]
        assert last_search(rig).query == query
    request = PublicSearchStoreRequest(vector_store_id=port.id, query=polite, rewrite_query=True)
    stub = gateway_pb2_grpc.InferenceStub(await rig.channel())
    own = (("authorization", f"Bearer {rig.key}"),)
    assert list((await stub.SearchStore(request, metadata=own)).search_query) == [QUESTION]


async def param_of(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    trailers = dict(refused.value.trailing_metadata() or ())
    return str(trailers.get("x-param", refused.value.details()))


# ---- gRPC, tenants ------------------------------------------------------------------------------


async def test_the_same_over_grpc(rig: Rig) -> None:
    port = await Port.of(rig)
    files = [await port.file(f"{n}.md") for n in range(3)]
    channel = await rig.channel()
    stub = gateway_stores_pb2_grpc.VectorStoresStub(channel)
    own = (("authorization", f"Bearer {rig.key}"),)
    made = await stub.CreateVectorStore(
        pb.CreateVectorStoreRequest(
            name="g",
            description="d",
            expires_after=pb.ExpiresAfter(anchor="last_active_at", days=3),
        ),
        metadata=own,
    )
    assert (made.description, made.expires_after.days) == ("d", 3)
    changed = await stub.UpdateVectorStore(
        pb.UpdateVectorStoreRequest(
            vector_store_id=made.id,
            update_mask=FieldMask(paths=["name", "expires_after"]),
            name="other",
        ),
        metadata=own,
    )
    assert (changed.name, changed.HasField("expires_after")) == ("other", False)
    batch = await stub.CreateFileBatch(
        pb.CreateFileBatchRequest(
            vector_store_id=made.id,
            files=[
                pb.CreateFileBatchRequest.File(
                    file_id=file, attributes={"n": Value(number_value=n)}
                )
                for n, file in enumerate(files)
            ],
        ),
        metadata=own,
    )
    asked = pb.GetFileBatchRequest(vector_store_id=made.id, batch_id=batch.id)

    async def arrived() -> bool:
        return bool((await stub.GetFileBatch(asked, metadata=own)).file_counts.completed == 3)

    await until(arrived, 10)
    listed = await stub.ListFileBatch(
        pb.ListFileBatchRequest(vector_store_id=made.id, batch_id=batch.id), metadata=own
    )
    assert [one.attributes["n"].number_value for one in listed.data] == [2, 1, 0]
    updated = await stub.UpdateAttachedFile(
        pb.UpdateAttachedFileRequest(
            vector_store_id=made.id,
            file_id=files[0],
            attributes={"town": Value(string_value="Kiel")},
        ),
        metadata=own,
    )
    assert updated.attributes["town"].string_value == "Kiel"
    search = PublicSearchStoreRequest(vector_store_id=made.id, queries=[QUESTION, "x"])
    search.filters.update({"type": "eq", "key": "town", "value": "Kiel"})
    search.ranker = "auto"
    inference = gateway_pb2_grpc.InferenceStub(channel)
    found = await inference.SearchStore(search, metadata=own)
    assert [one.attributes["town"].text for one in found.passages] == ["Kiel"]
    for field, param in (
        ({"hybrid_search": HybridSearch(text_weight=1)}, "hybrid_search.embedding_weight"),
        ({"ranker": "best"}, "ranker"),
        ({"score_threshold": 2.0}, "score_threshold"),
    ):
        odd = PublicSearchStoreRequest(vector_store_id=made.id, query="x", **field)
        assert await param_of(inference.SearchStore(odd, metadata=own)) == param
        chat = ChatRequest(
            model=MODEL,
            messages=[said("user", "x")],
            vector_store_ids=[made.id],
            file_search=ChatRequest.FileSearch(**field),
        )
        told = inference.Chat(chat, metadata=own)
        assert await param_of(told.read()) == f"file_search.{param}"
    content = stub.GetAttachedFileContent(
        pb.GetAttachedFileRequest(vector_store_id=made.id, file_id=files[0]), metadata=own
    )
    assert b"".join([piece.data async for piece in content]) == b"The harbour opens."
    cancelled = await stub.CancelFileBatch(
        pb.CancelFileBatchRequest(vector_store_id=made.id, batch_id=batch.id), metadata=own
    )
    assert (cancelled.status, cancelled.file_counts.completed) == ("completed", 3)
    told = await port.stores.retrieve(made.id)
    assert (told.name, told.file_counts.completed) == ("other", 3)


async def test_another_tenants_stores_cannot_be_reached(rig: Rig) -> None:
    port = await Port.of(rig)
    file = await port.add("a.md", attributes={"n": 1})
    batch = await port.stores.file_batches.create_and_poll(port.id, file_ids=[file])
    theirs = await Port.of(rig, (await rig.keys.create("rival"))[0])
    stores, their_file = theirs.stores, await theirs.file("b.md")
    for call in (
        stores.update(port.id, name="x"),
        stores.files.update(file, vector_store_id=port.id, attributes={"n": 2}),
        stores.files.update(file, vector_store_id=theirs.id, attributes={"n": 2}),
        stores.files.content(file, vector_store_id=port.id),
        stores.files.content(file, vector_store_id=theirs.id),
        stores.file_batches.create(port.id, file_ids=[their_file]),
        stores.file_batches.create(theirs.id, file_ids=[file]),
        stores.file_batches.retrieve(batch.id, vector_store_id=port.id),
        stores.file_batches.retrieve(batch.id, vector_store_id=theirs.id),
        stores.file_batches.cancel(batch.id, vector_store_id=port.id),
        stores.search(port.id, query="x"),
    ):
        assert (await refusal(call))[0] == 404
    for listed in (
        stores.file_batches.list_files(batch.id, vector_store_id=port.id),
        stores.file_batches.list_files(batch.id, vector_store_id=theirs.id),
        stores.files.list(port.id),
    ):
        with pytest.raises(openai.NotFoundError):
            _ = [one async for one in listed]
    told = await port.stores.files.retrieve(file, vector_store_id=port.id)
    assert (told.attributes, told.status) == ({}, "completed")
    assert (await port.stores.retrieve(port.id)).name == "s"


# ---- a model that ranks anew ---------------------------------------------------------------------


async def two_lengths(rig: Rig) -> Port:
    """A store of a short text, which the search finds first, and of a longer one."""
    port = await Port.of(rig)
    for name, text in (("short.md", QUESTION), ("long.md", f"{QUESTION[:-1]} now, today ?")):
        file = await port.file(name, text)
        await port.stores.files.create_and_poll(file, vector_store_id=port.id)
    return port


async def test_a_served_model_ranks_what_searches_find(rig: Rig) -> None:
    """The scripted one by length. Of several queries all pairs are asked of it at once."""
    port, http = await two_lengths(rig), await rig.http()
    rig.tokenizer.script = say_numbers
    url = f"/v1/vector_stores/{port.id}/search"

    async def found(**about: Any) -> tuple[list[tuple[str, float]], dict[str, Any]]:
        told = (await http.post(url, json={"query": QUESTION, **about})).json()
        return [(one["filename"], one["score"]) for one in told["data"]], told["penstock"]

    as_found, told = await found()
    assert [name for name, _ in as_found] == ["short.md", "long.md"]
    assert "reranked" not in told
    rig.gateway.settings.retrieval.reranking_model = MODEL
    ranked, told = await found()
    assert [name for name, _ in ranked] == ["long.md", "short.md"]
    assert [score for _, score in ranked] == pytest.approx([4.71, 3.61])
    assert told["reranked"] == MODEL
    assert (await found(max_num_results=1))[0] == ranked[:1]
    assert (await found(ranking_options={"ranker": "none"}))[0] == as_found
    several, _ = await found(query=[QUESTION, "harbour"])
    assert [name for name, _ in several] == ["long.md", "short.md"]
    pool = rig.tokenizer.requests[-1].pool
    assert sorted(one.text for one in pool.queries) == sorted([QUESTION] * 2 + ["harbour"] * 2)

    rig.gateway.settings.retrieval.reranking_model = "nobody"
    again, told = await found()
    assert (again, told["not_reranked"]) == (as_found, "model_not_found")
    stub = gateway_pb2_grpc.InferenceStub(await rig.channel())
    own = (("authorization", f"Bearer {rig.key}"),)
    search = PublicSearchStoreRequest(vector_store_id=port.id, query=QUESTION)
    reply = await stub.SearchStore(search, metadata=own)
    assert (reply.reranked, reply.not_reranked) == ("", "model_not_found")


async def test_a_chats_passages_are_as_the_model_ranks_them(rig: Rig) -> None:
    port, http = await two_lengths(rig), await rig.http()
    answers = rig.tokenizer.script

    async def each(call: LinkCall, request: PromptRequest) -> None:
        await (say_numbers if request.HasField("pool") else answers)(call, request)

    rig.tokenizer.script = each
    rig.gateway.settings.retrieval.reranking_model = "other"
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": [{"type": "file_search", "vector_store_ids": [port.id]}],
    }
    answer = await http.post("/v1/chat/completions", json=asked)
    told = answer.json()["penstock"]
    assert [one["filename"] for one in told["passages"]] == ["long.md", "short.md"]
    assert told["search"]["reranked"] == "other"
    record = await rig.record(answer.headers["x-request-id"])
    assert ("passages", "reranked") in [(d["subject"], d["choice"]) for d in record["decisions"]]
