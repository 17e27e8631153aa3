"""/v1/files and /v1/vector_stores, as OpenAI has them, in simple form."""

from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BeforeValidator, Field
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from services.common.errors import invalid
from services.gateway.api.generation_schema import Name, as_list
from services.gateway.api.rest.http import Exchange
from services.gateway.api.rest.openai_format import priced
from services.gateway.api.rest.pages import PageQuery, page, page_query
from services.gateway.api.schema import UNKNOWN, UNSUPPORTED, Body, Metadata, parse_body
from services.gateway.identity.principal import Principal
from services.gateway.parts import Gateway
from services.gateway.runs.citations import filename
from services.gateway.stores.files import PURPOSES, Purpose
from services.gateway.stores.searching import Search, search

_AUTO_CHUNKING = {"chunking_strategy": ({"type": "auto"},)}
_UTF_8 = (b"utf-8", b"utf8")
_POLL_AFTER_MS = "100"  # what OpenAI's client waits between two looks at a file's status

# ---- files --------------------------------------------------------------------------------------


class FileList(PageQuery):
    purpose: str | None = None


async def create_file(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    name, content, purpose = await _upload(exchange)
    record = await gateway.files.create(principal.tenant, name, content, purpose)
    await exchange.reply_json(record.as_json())


async def list_files(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    query = page_query(exchange.query, FileList)
    records = await gateway.files.all(principal.tenant)
    shown = (one.as_json() for one in records if query.purpose in (None, one.purpose))
    await exchange.reply_json(page(shown, query))


async def get_file(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    record = await gateway.files.get(principal.tenant, exchange.path["file"])
    await exchange.reply_json(record.as_json())


async def get_content(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    record = await gateway.files.get(principal.tenant, exchange.path["file"])
    exchange.place.hold(record.bytes)
    text = await gateway.files.content(principal.tenant, record.id)
    await exchange.reply(text.encode(), "application/octet-stream")


async def delete_file(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    id = exchange.path["file"]
    await gateway.files.get(principal.tenant, id)
    await gateway.batches.require_unused(principal.tenant, id)
    await gateway.stores.forget_file(principal.caller(exchange.request_id), id)
    await gateway.files.delete(principal.tenant, id)
    await exchange.reply_json({"id": id, "object": "file", "deleted": True})


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
        if purpose not in PURPOSES:
            told = " or ".join(f"'{one}'" for one in PURPOSES)
            raise invalid(f"Only {told} is supported.", "purpose", reason=UNSUPPORTED)
        return file.filename or "", await file.read(), cast(Purpose, purpose)
    finally:
        await form.close()


# ---- vector stores ------------------------------------------------------------------------------


class CreateStore(Body):
    NEUTRAL: ClassVar = {**_AUTO_CHUNKING, "expires_after": (), "description": ()}

    name: Annotated[str, Field(max_length=256)] | None = None
    file_ids: Annotated[list[Name], Field(max_length=100)] | None = None
    metadata: Metadata | None = None


async def create_store(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    body = await parse_body(CreateStore, await exchange.json_body())
    store = await gateway.stores.create(
        principal,
        principal.caller(exchange.request_id),
        body.name or "",
        body.metadata or {},
        list(dict.fromkeys(body.file_ids or ())),
    )
    await exchange.reply_json(store)


async def list_stores(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    query = page_query(exchange.query)
    listed = page(({"id": id} for id in await gateway.stores.ids(principal.tenant)), query)
    shown = await gateway.stores.some(principal.tenant, (one["id"] for one in listed["data"]))
    await exchange.reply_json({**listed, "data": shown})


async def get_store(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    await exchange.reply_json(await gateway.stores.get(principal.tenant, exchange.path["store"]))


async def delete_store(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    id = exchange.path["store"]
    await gateway.stores.delete(principal.caller(exchange.request_id), id)
    await exchange.reply_json({"id": id, "object": "vector_store.deleted", "deleted": True})


# ---- files in a store ---------------------------------------------------------------------------


class AttachFile(Body):
    NEUTRAL: ClassVar = {**_AUTO_CHUNKING, "attributes": ({},)}

    file_id: Name


class AttachedList(PageQuery):
    filter: Literal["in_progress", "completed", "failed", "cancelled"] | None = None


async def attach_file(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    body = await parse_body(AttachFile, await exchange.json_body())
    caller = principal.caller(exchange.request_id)
    attached = await gateway.stores.attach(principal, caller, exchange.path["store"], body.file_id)
    await exchange.reply_json(attached.as_json())


async def list_attached(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    query = page_query(exchange.query, AttachedList)
    store = exchange.path["store"]
    await gateway.stores.get(principal.tenant, store)
    files = await gateway.stores.files(principal.tenant, store)
    shown = (f.as_json() for f in files if query.filter in (None, f.state))
    await exchange.reply_json(page(shown, query))


async def get_attached(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    store, file = exchange.path["store"], exchange.path["file"]
    attached = await gateway.stores.file(principal.tenant, store, file)
    await exchange.reply_json(attached.as_json(), headers={"openai-poll-after-ms": _POLL_AFTER_MS})


async def detach_file(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    store, file = exchange.path["store"], exchange.path["file"]
    await gateway.stores.detach(principal.caller(exchange.request_id), store, file)
    await exchange.reply_json({"id": file, "object": "vector_store.file.deleted", "deleted": True})


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
