"""The HTTP interface: every path, its methods, and who answers them."""

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from importlib import metadata
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.errors import PenstockError
from services.common.redis import RedisAway
from services.gateway.api.openapi.operations.table import OPERATIONS
from services.gateway.api.openapi.page import get_asset, get_document, get_page
from services.gateway.api.rest import (
    batches,
    conversations,
    files,
    responses,
    stored_chats,
    uploads,
    vector_stores,
)
from services.gateway.api.rest.anthropic_format import error_body as anthropics_error
from services.gateway.api.rest.generation import chat_completions, completions
from services.gateway.api.rest.http import Endpoint, Exchange, Handler, error_body
from services.gateway.api.rest.lasting import refuse_key
from services.gateway.api.rest.messages import create_message
from services.gateway.api.rest.moderations import create_moderation
from services.gateway.api.rest.not_offered import SHADOWED, no_such_path
from services.gateway.api.rest.pooled import classify, embeddings, rerank, score
from services.gateway.api.rest.queries import refuse_query, refuse_twice
from services.gateway.api.rest.tokens import count_input, count_tokens, detokenize, tokenize
from services.gateway.identity.permissions import NEEDS, admit
from services.gateway.identity.principal import Principal
from services.gateway.ids import REQUEST, not_found
from services.gateway.metering.refusals import EXPOSED
from services.gateway.models import model_not_found
from services.gateway.parts import Gateway
from services.gateway.stores.vector_stores.vector_stores import storage_away

_LABORIOUS = frozenset({"GET /v1/vector_stores/{store}/files/{file}/content"})
"""Looks at things that are work: a document is read anew."""

Plain = Callable[[Gateway, Exchange], Awaitable[None]]
Signed = Callable[[Gateway, Exchange, Principal], Awaitable[None]]


class _Router(Router):
    """Starlette's. A path without parameters goes to its endpoint at once: each answer would be
    within three coroutines of the router as long as it takes."""

    def __init__(self, endpoints: Sequence[Endpoint], otherwise: ASGIApp) -> None:
        routes = [Route(endpoint.route, endpoint) for endpoint in endpoints]
        super().__init__(routes, default=otherwise, redirect_slashes=False)
        named: dict[str, ASGIApp] = {e.route: e for e in endpoints if "{" not in e.route}
        self._named = named | dict.fromkeys(SHADOWED, otherwise)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        endpoint = self._named.get(scope["path"]) if scope["type"] == "http" else None
        if endpoint is None:
            return super().__call__(scope, receive, send)
        return endpoint(scope, receive, send)  # type: ignore[return-value]


def application(gateway: Gateway) -> ASGIApp:
    """The ASGI application."""

    def plain(handler: Plain) -> Handler:
        """Needs no API key, or asks for it by itself: a generation does, inside its trace."""

        def run(exchange: Exchange) -> Awaitable[None]:
            refuse_undescribed(exchange)
            return handler(gateway, exchange)

        return run

    def signed(handler: Signed) -> Handler:
        """Behind an API key."""

        async def run(exchange: Exchange) -> None:
            principal = await gateway.auth.identify(exchange.authorization)
            admit(principal, exchange.endpoint)
            refuse_undescribed(exchange)
            is_look = exchange.method == "GET" and exchange.endpoint not in _LABORIOUS
            enter = gateway.intake.visit if is_look else gateway.intake.slot
            try:
                with enter(principal.tenant) as exchange.place:
                    await handler(gateway, exchange, principal)
            except RedisAway:
                raise storage_away() from None

        return run

    table: dict[str, dict[str, Handler]] = {
        "/v1/chat/completions": {
            "GET": signed(stored_chats.list_chats),
            "POST": plain(chat_completions),
        },
        "/v1/chat/completions/{completion}": {
            "GET": signed(stored_chats.get_chat),
            "POST": signed(stored_chats.update_chat),
            "DELETE": signed(stored_chats.delete_chat),
        },
        "/v1/chat/completions/{completion}/messages": {
            "GET": signed(stored_chats.list_messages),
        },
        "/v1/completions": {"POST": plain(completions)},
        "/v1/responses": {"POST": plain(responses.create_response)},
        "/v1/responses/input_tokens": {"POST": plain(count_input)},
        "/v1/responses/{response}": {
            "GET": signed(responses.get_response),
            "DELETE": signed(responses.delete_response),
        },
        "/v1/responses/{response}/cancel": {"POST": signed(responses.cancel_response)},
        "/v1/responses/{response}/input_items": {"GET": signed(responses.list_input_items)},
        "/v1/conversations": {"POST": signed(conversations.create_conversation)},
        "/v1/conversations/{conversation}": {
            "GET": signed(conversations.get_conversation),
            "POST": signed(conversations.update_conversation),
            "DELETE": signed(conversations.delete_conversation),
        },
        "/v1/conversations/{conversation}/items": {
            "GET": signed(conversations.list_items),
            "POST": signed(conversations.add_items),
        },
        "/v1/conversations/{conversation}/items/{item}": {
            "GET": signed(conversations.get_item),
            "DELETE": signed(conversations.delete_item),
        },
        "/v1/messages": {"POST": plain(create_message)},
        "/v1/messages/count_tokens": {"POST": plain(count_tokens)},
        "/tokenize": {"POST": plain(tokenize)},
        "/detokenize": {"POST": plain(detokenize)},
        "/v1/embeddings": {"POST": plain(embeddings)},
        "/v1/score": {"POST": plain(score)},
        "/v1/rerank": {"POST": plain(rerank)},
        "/v2/rerank": {"POST": plain(rerank)},
        "/v1/classify": {"POST": plain(classify)},
        "/v1/moderations": {"POST": plain(create_moderation)},
        "/v1/models": {"GET": signed(list_models)},
        "/v1/models/{model:path}": {"GET": signed(get_model)},
        "/v1/requests/{request}": {"GET": signed(get_request)},
        "/v1/files": {"GET": signed(files.list_files), "POST": signed(files.create_file)},
        "/v1/files/{file}": {
            "GET": signed(files.get_file),
            "DELETE": signed(files.delete_file),
        },
        "/v1/files/{file}/content": {"GET": signed(files.get_content)},
        "/v1/uploads": {"POST": signed(uploads.create_upload)},
        "/v1/uploads/{upload}/parts": {"POST": signed(uploads.add_part)},
        "/v1/uploads/{upload}/complete": {"POST": signed(uploads.complete_upload)},
        "/v1/uploads/{upload}/cancel": {"POST": signed(uploads.cancel_upload)},
        "/v1/vector_stores": {
            "GET": signed(vector_stores.list_stores),
            "POST": signed(vector_stores.create_store),
        },
        "/v1/vector_stores/{store}": {
            "GET": signed(vector_stores.get_store),
            "POST": signed(vector_stores.update_store),
            "DELETE": signed(vector_stores.delete_store),
        },
        "/v1/vector_stores/{store}/search": {"POST": signed(vector_stores.search_store)},
        "/v1/vector_stores/{store}/reindexing": {"POST": signed(vector_stores.reindex_store)},
        "/v1/vector_stores/{store}/reindexing/cancel": {
            "POST": signed(vector_stores.cancel_reindexing)
        },
        "/v1/vector_stores/{store}/files": {
            "GET": signed(vector_stores.list_attached),
            "POST": signed(vector_stores.attach_file),
        },
        "/v1/vector_stores/{store}/files/{file}": {
            "GET": signed(vector_stores.get_attached),
            "POST": signed(vector_stores.update_attached),
            "DELETE": signed(vector_stores.detach_file),
        },
        "/v1/vector_stores/{store}/files/{file}/content": {"GET": signed(vector_stores.get_text)},
        "/v1/vector_stores/{store}/file_batches": {"POST": signed(vector_stores.create_batch)},
        "/v1/vector_stores/{store}/file_batches/{file_batch}": {
            "GET": signed(vector_stores.get_batch)
        },
        "/v1/vector_stores/{store}/file_batches/{file_batch}/cancel": {
            "POST": signed(vector_stores.cancel_batch)
        },
        "/v1/vector_stores/{store}/file_batches/{file_batch}/files": {
            "GET": signed(vector_stores.list_batch)
        },
        "/v1/batches": {"GET": signed(batches.list_batches), "POST": signed(batches.create_batch)},
        "/v1/batches/{batch}": {"GET": signed(batches.get_batch)},
        "/v1/batches/{batch}/cancel": {"POST": signed(batches.cancel_batch)},
        "/healthz": {"GET": plain(healthz)},
        "/readyz": {"GET": plain(readyz)},
        "/health": {"GET": plain(readyz)},  # what other servers call it
        "/version": {"GET": plain(version)},
        "/openapi.json": {"GET": plain(get_document)},
        "/docs": {"GET": plain(get_page)},
        "/docs/{asset}": {"GET": plain(get_asset)},
    }
    own = gateway.settings.gateway
    endpoints = {f"{method} {path}" for path, methods in table.items() for method in methods}
    if unlisted := endpoints - NEEDS.keys():
        raise RuntimeError(f"permissions.py does not say what these need: {', '.join(unlisted)}")
    if undescribed := endpoints ^ OPERATIONS.keys():
        told = ", ".join(undescribed)
        raise RuntimeError(f"openapi/operations describes something else than these: {told}")
    of_paths = [
        Endpoint(path, methods, own, told_as=_told_as(path)) for path, methods in table.items()
    ]

    async def otherwise(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":  # nothing else is spoken here
            told_as = _told_as(scope["path"])
            unknown = Endpoint("unknown", {}, own, plain(no_such_path), told_as)
            await unknown(scope, receive, send)

    router = _Router(of_paths, otherwise)
    if not own.cors_origins:
        return router
    return CORSMiddleware(
        router,
        allow_origins=own.cors_origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),  # browsers' OpenAI clients send a dozen of their own
        expose_headers=("x-request-id", "retry-after", "openai-poll-after-ms", *EXPOSED),
    )


def _told_as(path: str) -> Callable[[PenstockError], dict[str, Any]]:
    """How failures are told."""
    return anthropics_error if f"{path}/".startswith("/v1/messages/") else error_body


def refuse_undescribed(exchange: Exchange) -> None:
    """A query or a key where there is none to be, or a parameter twice; what else a request holds
    is its handler's to read. Raises INVALID_ARGUMENT that names the parameter."""
    refuse_twice(exchange.query)
    operation = OPERATIONS.get(exchange.endpoint)
    if operation is None:
        return
    if operation.query is None:
        refuse_query(exchange.query)
    if not operation.lasting:
        refuse_key(exchange.headers)


async def list_models(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    await exchange.reply_json({"object": "list", "data": await _models(gateway, principal)})


async def get_model(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    name = exchange.path["model"]
    for model in await _models(gateway, principal):
        if model["id"] == name:
            return await exchange.reply_json(model)
    raise model_not_found(name)


async def _models(gateway: Gateway, principal: Principal) -> list[dict[str, Any]]:
    """Those that the key may use; `context_window` (tokens), `sampling`, its checkpoint's
    defaults, and `parent`, whose adapter it is, are additions to OpenAI's."""
    models = [
        {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "penstock",
            "context_window": model.window,
            "sampling": dict(model.sampling),
            **({"parent": model.parent} if model.parent else {}),
        }
        for model in await gateway.models.all()
    ]
    if embedding := gateway.retrieval.embedding_model:
        models.append({"id": embedding, "object": "model", "created": 0, "owned_by": "penstock"})
    return [m for m in models if principal.covers(str(m["id"]))]


async def get_request(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    """The record of one of the tenant's last requests, whichever gateway served it."""
    id = REQUEST.checked(exchange.path["request"])
    journal = await gateway.records.look_up(id, principal.tenant)
    if journal is None:
        raise not_found("request", id)
    await exchange.reply_json(journal.as_json())


async def healthz(gateway: Gateway, exchange: Exchange) -> None:
    """The process and its event loop live."""
    await exchange.reply_json({"status": "ok"})


async def readyz(gateway: Gateway, exchange: Exchange) -> None:
    """Whether a request sent here now has a way; names what is missing.

    While Redis is away, requests of known keys have one: not a 503, which would turn them away too.
    """
    missing, limited = [], []
    if gateway.intake.leaving:
        missing.append("this gateway is shutting down")
    if not gateway.tokenizers.ready():
        missing.append("no tokenizer is linked")
    if not gateway.tokenizers.redis_reachable:
        if gateway.auth.knows_keys:
            limited.append("Redis is away: only known keys, no files, no vector stores")
        else:
            missing.append("Redis is away and no API key is known")
    status = "unavailable" if missing else "degraded" if limited else "ok"
    body = {"status": status, "missing": [*missing, *limited]}
    await exchange.reply_json(body, 503 if missing else 200)


async def version(gateway: Gateway, exchange: Exchange) -> None:
    await exchange.reply_json({"version": metadata.version("penstock")})
