"""Files, vector stores and batches: REST's requests in gRPC's shape, done by the same code.

What REST tells is told here by the same names, as far as the messages have them: what says the
kind (`object`), and what is never set, is left out.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from protos import gateway_stores_pb2 as pb
from services.common.errors import PenstockError, invalid
from services.gateway.api.grpc.looking import Look
from services.gateway.api.grpc.plain import Fields, count_values, fields_of
from services.gateway.api.resources import batches, file_batches, files, vector_stores
from services.gateway.api.resources.batches import CreateBatch, require_files
from services.gateway.api.resources.file_batches import CreateFileBatch
from services.gateway.api.resources.files import FileList
from services.gateway.api.resources.pages import PageQuery, StorePage
from services.gateway.api.resources.vector_stores import (
    AboutStore,
    AttachedList,
    AttachFile,
    CreateStore,
    UpdateFile,
)
from services.gateway.api.schema import validated
from services.gateway.identity.principal import Principal
from services.gateway.intake import Intake, Place
from services.gateway.parts import Gateway

M = TypeVar("M", bound=Message)

_MANY_VALUES = 500  # told takes some 2 ms up to here


def told(kind: type[M], json: Fields) -> M:
    """What REST tells."""
    return ParseDict(json, kind(), ignore_unknown_fields=True)


async def told_aside(kind: type[M], json: Fields) -> M:
    """As `told`: in a thread where it is much, so that it does not hold up other calls."""
    if count_values(json, _MANY_VALUES) > _MANY_VALUES:
        return await asyncio.to_thread(told, kind, json)
    return told(kind, json)


def id_of(request: Any, field: str) -> str:
    """Raises INVALID_ARGUMENT without one."""
    if id := getattr(request, field):
        return str(id)
    raise _missing(field)


def _missing(field: str) -> PenstockError:
    message = f"Missing required parameter: '{field}'."
    return invalid(message, field, stage="gateway", reason="missing_required_parameter")


class Call:
    """What such a request needs to be done."""

    def __init__(
        self, gateway: Gateway, id: str, principal: Principal, request: Any, place: Place
    ) -> None:
        self.gateway = gateway
        self.principal = principal
        self.tenant = principal.tenant
        self.caller = principal.caller(id)
        self.request = request
        self.hold = place.hold

    def id(self, field: str) -> str:
        return id_of(self.request, field)


def look_of(
    request: type[Message],
    does: Callable[[Call], Awaitable[Fields]],
    reply: type[Message],
    enter: Any,
) -> Look:
    async def look(
        gateway: Gateway,
        context: object,
        id: str,
        principal: Principal,
        request: Any,
        place: Place,
    ) -> Message:
        fields = await does(Call(gateway, id, principal, request, place))
        return await told_aside(reply, fields)

    return Look(request, look, reply, enter)


# ---- files --------------------------------------------------------------------------------------


async def _list_files(call: Call) -> Fields:
    query = validated(FileList, fields_of(call.request))
    return await files.list_files(call.gateway, call.tenant, query)


async def _get_file(call: Call) -> Fields:
    return (await call.gateway.files.get(call.tenant, call.id("file_id"))).as_json()


async def _delete_file(call: Call) -> Fields:
    return await files.delete_file(call.gateway, call.caller, call.id("file_id"))


# ---- vector stores ------------------------------------------------------------------------------


async def _create_store(call: Call) -> Fields:
    body = validated(CreateStore, fields_of(call.request))
    return await vector_stores.create_store(call.gateway, call.principal, call.caller, body)


async def _list_stores(call: Call) -> Fields:
    query = validated(StorePage, fields_of(call.request))
    return await vector_stores.list_stores(call.gateway, call.tenant, query)


async def _get_store(call: Call) -> Fields:
    return await vector_stores.get_store(call.gateway, call.tenant, call.id("vector_store_id"))


async def _update_store(call: Call) -> Fields:
    """What the mask names and is not set is taken back."""
    store, named = call.id("vector_store_id"), list(call.request.update_mask.paths)
    if not named:
        raise _missing("update_mask")
    said = fields_of(call.request, "vector_store_id", "update_mask")
    for field in said.keys() - set(named):
        raise invalid(f"'{field}' is not in 'update_mask'.", field, stage="gateway")
    body = validated(AboutStore, {field: said.get(field) for field in named})
    return await vector_stores.update_store(call.gateway, call.principal, store, body)


async def _delete_store(call: Call) -> Fields:
    return await vector_stores.delete_store(call.gateway, call.caller, call.id("vector_store_id"))


async def _reindex_store(call: Call) -> Fields:
    id = call.id("vector_store_id")
    return await vector_stores.reindex_store(call.gateway, call.principal, id)


async def _cancel_reindexing(call: Call) -> Fields:
    store = call.id("vector_store_id")
    return await vector_stores.cancel_reindexing(call.gateway, call.tenant, store)


async def _attach_file(call: Call) -> Fields:
    store = call.id("vector_store_id")
    body = validated(AttachFile, fields_of(call.request, "vector_store_id"))
    return await vector_stores.attach_file(call.gateway, call.principal, call.caller, store, body)


async def _list_attached(call: Call) -> Fields:
    store = call.id("vector_store_id")
    query = validated(AttachedList, fields_of(call.request, "vector_store_id"))
    return await vector_stores.list_attached(call.gateway, call.tenant, store, query)


async def _get_attached(call: Call) -> Fields:
    store, file = call.id("vector_store_id"), call.id("file_id")
    return await vector_stores.get_attached(call.gateway, call.tenant, store, file)


async def _update_attached(call: Call) -> Fields:
    store, file = call.id("vector_store_id"), call.id("file_id")
    fields = {"attributes": None, **fields_of(call.request, "vector_store_id", "file_id")}
    body = validated(UpdateFile, fields)
    return await vector_stores.update_attached(call.gateway, call.caller, store, file, body)


async def _detach_file(call: Call) -> Fields:
    store, file = call.id("vector_store_id"), call.id("file_id")
    return await vector_stores.detach_file(call.gateway, call.caller, store, file)


async def _create_file_batch(call: Call) -> Fields:
    store = call.id("vector_store_id")
    body = validated(CreateFileBatch, fields_of(call.request, "vector_store_id"))
    return await file_batches.create_file_batch(
        call.gateway, call.principal, call.caller, store, body
    )


async def _get_file_batch(call: Call) -> Fields:
    store, batch = call.id("vector_store_id"), call.id("batch_id")
    return await file_batches.get_file_batch(call.gateway, call.tenant, store, batch)


async def _cancel_file_batch(call: Call) -> Fields:
    store, batch = call.id("vector_store_id"), call.id("batch_id")
    return await file_batches.cancel_file_batch(call.gateway, call.caller, store, batch)


async def _list_file_batch(call: Call) -> Fields:
    store, batch = call.id("vector_store_id"), call.id("batch_id")
    query = validated(AttachedList, fields_of(call.request, "vector_store_id", "batch_id"))
    return await file_batches.list_batch(call.gateway, call.tenant, store, batch, query)


# ---- batches ------------------------------------------------------------------------------------


async def _create_batch(call: Call) -> Fields:
    require_files(call.principal)
    body = validated(CreateBatch, fields_of(call.request))
    return await batches.create_batch(call.gateway, call.principal, body)


async def _list_batches(call: Call) -> Fields:
    query = validated(PageQuery, fields_of(call.request))
    return await batches.list_batches(call.gateway, call.tenant, query)


async def _get_batch(call: Call) -> Fields:
    return await batches.get_batch(call.gateway, call.tenant, call.id("batch_id"))


async def _cancel_batch(call: Call) -> Fields:
    return await batches.cancel_batch(call.gateway, call.tenant, call.id("batch_id"))


_SLOT, _VISIT = Intake.slot, Intake.visit
_PAGE, _FILES = pb.ListVectorStoresReply, pb.ListAttachedFilesReply
KEPT = {
    "ListFiles": look_of(pb.ListFilesRequest, _list_files, pb.ListFilesReply, _VISIT),
    "GetFile": look_of(pb.GetFileRequest, _get_file, pb.File, _VISIT),
    "DeleteFile": look_of(pb.DeleteFileRequest, _delete_file, pb.Deleted, _SLOT),
    "CreateVectorStore": look_of(pb.CreateVectorStoreRequest, _create_store, pb.VectorStore, _SLOT),
    "ListVectorStores": look_of(pb.ListVectorStoresRequest, _list_stores, _PAGE, _VISIT),
    "GetVectorStore": look_of(pb.GetVectorStoreRequest, _get_store, pb.VectorStore, _VISIT),
    "UpdateVectorStore": look_of(pb.UpdateVectorStoreRequest, _update_store, pb.VectorStore, _SLOT),
    "DeleteVectorStore": look_of(pb.DeleteVectorStoreRequest, _delete_store, pb.Deleted, _SLOT),
    "ReindexVectorStore": look_of(
        pb.ReindexVectorStoreRequest, _reindex_store, pb.VectorStore, _SLOT
    ),
    "CancelReindexing": look_of(
        pb.CancelReindexingRequest, _cancel_reindexing, pb.VectorStore, _SLOT
    ),
    "AttachFile": look_of(pb.AttachFileRequest, _attach_file, pb.VectorStoreFile, _SLOT),
    "ListAttachedFiles": look_of(pb.ListAttachedFilesRequest, _list_attached, _FILES, _VISIT),
    "GetAttachedFile": look_of(
        pb.GetAttachedFileRequest, _get_attached, pb.VectorStoreFile, _VISIT
    ),
    "UpdateAttachedFile": look_of(
        pb.UpdateAttachedFileRequest, _update_attached, pb.VectorStoreFile, _SLOT
    ),
    "CreateFileBatch": look_of(pb.CreateFileBatchRequest, _create_file_batch, pb.FileBatch, _SLOT),
    "GetFileBatch": look_of(pb.GetFileBatchRequest, _get_file_batch, pb.FileBatch, _VISIT),
    "CancelFileBatch": look_of(pb.CancelFileBatchRequest, _cancel_file_batch, pb.FileBatch, _SLOT),
    "ListFileBatch": look_of(pb.ListFileBatchRequest, _list_file_batch, _FILES, _VISIT),
    "DetachFile": look_of(pb.DetachFileRequest, _detach_file, pb.Deleted, _SLOT),
    "CreateBatch": look_of(pb.CreateBatchRequest, _create_batch, pb.Batch, _SLOT),
    "ListBatches": look_of(pb.ListBatchesRequest, _list_batches, pb.ListBatchesReply, _VISIT),
    "GetBatch": look_of(pb.GetBatchRequest, _get_batch, pb.Batch, _VISIT),
    "CancelBatch": look_of(pb.CancelBatchRequest, _cancel_batch, pb.Batch, _SLOT),
}
