"""What REST tells of what tenants keep is what gRPC has messages for."""

import threading
from typing import Any

import pytest
from google.protobuf.struct_pb2 import Value

from protos import gateway_stores_pb2 as pb
from protos.gateway_conversations_pb2 import (
    AddConversationItemsRequest,
    Conversation,
    ConversationItem,
    ConversationItems,
    CreateConversationRequest,
    GetConversationItemRequest,
    ListConversationItemsRequest,
    UpdateConversationRequest,
)
from protos.gateway_pb2 import PublicSearchStoreRequest
from services.common.fairness.shares import Shares
from services.gateway.api.grpc import kept
from services.gateway.api.grpc.kept import told
from services.gateway.api.grpc.plain import count_values, fields_of
from services.gateway.api.openapi.answers import batches, responses, stores
from services.gateway.api.openapi.answers.common import PageOf
from services.gateway.api.resources.attachments import FileAbout
from services.gateway.api.resources.batches import CreateBatch
from services.gateway.api.resources.conversations import (
    AddItems,
    CreateConversation,
    UpdateConversation,
)
from services.gateway.api.resources.file_batches import CreateFileBatch
from services.gateway.api.resources.files import FileList
from services.gateway.api.resources.pages import PageQuery, StorePage
from services.gateway.api.resources.uploads import CompleteUpload, CreateUpload
from services.gateway.api.resources.vector_stores import (
    AboutStore,
    AttachedList,
    AttachFile,
    CreateStore,
    UpdateFile,
)
from services.gateway.intake import Intake, Place
from tests.support.gateway_parts import principal

KIND = {"object"}
CONVERSATION = {"conversation_id"}


def names(message: Any) -> set[str]:
    return {field.name for field in message.DESCRIPTOR.fields}


@pytest.mark.parametrize(
    ("answer", "message", "left_out"),
    [
        (stores.File, pb.File, KIND),
        (stores.DeletedFile, pb.Deleted, KIND),
        (stores.VectorStore, pb.VectorStore, KIND),
        (stores.ExpiresAfter, pb.ExpiresAfter, set()),
        (stores.FileCounts, pb.FileCounts, set()),
        (stores.FileBatch, pb.FileBatch, KIND),
        (stores.StoreFile, pb.VectorStoreFile, KIND),
        (stores.ChunkingStrategy, pb.ChunkingStrategy, set()),
        (stores.StaticChunking, pb.ChunkingStrategy.Static, set()),
        (stores.IndexFailure, pb.VectorStoreFile.Failure, set()),
        (stores.Upload, pb.Upload, KIND),
        (stores.UploadPart, pb.UploadPart, KIND),
        (responses.StoredConversation, Conversation, KIND),
        (PageOf, ConversationItems, KIND),
        (batches.Batch, pb.Batch, KIND),
        (batches.BatchFaults, pb.Batch.Errors, KIND),
        (batches.BatchFault, pb.Batch.Error, set()),
        (batches.RequestCounts, pb.Batch.RequestCounts, set()),
    ],
)
def test_nothing_is_told_over_rest_alone(answer: Any, message: Any, left_out: set[str]) -> None:
    """`left_out`: what says the kind, or is never set."""
    assert answer.__annotations__.keys() - left_out == names(message)


@pytest.mark.parametrize(
    ("model", "message", "path"),
    [
        (StorePage, pb.ListVectorStoresRequest, set()),
        (PageQuery, pb.ListBatchesRequest, set()),
        (FileList, pb.ListFilesRequest, set()),
        (AttachedList, pb.ListAttachedFilesRequest, {"vector_store_id"}),
        (CreateStore, pb.CreateVectorStoreRequest, set()),
        (AboutStore, pb.UpdateVectorStoreRequest, {"vector_store_id", "update_mask"}),
        (AttachFile, pb.AttachFileRequest, {"vector_store_id"}),
        (UpdateFile, pb.UpdateAttachedFileRequest, {"vector_store_id", "file_id"}),
        (CreateFileBatch, pb.CreateFileBatchRequest, {"vector_store_id"}),
        (FileAbout, pb.CreateFileBatchRequest.File, set()),
        (AttachedList, pb.ListFileBatchRequest, {"vector_store_id", "batch_id"}),
        (CreateBatch, pb.CreateBatchRequest, set()),
        (CreateUpload, pb.CreateUploadRequest, set()),
        (CompleteUpload, pb.CompleteUploadRequest, {"upload_id"}),
        (CreateConversation, CreateConversationRequest, set()),
        (UpdateConversation, UpdateConversationRequest, CONVERSATION),
        (AddItems, AddConversationItemsRequest, CONVERSATION),
        (PageQuery, ListConversationItemsRequest, CONVERSATION),
    ],
)
def test_nothing_can_be_asked_over_rest_alone(model: Any, message: Any, path: set[str]) -> None:
    assert model.model_fields.keys() | path == names(message)


def test_what_is_not_set_is_not_asked_and_what_is_null_is_not_told() -> None:
    request = pb.ListAttachedFilesRequest(vector_store_id="vs_1", limit=0)
    assert fields_of(request, "vector_store_id") == {"limit": 0}
    store = pb.CreateVectorStoreRequest(file_ids=["a"], metadata={"b": "c"})
    assert fields_of(store) == {"file_ids": ["a"], "metadata": {"b": "c"}}
    attach = pb.AttachFileRequest(file_id="f", attributes={"n": Value(number_value=2)})
    attach.attributes["none"].null_value = 0
    attach.chunking_strategy.static.max_chunk_size_tokens = 200
    assert fields_of(attach) == {
        "file_id": "f",
        "attributes": {"n": 2.0, "none": None},
        "chunking_strategy": {"static": {"max_chunk_size_tokens": 200}},
    }
    search = PublicSearchStoreRequest()
    search.filters.update({"type": "and", "filters": [{"value": ["a", True]}, {"value": None}]})
    assert fields_of(search)["filters"] == {
        "type": "and",
        "filters": [{"value": ["a", True]}, {"value": None}],
    }
    batch = told(pb.Batch, {"id": "b", "object": "batch", "errors": None, "failed_at": None})
    assert batch == pb.Batch(id="b")


async def test_much_is_told_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as it takes, nobody's tokens would come."""
    threads: list[int] = []

    def noting(kind: Any, json: Any) -> Any:
        threads.append(threading.get_ident())
        return told(kind, json)

    monkeypatch.setattr(kept, "told", noting)

    async def tell(results: int) -> Any:
        async def does(call: Any) -> Any:
            return {"item": {"results": [{"n": 0}] * results}}

        look = kept.look_of(GetConversationItemRequest, does, ConversationItem, Intake.visit).look
        place = Place("t", Shares(1))
        return await look(None, None, "req_1", principal("t"), None, place)

    assert len((await tell(1)).item["results"]) == 1
    assert threads == [threading.get_ident()]
    assert len((await tell(1000)).item["results"]) == 1000
    assert threads[1] != threads[0]


def test_values_are_counted_and_not_all_where_they_are_many() -> None:
    json = {"a": [1, {"b": None}], "c": "d"}
    assert count_values(json, 100) == 6
    assert count_values(json, 6) == 6
    for most in range(6):
        assert count_values(json, most) > most
