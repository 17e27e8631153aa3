"""Vector stores, and files in them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from protos.common_pb2 import Caller
from services.common.errors import PenstockError
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
from services.gateway.api.resources.pages import StorePage, page_of
from services.gateway.api.schema import Body, Metadata, bad_value, refuse
from services.gateway.identity.principal import Principal
from services.gateway.intake import Place
from services.gateway.parts import Gateway
from services.gateway.stores.vector_stores.store_record import Store, StoreCache, StoreRecord

_DAYS = Field(ge=1, le=365)
_DAY_S = 86_400

# ---- stores -------------------------------------------------------------------------------------


class ExpiresAfter(Body):
    anchor: Literal["last_active_at"]
    days: Annotated[int, _DAYS]


class Cache(Body):
    """Which earlier searches do for one of this store, where it is not as the operator has set."""

    max_age_s: Annotated[float, Field(ge=0, le=_DAY_S)] | None = Field(
        None, description="0: none; a change of the store ends them at once, whatever this says"
    )
    similar_at_least: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="cosine with another query; 0: none but of the same query"
    )


class AboutStore(Body):
    """What may be said of a store again. What is null is taken back."""

    name: Annotated[str, Field(max_length=256)] | None = None
    metadata: Metadata | None = None
    expires_after: ExpiresAfter | None = None
    cache: Cache | None = Field(None, description="extension")
    embedding_model: Name | None = Field(
        None, description="extension: that files are indexed with; null: the installation's"
    )

    def edit(self, record: StoreRecord) -> StoreRecord:
        days = self.expires_after.days if self.expires_after is not None else None
        told = {
            "name": self.name or "",
            "metadata": self.metadata or {},
            "expires_after": days,
            "cache": StoreCache(**self.cache.model_dump()) if self.cache is not None else None,
            "embedding_model": self.embedding_model or "",
        }
        said = {name: told[name] for name in told.keys() & self.model_fields_set}
        if "expires_after" in said:
            said["expires_days"] = said.pop("expires_after")
        return record.model_copy(update=said)


class CreateStore(AboutStore):
    description: Annotated[str, Field(max_length=512)] | None = None
    file_ids: Annotated[list[Name], Field(max_length=MAX_FILES)] | None = None
    chunking_strategy: ChunkingStrategy | None = None

    @model_validator(mode="after")
    def _cuts_something(self) -> "CreateStore":
        strategy = self.chunking_strategy
        if strategy is not None and strategy.type != "auto" and not self.file_ids:
            why = "goes with 'file_ids': files that are attached later are cut as their calls say"
            raise refuse("chunking_strategy", why)
        return self

    def edit(self, record: StoreRecord) -> StoreRecord:
        return super().edit(record.model_copy(update={"description": self.description or ""}))


async def create_store(
    gateway: Gateway, principal: Principal, caller: Caller, body: CreateStore
) -> dict[str, Any]:
    await _check_model(gateway, principal, body)
    chunking = chunking_of(gateway, body.chunking_strategy, model=body.embedding_model or "")
    files = each_once(body.file_ids or (), chunking=chunking)
    return _told(gateway, await gateway.stores.create(principal, caller, body.edit, files))


async def update_store(
    gateway: Gateway, principal: Principal, id: str, body: AboutStore
) -> dict[str, Any]:
    await _check_model(gateway, principal, body)
    if body.embedding_model is None and "embedding_model" in body.model_fields_set:
        principal.authorize_embedding(await gateway.retrieval.model())
    return _told(gateway, await gateway.stores.update(principal.tenant, id, body.edit))


async def _check_model(gateway: Gateway, principal: Principal, body: AboutStore) -> None:
    """Raises PERMISSION_DENIED, INVALID_ARGUMENT for one that is not there."""
    if (named := body.embedding_model) is None:
        return
    principal.authorize_embedding(named)
    await gateway.retrieval.model()
    if not gateway.retrieval.has(named):
        there = sorted(filter(None, gateway.retrieval.fingerprints))
        there = [f"'{name}'" for name in there if principal.covers(name)]
        raise bad_value("embedding_model", f"there is no '{named}', but {', '.join(there)}")


async def list_stores(gateway: Gateway, tenant: str, query: StorePage) -> dict[str, Any]:
    async def look(ids: Sequence[str]) -> list[dict[str, Any]]:
        return [_told(gateway, store) for store in await gateway.stores.records.some(tenant, ids)]

    return await page_of(await gateway.stores.records.ids(tenant), query, look)


async def get_store(gateway: Gateway, tenant: str, id: str) -> dict[str, Any]:
    return _told(gateway, await gateway.stores.records.store(tenant, id))


async def reindex_store(gateway: Gateway, principal: Principal, id: str) -> dict[str, Any]:
    """Begins, also where it was cancelled, unless it is under way or nothing is to be done. Raises
    PERMISSION_DENIED to who may not use the store's embedding model."""
    tenant = principal.tenant
    model = (await gateway.stores.records.store(tenant, id)).record.embedding_model
    principal.authorize_embedding(model or await gateway.retrieval.model())
    await gateway.stores.reindexing.begin(tenant, id, asked=True)
    return await get_store(gateway, tenant, id)


async def cancel_reindexing(gateway: Gateway, tenant: str, id: str) -> dict[str, Any]:
    await gateway.stores.reindexing.cancel(tenant, id)
    return await get_store(gateway, tenant, id)


def _told(gateway: Gateway, store: Store) -> dict[str, Any]:
    retrieval, named = gateway.retrieval, store.record.embedding_model
    embedder = retrieval.fingerprints.get(named, "")
    return store.as_json(named or retrieval.embedding_model, embedder)


async def delete_store(gateway: Gateway, caller: Caller, id: str) -> dict[str, Any]:
    await gateway.stores.delete(caller, id)
    return {"id": id, "object": "vector_store.deleted", "deleted": True}


# ---- files in a store ---------------------------------------------------------------------------


class AttachFile(FileAbout):
    pass


class UpdateFile(Body):
    attributes: Attributes | None


class AttachedList(StorePage):
    filter: Literal["in_progress", "completed", "failed", "cancelled"] | None = None


async def attach_file(
    gateway: Gateway, principal: Principal, caller: Caller, store: str, body: AttachFile
) -> dict[str, Any]:
    model = await gateway.stores.records.embedding_model(caller.tenant, store)
    one = attach(gateway, body, model=model)
    return (await gateway.stores.attach(principal, caller, store, one)).as_json()


async def list_attached(
    gateway: Gateway, tenant: str, store: str, query: AttachedList, batch: str = ""
) -> dict[str, Any]:
    """`batch`: of those the ones that it attached."""
    records = gateway.stores.records

    async def look(ids: Sequence[str]) -> list[dict[str, Any]]:
        files = await records.files(tenant, store, ids)
        return [
            file.as_json()
            for file in files
            if query.filter in (None, file.state) and batch in ("", file.batch)
        ]

    await records.store(tenant, store)
    return await page_of(await records.file_ids(tenant, store), query, look)


async def get_attached(gateway: Gateway, tenant: str, store: str, file: str) -> dict[str, Any]:
    return (await gateway.stores.records.file(tenant, store, file)).as_json()


async def update_attached(
    gateway: Gateway, caller: Caller, store: str, file: str, body: UpdateFile
) -> dict[str, Any]:
    await gateway.stores.require_usable(caller.tenant, store)
    changes = gateway.stores.attributes
    return (await changes.change(caller, store, file, body.attributes or {})).as_json()


async def detach_file(gateway: Gateway, caller: Caller, store: str, file: str) -> dict[str, Any]:
    await gateway.stores.detach(caller, store, file)
    return {"id": file, "object": "vector_store.file.deleted", "deleted": True}


async def text_of(gateway: Gateway, caller: Caller, store: str, file: str, place: Place) -> str:
    """What is read of it to be indexed, which the place holds."""
    attached = await gateway.stores.records.file(caller.tenant, store, file)
    try:
        return await gateway.stores.indexing.searchable.text_of(caller, attached, place.hold)
    except PenstockError as error:
        if error.param in ("file", "blob"):
            error.param = "file_id"
        raise
