"""Vector stores, and files in them."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from protos.common_pb2 import Caller
from services.gateway.api.generation_schema import Name, as_list
from services.gateway.api.resources.pages import PageQuery, page
from services.gateway.api.schema import Body, Metadata
from services.gateway.identity.principal import Principal
from services.gateway.parts import Gateway
from services.gateway.stores.searching import Search

_AUTO_CHUNKING = {"chunking_strategy": ({"type": "auto"},)}

# ---- stores -------------------------------------------------------------------------------------


class CreateStore(Body):
    NEUTRAL: ClassVar = {**_AUTO_CHUNKING, "expires_after": (), "description": ()}

    name: Annotated[str, Field(max_length=256)] | None = None
    file_ids: Annotated[list[Name], Field(max_length=100)] | None = None
    metadata: Metadata | None = None


async def create_store(
    gateway: Gateway, principal: Principal, caller: Caller, body: CreateStore
) -> dict[str, Any]:
    files = list(dict.fromkeys(body.file_ids or ()))
    return await gateway.stores.create(
        principal, caller, body.name or "", body.metadata or {}, files
    )


async def list_stores(gateway: Gateway, tenant: str, query: PageQuery) -> dict[str, Any]:
    listed = page(({"id": id} for id in await gateway.stores.ids(tenant)), query)
    shown = await gateway.stores.some(tenant, (one["id"] for one in listed["data"]))
    return {**listed, "data": shown}


async def delete_store(gateway: Gateway, caller: Caller, id: str) -> dict[str, Any]:
    await gateway.stores.delete(caller, id)
    return {"id": id, "object": "vector_store.deleted", "deleted": True}


# ---- files in a store ---------------------------------------------------------------------------


class AttachFile(Body):
    NEUTRAL: ClassVar = {**_AUTO_CHUNKING, "attributes": ({},)}

    file_id: Name


class AttachedList(PageQuery):
    filter: Literal["in_progress", "completed", "failed", "cancelled"] | None = None


async def attach_file(
    gateway: Gateway, principal: Principal, caller: Caller, store: str, body: AttachFile
) -> dict[str, Any]:
    attached = await gateway.stores.attach(principal, caller, store, body.file_id)
    return attached.as_json()


async def list_attached(
    gateway: Gateway, tenant: str, store: str, query: AttachedList
) -> dict[str, Any]:
    await gateway.stores.get(tenant, store)
    files = await gateway.stores.files(tenant, store)
    return page((f.as_json() for f in files if query.filter in (None, f.state)), query)


async def get_attached(gateway: Gateway, tenant: str, store: str, file: str) -> dict[str, Any]:
    return (await gateway.stores.file(tenant, store, file)).as_json()


async def detach_file(gateway: Gateway, caller: Caller, store: str, file: str) -> dict[str, Any]:
    await gateway.stores.detach(caller, store, file)
    return {"id": file, "object": "vector_store.file.deleted", "deleted": True}


# ---- search -------------------------------------------------------------------------------------


class RankingOptions(Body):
    NEUTRAL: ClassVar = {"ranker": ("none", "auto")}

    score_threshold: Annotated[float, Field(ge=0, le=1)] | None = None


_Question = Annotated[str, Field(pattern=r"\S")]
_Queries = Annotated[list[_Question], Field(min_length=1, max_length=1)]


class SearchStore(Body):
    NEUTRAL: ClassVar = {"filters": (), "rewrite_query": (False,)}

    query: Annotated[
        _Queries, BeforeValidator(as_list, json_schema_input_type=_Question | _Queries)
    ]
    max_num_results: Annotated[int, Field(ge=1, le=50)] | None = None
    ranking_options: RankingOptions | None = None

    def search(self, store: str) -> Search:
        options = self.ranking_options
        threshold = options.score_threshold if options else None
        return Search(store, self.query[0], self.max_num_results or 10, threshold or 0.0)
