"""Which earlier searches do for one, and what of a query is searched for."""

from typing import Any

import openai
from google.protobuf.field_mask_pb2 import FieldMask

from protos import gateway_pb2_grpc, gateway_stores_pb2_grpc
from protos import gateway_stores_pb2 as pb
from protos.gateway_pb2 import PublicSearchStoreRequest
from tests.support.gateway_rig import MODEL, Rig
from tests.support.ports import QUESTION, Port


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
