"""/v1/vector_stores, as OpenAI has them."""

from typing import Any

from services.gateway.api.resources import file_batches, vector_stores
from services.gateway.api.resources.file_batches import CreateFileBatch
from services.gateway.api.resources.pages import StorePage
from services.gateway.api.resources.store_search import SearchStore
from services.gateway.api.resources.vector_stores import (
    AboutStore,
    AttachedList,
    AttachFile,
    CreateStore,
    UpdateFile,
)
from services.gateway.api.rest.http import Exchange
from services.gateway.api.rest.openai_format import priced
from services.gateway.api.rest.queries import page_query
from services.gateway.api.schema import parse_body
from services.gateway.identity.principal import Principal
from services.gateway.parts import Gateway
from services.gateway.runs.citations import filename, place
from services.gateway.stores.retrieval.searching import search
from services.gateway.stores.vector_stores.store_files import told_attributes

_POLL = {"openai-poll-after-ms": "100"}  # what OpenAI's client waits between two looks


async def create_store(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    body = await parse_body(CreateStore, await exchange.json_body())
    caller = principal.caller(exchange.request_id)
    await exchange.reply_json(await vector_stores.create_store(gateway, principal, caller, body))


async def list_stores(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    query = page_query(exchange.query, StorePage)
    await exchange.reply_json(await vector_stores.list_stores(gateway, principal.tenant, query))


async def get_store(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    told = await vector_stores.get_store(gateway, principal.tenant, exchange.path["store"])
    await exchange.reply_json(told)


async def update_store(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    body = await parse_body(AboutStore, await exchange.json_body())
    store = exchange.path["store"]
    told = await vector_stores.update_store(gateway, principal, store, body)
    await exchange.reply_json(told)


async def delete_store(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    caller, store = principal.caller(exchange.request_id), exchange.path["store"]
    await exchange.reply_json(await vector_stores.delete_store(gateway, caller, store))


async def reindex_store(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    store = exchange.path["store"]
    await exchange.reply_json(await vector_stores.reindex_store(gateway, principal, store))


async def cancel_reindexing(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    told = await vector_stores.cancel_reindexing(gateway, principal.tenant, exchange.path["store"])
    await exchange.reply_json(told)


async def attach_file(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    body = await parse_body(AttachFile, await exchange.json_body())
    caller, store = principal.caller(exchange.request_id), exchange.path["store"]
    told = await vector_stores.attach_file(gateway, principal, caller, store, body)
    await exchange.reply_json(told)


async def list_attached(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    query, store = page_query(exchange.query, AttachedList), exchange.path["store"]
    told = await vector_stores.list_attached(gateway, principal.tenant, store, query)
    await exchange.reply_json(told)


async def get_attached(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    store, file = exchange.path["store"], exchange.path["file"]
    told = await vector_stores.get_attached(gateway, principal.tenant, store, file)
    await exchange.reply_json(told, headers=_POLL)


async def update_attached(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    body = await parse_body(UpdateFile, await exchange.json_body())
    caller = principal.caller(exchange.request_id)
    store, file = exchange.path["store"], exchange.path["file"]
    told = await vector_stores.update_attached(gateway, caller, store, file, body)
    await exchange.reply_json(told)


async def get_text(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    store, file = exchange.path["store"], exchange.path["file"]
    caller = principal.caller(exchange.request_id)
    await exchange.body.skim()
    exchange.watch_client()
    text = await vector_stores.text_of(gateway, caller, store, file, exchange.place)
    await exchange.reply_json(
        {
            "object": "vector_store.file_content.page",
            "data": [{"type": "text", "text": text}],
            "has_more": False,
            "next_page": None,
        }
    )


async def detach_file(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    caller = principal.caller(exchange.request_id)
    store, file = exchange.path["store"], exchange.path["file"]
    await exchange.reply_json(await vector_stores.detach_file(gateway, caller, store, file))


# ---- batches of files ---------------------------------------------------------------------------


async def create_batch(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    body = await parse_body(CreateFileBatch, await exchange.json_body())
    caller, store = principal.caller(exchange.request_id), exchange.path["store"]
    told = await file_batches.create_file_batch(gateway, principal, caller, store, body)
    await exchange.reply_json(told)


async def get_batch(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    store, batch = exchange.path["store"], exchange.path["file_batch"]
    told = await file_batches.get_file_batch(gateway, principal.tenant, store, batch)
    await exchange.reply_json(told, headers=_POLL)


async def cancel_batch(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    caller = principal.caller(exchange.request_id)
    store, batch = exchange.path["store"], exchange.path["file_batch"]
    await exchange.reply_json(await file_batches.cancel_file_batch(gateway, caller, store, batch))


async def list_batch(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    query = page_query(exchange.query, AttachedList)
    store, batch = exchange.path["store"], exchange.path["file_batch"]
    told = await file_batches.list_batch(gateway, principal.tenant, store, batch, query)
    await exchange.reply_json(told)


# ---- search -------------------------------------------------------------------------------------


async def search_store(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    body = await parse_body(SearchStore, await exchange.json_body())
    asked = body.search(exchange.path["store"])
    found = await search(gateway, exchange.request_id, exchange.route, principal, asked)
    exchange.headers_out.update(found.headers)
    told: dict[str, Any] = {"warning": found.warning} if found.warning else {}
    if found.age_s:
        told["age_s"] = round(found.age_s, 3)
    if found.reranking.by:
        told["reranked"] = found.reranking.by
    if found.reranking.failed:
        told["not_reranked"] = found.reranking.failed
    passages: list[dict[str, Any]] = [
        {
            "file_id": passage.source_id,
            "filename": filename(passage),
            "score": passage.score,
            "attributes": told_attributes(passage.attributes),
            "content": [{"type": "text", "text": passage.text}],
            "title": passage.title,
            **place(passage),
        }
        for passage in found.passages
    ]
    await exchange.reply_json(
        {
            "object": "vector_store.search_results.page",
            "search_query": asked.queries,
            "data": passages,
            "has_more": False,
            "next_page": None,
            "penstock": {**told, **priced(found.cost)},
        }
    )
