"""Batches of files that go into a vector store by one call."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from protos.common_pb2 import Caller
from services.gateway.api.generation_schema import Name
from services.gateway.api.resources.attachments import (
    MAX_FILES,
    ChunkingStrategy,
    FileAbout,
    attach,
    chunking_of,
    each_once,
)
from services.gateway.api.resources.attributes import Attributes
from services.gateway.api.resources.vector_stores import AttachedList, list_attached
from services.gateway.api.schema import Body, missing, refuse
from services.gateway.identity.principal import Principal
from services.gateway.parts import Gateway


class CreateFileBatch(Body):
    """Files by their ids, with what is said of all of them; or each with its own."""

    file_ids: Annotated[list[Name], Field(min_length=1, max_length=MAX_FILES)] | None = None
    files: Annotated[list[FileAbout], Field(min_length=1, max_length=MAX_FILES)] | None = None
    attributes: Attributes | None = None
    chunking_strategy: ChunkingStrategy | None = None

    @model_validator(mode="after")
    def _one_way(self) -> "CreateFileBatch":
        if self.files is None and self.file_ids is None:
            raise missing("file_ids")
        if self.files is None:
            return self
        if self.file_ids is not None:
            raise refuse("files", "goes with no 'file_ids'")
        for field in ("attributes", "chunking_strategy"):
            if getattr(self, field) is not None:
                raise refuse(field, "goes with 'file_ids': each of 'files' has its own")
        first: dict[str, int] = {}
        for index, one in enumerate(self.files):
            if first.setdefault(one.file_id, index) != index:
                message = f"is the same file as 'files[{first[one.file_id]}]'"
                raise refuse(f"files[{index}].file_id", message)
        return self


async def create_file_batch(
    gateway: Gateway, principal: Principal, caller: Caller, store: str, body: CreateFileBatch
) -> dict[str, Any]:
    model = await gateway.stores.records.embedding_model(caller.tenant, store)
    if body.files is not None:
        files = [attach(gateway, one, f"files[{n}].", model) for n, one in enumerate(body.files)]
    else:
        chunking = chunking_of(gateway, body.chunking_strategy, model=model)
        files = each_once(body.file_ids or (), body.attributes, chunking)
    batch = await gateway.stores.attach_all(principal, caller, store, files)
    return await get_file_batch(gateway, caller.tenant, store, batch.id)


async def get_file_batch(gateway: Gateway, tenant: str, store: str, batch: str) -> dict[str, Any]:
    record, facts = await gateway.stores.records.batch(tenant, store, batch)
    return record.as_json(facts)


async def cancel_file_batch(
    gateway: Gateway, caller: Caller, store: str, batch: str
) -> dict[str, Any]:
    """What has arrived stays."""
    await gateway.stores.cancel_batch(caller, store, batch)
    return await get_file_batch(gateway, caller.tenant, store, batch)


async def list_batch(
    gateway: Gateway, tenant: str, store: str, batch: str, query: AttachedList
) -> dict[str, Any]:
    """Its files that are in the store by it still."""
    await gateway.stores.records.batch(tenant, store, batch)
    return await list_attached(gateway, tenant, store, query, batch)
