"""What is said of a vector store, its end, and whose it is."""

import asyncio
from typing import Any

import openai
import pytest

from services.gateway.jobs.queue import Queue
from services.gateway.server import GatewayService
from tests.support.gateway_rig import MODEL, Rig
from tests.support.ports import Port, refusal
from tests.support.waiting import until

DAY_S = 86_400


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
