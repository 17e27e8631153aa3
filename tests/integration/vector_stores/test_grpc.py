"""The same over gRPC."""

from typing import Any

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.struct_pb2 import Value

from protos import gateway_pb2_grpc, gateway_stores_pb2_grpc
from protos import gateway_stores_pb2 as pb
from protos.gateway_pb2 import ChatRequest, HybridSearch, PublicSearchStoreRequest
from services.common.text.content import said
from tests.support.gateway_rig import EMBEDDING_MODEL, MODEL, Rig
from tests.support.ports import QUESTION, Port
from tests.support.waiting import until


async def param_of(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    trailers = dict(refused.value.trailing_metadata() or ())
    return str(trailers.get("x-param", refused.value.details()))


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
        (
            {
                "ranker": "none",
                "hybrid_search": HybridSearch(embedding_weight=1, text_weight=1),
            },
            "hybrid_search",
        ),
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


async def test_a_store_chooses_its_embedding_model_over_grpc(rig: Rig) -> None:
    await until(lambda: rig.gateway.retrieval.has("wide"), 10)
    stub = gateway_stores_pb2_grpc.VectorStoresStub(await rig.channel())
    own = (("authorization", f"Bearer {rig.key}"),)
    create = pb.CreateVectorStoreRequest(name="s", embedding_model="wide")
    made = await stub.CreateVectorStore(create, metadata=own)
    assert made.embedding_model == "wide"
    mask = FieldMask(paths=["embedding_model"])
    update = pb.UpdateVectorStoreRequest(vector_store_id=made.id, update_mask=mask)
    assert (await stub.UpdateVectorStore(update, metadata=own)).embedding_model == EMBEDDING_MODEL
    odd = pb.CreateVectorStoreRequest(embedding_model="none")
    assert await param_of(stub.CreateVectorStore(odd, metadata=own)) == "embedding_model"
