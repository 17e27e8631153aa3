"""/v1/files and /v1/vector_stores, as OpenAI has them, in simple form."""

from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from services.common.errors import invalid
from services.gateway.api.resources import files, vector_stores
from services.gateway.api.resources.files import FileList, purpose_of
from services.gateway.api.resources.vector_stores import (
    AttachedList,
    AttachFile,
    CreateStore,
    SearchStore,
)
from services.gateway.api.rest.http import Exchange
from services.gateway.api.rest.openai_format import priced
from services.gateway.api.rest.queries import page_query
from services.gateway.api.schema import UNKNOWN, parse_body
from services.gateway.identity.principal import Principal
from services.gateway.parts import Gateway
from services.gateway.runs.citations import filename
from services.gateway.stores.files import Purpose
from services.gateway.stores.searching import search

_UTF_8 = (b"utf-8", b"utf8")
_POLL_AFTER_MS = "100"  # what OpenAI's client waits between two looks at a file's status

# ---- files --------------------------------------------------------------------------------------


async def create_file(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    name, content, purpose = await _upload(exchange)
    record = await gateway.files.create(principal.tenant, name, content, purpose)
    await exchange.reply_json(record.as_json())


async def list_files(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    query = page_query(exchange.query, FileList)
    await exchange.reply_json(await files.list_files(gateway, principal.tenant, query))


async def get_file(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    record = await gateway.files.get(principal.tenant, exchange.path["file"])
    await exchange.reply_json(record.as_json())


async def get_content(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    file = exchange.path["file"]
    content = await files.content_of(gateway, principal.tenant, file, exchange.place)
    await exchange.reply(content, "application/octet-stream")


async def delete_file(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    caller = principal.caller(exchange.request_id)
    await exchange.reply_json(await files.delete_file(gateway, caller, exchange.path["file"]))


async def _upload(exchange: Exchange) -> tuple[str, bytes, Purpose]:
    """The file of a multipart form, and nothing else in it but its purpose."""
    kind = exchange.headers.get("content-type", "")
    if not kind.lower().startswith("multipart/form-data"):
        raise invalid("Send the file as multipart/form-data.", "", reason="unsupported_media_type")
    # The parser would take any codec of Python's, of which some need quadratic time and some fail.
    if parse_options_header(kind)[1].get(b"charset", b"utf-8").lower() not in _UTF_8:
        raise invalid("The form must be in UTF-8.", "", reason="unsupported_media_type")
    parser = MultiPartParser(
        exchange.headers, exchange.body.pieces(exchange.place), max_files=1, max_fields=8
    )
    try:
        form = await parser.parse()
    except (MultiPartException, FormParserError):
        raise invalid("The form cannot be read.", "", reason="invalid_form") from None
    try:
        for name in form:
            if name not in ("file", "purpose"):
                raise invalid(f"Unknown parameter: '{name[:64]}'.", name[:64], reason=UNKNOWN)
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise invalid("Missing required parameter: 'file'.", "file")
        told = purpose_of(purpose)
        return file.filename or "", await file.read(), told
    finally:
        await form.close()


# ---- vector stores ------------------------------------------------------------------------------


async def create_store(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    body = await parse_body(CreateStore, await exchange.json_body())
    caller = principal.caller(exchange.request_id)
    await exchange.reply_json(await vector_stores.create_store(gateway, principal, caller, body))


async def list_stores(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    query = page_query(exchange.query)
    await exchange.reply_json(await vector_stores.list_stores(gateway, principal.tenant, query))


async def get_store(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    await exchange.reply_json(await gateway.stores.get(principal.tenant, exchange.path["store"]))


async def delete_store(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    caller, store = principal.caller(exchange.request_id), exchange.path["store"]
    await exchange.reply_json(await vector_stores.delete_store(gateway, caller, store))


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
    await exchange.reply_json(told, headers={"openai-poll-after-ms": _POLL_AFTER_MS})


async def detach_file(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    caller = principal.caller(exchange.request_id)
    store, file = exchange.path["store"], exchange.path["file"]
    await exchange.reply_json(await vector_stores.detach_file(gateway, caller, store, file))


async def search_store(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    body = await parse_body(SearchStore, await exchange.json_body())
    asked = body.search(exchange.path["store"])
    found = await search(gateway, exchange.request_id, exchange.route, principal, asked)
    exchange.headers_out.update(found.headers)
    told = {"warning": found.warning} if found.warning else {}
    passages: list[dict[str, Any]] = [
        {
            "file_id": passage.source_id,
            "filename": filename(passage),
            "score": passage.score,
            "attributes": {"title": passage.title},
            "content": [{"type": "text", "text": passage.text}],
        }
        for passage in found.passages
    ]
    await exchange.reply_json(
        {
            "object": "vector_store.search_results.page",
            "search_query": body.query,
            "data": passages,
            "has_more": False,
            "next_page": None,
            "penstock": {**told, **priced(found.cost)},
        }
    )
