"""Vector stores after another embedding model has come."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from protos import gateway_stores_pb2 as pb
from protos import gateway_stores_pb2_grpc
from tests.support.gateway_rig import EMBEDDING_MODEL, MODEL, Rig
from tests.support.ports import QUESTION, Port, refusal
from tests.support.waiting import until


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
