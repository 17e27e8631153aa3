"""The table of permissions is whole, and what it says is held, for REST and gRPC."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
from starlette.routing import Router

from services.gateway.api.grpc import conversations, lasting, uploads
from services.gateway.api.grpc.calls import SERVICES
from services.gateway.api.grpc.kept import KEPT
from services.gateway.api.grpc.looking import LOOKING
from services.gateway.api.grpc.services import services
from services.gateway.api.rest.routes import application
from services.gateway.identity.permissions import NEEDS
from services.gateway.identity.principal import Permission, Principal
from services.gateway.intake import Intake
from tests.support.gateway_parts import MODEL, gateway_parts


@pytest.fixture
async def parts() -> AsyncIterator[Any]:
    with gateway_parts() as parts:
        yield parts


def rest(parts: Any) -> set[str]:
    router = application(parts)
    assert isinstance(router, Router)
    return {
        f"{method} {route.path}"  # type: ignore[attr-defined]
        for route in router.routes
        for method in route.endpoint._handlers  # type: ignore[attr-defined]
    }


def rpcs(parts: Any) -> dict[str, Any]:
    """The handlers, by their methods."""
    return {
        path: one for service in services(parts) for path, one in service._method_handlers.items()
    }


def held() -> dict[str, Permission]:
    return {endpoint: needed for endpoint, needed in NEEDS.items() if needed is not None}


def test_each_endpoint_is_in_the_table_and_nothing_else_is(parts):
    public = {endpoint for endpoint in NEEDS if "/admin/" not in endpoint}
    assert rest(parts) | rpcs(parts).keys() == public


_FILE_BATCH = "/v1/vector_stores/{store}/file_batches/{file_batch}"
_CONVERSATION = "/v1/conversations/{conversation}"
TWINS = {
    "Inference/Chat": "POST /v1/chat/completions",
    "Inference/Complete": "POST /v1/completions",
    "Inference/Embed": "POST /v1/embeddings",
    "Inference/Score": "POST /v1/score",
    "Inference/Rerank": "POST /v1/rerank",
    "Inference/Classify": "POST /v1/classify",
    "Inference/Moderate": "POST /v1/moderations",
    "Inference/Tokenize": "POST /tokenize",
    "Inference/Detokenize": "POST /detokenize",
    "Inference/SearchStore": "POST /v1/vector_stores/{store}/search",
    "Inference/GetRecord": "GET /v1/requests/{request}",
    "Inference/ListModels": "GET /v1/models",
    "Runs/GetRun": "GET /v1/responses/{response}",
    "Runs/FollowRun": "GET /v1/chat/completions/{completion}",
    "Runs/CancelRun": "POST /v1/responses/{response}/cancel",
    "Runs/DeleteRun": "DELETE /v1/responses/{response}",
    "Files/UploadFile": "POST /v1/files",
    "Files/ListFiles": "GET /v1/files",
    "Files/GetFile": "GET /v1/files/{file}",
    "Files/GetFileContent": "GET /v1/files/{file}/content",
    "Files/DeleteFile": "DELETE /v1/files/{file}",
    "VectorStores/CreateVectorStore": "POST /v1/vector_stores",
    "VectorStores/ListVectorStores": "GET /v1/vector_stores",
    "VectorStores/GetVectorStore": "GET /v1/vector_stores/{store}",
    "VectorStores/UpdateVectorStore": "POST /v1/vector_stores/{store}",
    "VectorStores/DeleteVectorStore": "DELETE /v1/vector_stores/{store}",
    "VectorStores/ReindexVectorStore": "POST /v1/vector_stores/{store}/reindexing",
    "VectorStores/CancelReindexing": "POST /v1/vector_stores/{store}/reindexing/cancel",
    "VectorStores/AttachFile": "POST /v1/vector_stores/{store}/files",
    "VectorStores/ListAttachedFiles": "GET /v1/vector_stores/{store}/files",
    "VectorStores/GetAttachedFile": "GET /v1/vector_stores/{store}/files/{file}",
    "VectorStores/GetAttachedFileContent": "GET /v1/vector_stores/{store}/files/{file}/content",
    "VectorStores/UpdateAttachedFile": "POST /v1/vector_stores/{store}/files/{file}",
    "VectorStores/CreateFileBatch": "POST /v1/vector_stores/{store}/file_batches",
    "VectorStores/GetFileBatch": f"GET {_FILE_BATCH}",
    "VectorStores/CancelFileBatch": f"POST {_FILE_BATCH}/cancel",
    "VectorStores/ListFileBatch": f"GET {_FILE_BATCH}/files",
    "VectorStores/DetachFile": "DELETE /v1/vector_stores/{store}/files/{file}",
    "Uploads/CreateUpload": "POST /v1/uploads",
    "Uploads/AddUploadPart": "POST /v1/uploads/{upload}/parts",
    "Uploads/CompleteUpload": "POST /v1/uploads/{upload}/complete",
    "Uploads/CancelUpload": "POST /v1/uploads/{upload}/cancel",
    "Conversations/CreateConversation": "POST /v1/conversations",
    "Conversations/GetConversation": f"GET {_CONVERSATION}",
    "Conversations/UpdateConversation": f"POST {_CONVERSATION}",
    "Conversations/DeleteConversation": f"DELETE {_CONVERSATION}",
    "Conversations/AddConversationItems": f"POST {_CONVERSATION}/items",
    "Conversations/ListConversationItems": f"GET {_CONVERSATION}/items",
    "Conversations/GetConversationItem": f"GET {_CONVERSATION}/items/{{item}}",
    "Conversations/DeleteConversationItem": f"DELETE {_CONVERSATION}/items/{{item}}",
    "Batches/CreateBatch": "POST /v1/batches",
    "Batches/ListBatches": "GET /v1/batches",
    "Batches/GetBatch": "GET /v1/batches/{batch}",
    "Batches/CancelBatch": "POST /v1/batches/{batch}/cancel",
}
"""What is asked over gRPC, and what of REST is the same."""


def test_over_grpc_the_same_is_needed_as_over_rest():
    ours = {name for name in NEEDS if name.startswith("/")}
    assert ours == {f"/penstock.v1.{route}" for route in TWINS}
    assert {name.split("/")[1] for name in ours} == set(SERVICES)
    for route, path in TWINS.items():
        assert NEEDS[f"/penstock.v1.{route}"] is NEEDS[path], route


def test_over_grpc_the_same_takes_a_place_as_over_rest():
    """Looking at things stays possible on a gateway that is full or drains."""
    looks = {**LOOKING, **KEPT, **lasting.LOOKING, **uploads.KEPT, **conversations.KEPT}
    for route, path in TWINS.items():
        if one := looks.get(route.partition("/")[2]):
            visits = path.startswith("GET ")
            assert one.enter is (Intake.visit if visits else Intake.slot), route


def test_each_permission_is_for_something():
    besides = {Permission.ADMIN_KEYS_WRITE}  # for what is an administrator's own
    assert set(Permission) == {needed for needed in NEEDS.values() if needed} | besides


def test_what_asks_nobody_is_known(parts):
    open_ones = {endpoint.partition(" ")[2] for endpoint, needed in NEEDS.items() if not needed}
    health = {"/healthz", "/readyz", "/health", "/version", "/admin/healthz"}
    assert open_ones == health | {"/openapi.json", "/docs", "/docs/{asset}"}


def without(needed: Permission) -> Principal:
    return Principal("acme", "key_1", permissions=frozenset(Permission) - {needed})


@pytest.mark.parametrize("endpoint", [e for e in held() if " /v1/" in e])
async def test_a_key_without_the_permission_is_refused_over_rest(parts, endpoint):
    parts.auth.keys["Bearer k"] = without(NEEDS[endpoint])
    method, path = endpoint.split(" ")
    for name in ("{model:path}", "{request}", "{file}", "{store}"):
        path = path.replace(name, "x")
    transport = httpx.ASGITransport(application(parts))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        answer = await client.request(method, path, headers={"authorization": "Bearer k"})
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "permission_missing"
    assert NEEDS[endpoint] in answer.json()["error"]["message"]


class Aborted(Exception):
    pass


class Call:
    """A call that is refused before its message is read."""

    code: grpc.StatusCode | None = None

    def invocation_metadata(self) -> Any:
        return (("authorization", "Bearer k"),)

    def set_trailing_metadata(self, _: Any) -> None:
        pass

    async def abort(self, code: grpc.StatusCode, message: str, trailers: Any) -> None:
        self.code = code
        raise Aborted


@pytest.mark.parametrize("endpoint", [e for e in held() if e.startswith("/")])
async def test_a_key_without_the_permission_is_refused_over_grpc(parts, endpoint):
    parts.auth.keys["Bearer k"] = without(NEEDS[endpoint])
    handler = rpcs(parts)[endpoint]
    call = Call()
    with pytest.raises(Aborted):
        await (handler.stream_stream or handler.stream_unary)(None, call)
    assert call.code == grpc.StatusCode.PERMISSION_DENIED


async def test_who_may_not_search_stores_gets_nothing_of_them_by_a_chat(parts):
    parts.auth.keys["Bearer k"] = without(Permission.STORES_SEARCH)
    transport = httpx.ASGITransport(application(parts))
    search = {"type": "file_search", "vector_store_ids": ["vs_1"]}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "tools": [search]}
    client = httpx.AsyncClient(transport=transport, base_url="http://gateway")
    async with client, asyncio.timeout(20):
        answer = await client.post(
            "/v1/chat/completions", json=body, headers={"authorization": "Bearer k"}
        )
    assert (answer.status_code, parts.stores.asked) == (403, [])
    assert answer.json()["error"]["code"] == "permission_missing"
