"""A vector store that chooses its embedding model."""

from typing import Any

import openai

from tests.support.gateway_rig import EMBEDDING_MODEL, MODEL, Rig
from tests.support.ports import QUESTION, Port, refusal
from tests.support.waiting import until


async def test_a_store_chooses_its_embedding_model(rig: Rig) -> None:
    """Over REST: files go there and are searched by it; another choice has them indexed anew."""
    await until(lambda: rig.gateway.retrieval.has("wide"), 10)
    wide: Any = {"extra_body": {"embedding_model": "wide"}}
    port = await Port.of(rig, **wide)

    async def told() -> dict[str, Any]:
        return (await port.stores.retrieve(port.id)).model_dump()  # type: ignore[no-any-return]

    file = await port.add("a.md")
    documents, embedders = rig.retrieval.servicer.documents, rig.retrieval.servicer.embedders
    place = ("acme", port.id, file)
    assert (documents[place].embedder, embedders[place]) == ("wide", "w1")
    assert (await told())["embedding_model"] == "wide"
    assert (await told())["reindexing"] is None
    assert await port.found() == ["a.md"]
    assert rig.retrieval.servicer.searches[-1].embedder == "wide"
    messages: Any = [{"role": "user", "content": QUESTION}]
    tool: Any = {"type": "file_search", "vector_store_ids": [port.id]}
    await port.client.chat.completions.create(model=MODEL, messages=messages, tools=[tool])
    assert rig.retrieval.servicer.searches[-1].embedder == "wide"

    async def chooses(model: str | None, fingerprint: str) -> None:
        await port.stores.update(port.id, extra_body={"embedding_model": model})
        await until(lambda: embedders[place] == fingerprint, 10)

    await chooses(None, "e1")
    assert (await told())["embedding_model"] == EMBEDDING_MODEL
    assert await port.found() == ["a.md"]
    assert rig.retrieval.servicer.searches[-1].embedder == ""
    await chooses("wide", "w1")

    plain = await Port.of(rig)
    for call in (
        port.stores.create(extra_body={"embedding_model": "none"}),
        port.stores.update(port.id, extra_body={"embedding_model": "none"}),
    ):
        assert (await refusal(call))[:2] == (400, "embedding_model")
    key, _ = await rig.keys.create("acme", models=[MODEL, EMBEDDING_MODEL])
    narrow = (await rig.openai(key)).vector_stores
    for call in (
        narrow.create(**wide),
        narrow.update(plain.id, **wide),
        narrow.search(port.id, query="x"),
        narrow.files.create(port.id, file_id=await plain.file("b.md")),
        reindexed(narrow, port.id),
    ):
        assert (await refusal(call))[0] == 403
    assert await narrow.search(plain.id, query="x")
    await reindexed(narrow, plain.id)
    key, _ = await rig.keys.create("acme", models=[MODEL, "wide"])
    other = (await rig.openai(key)).vector_stores
    for call in (
        other.update(port.id, extra_body={"embedding_model": None}),
        reindexed(other, plain.id),
    ):
        assert (await refusal(call))[0] == 403
    assert (await told())["embedding_model"] == "wide"
    await other.update(port.id, name="else")
    await reindexed(other, port.id)


async def reindexed(stores: openai.resources.AsyncVectorStores, id: str) -> None:
    """At the tenant's cost, by the store's model."""
    await stores._client.post(f"/vector_stores/{id}/reindexing", cast_to=dict)
