"""/v1/files, as OpenAI has them."""

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from services.common.blobs import PIECE_BYTES
from services.common.errors import invalid
from services.gateway.api.resources import files
from services.gateway.api.resources.files import FileExpiresAfter, FileList, age_of, purpose_of
from services.gateway.api.rest.http import Exchange
from services.gateway.api.rest.queries import page_query
from services.gateway.api.schema import UNKNOWN
from services.gateway.identity.principal import Principal
from services.gateway.parts import Gateway
from services.gateway.stores.files.file_record import Purpose

_UTF_8 = (b"utf-8", b"utf8")
_AGE = {f"expires_after[{name}]": name for name in FileExpiresAfter.model_fields}
_FORM_BYTES = 64 * 1024  # of a form beside its file


async def create_file(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    most = gateway.settings.gateway.max_upload_bytes
    async with _upload(exchange, most) as (name, content, purpose, age_s):
        record = await gateway.files.create(principal.tenant, name, content, purpose, age_s)
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


@asynccontextmanager
async def _upload(
    exchange: Exchange, most: int
) -> AsyncIterator[tuple[str, AsyncIterator[bytes], Purpose, int | None]]:
    """The file, its purpose and how many seconds it stays; `most`: bytes of it."""
    async with form_of(exchange, most, "file", ("purpose", *_AGE)) as (file, form):
        purpose, age = purpose_of(form.get("purpose")), age_of(_age(form))
        yield file.filename or "", pieces_of(file), purpose, age


@asynccontextmanager
async def form_of(
    exchange: Exchange, most: int, name: str, others: Sequence[str] = ()
) -> AsyncIterator[tuple[UploadFile, FormData]]:
    """The file `name` of a multipart form, and the form, which has nothing else in it but `others`.
    What is large lies in a temporary file; `most`: bytes of it."""
    kind = exchange.headers.get("content-type", "")
    if not kind.lower().startswith("multipart/form-data"):
        raise invalid("Send the file as multipart/form-data.", "", reason="unsupported_media_type")
    # The parser would take any codec of Python's, of which some need quadratic time and some fail.
    if parse_options_header(kind)[1].get(b"charset", b"utf-8").lower() not in _UTF_8:
        raise invalid("The form must be in UTF-8.", "", reason="unsupported_media_type")
    parser = MultiPartParser(
        exchange.headers,
        exchange.body.pieces(exchange.place, most + _FORM_BYTES),
        max_files=1,
        max_fields=8,
    )
    try:
        form = await parser.parse()
    except (MultiPartException, FormParserError):
        raise invalid("The form cannot be read.", "", reason="invalid_form") from None
    try:
        seen = set()
        for field, _ in form.multi_items():
            if field not in (name, *others):
                raise invalid(f"Unknown parameter: '{field[:64]}'.", field[:64], reason=UNKNOWN)
            if field in seen:  # one of the two would be taken and the other ignored
                raise invalid(f"The parameter '{field}' is there twice.", field)
            seen.add(field)
        file = form.get(name)
        if not isinstance(file, UploadFile):
            message = f"Missing required parameter: '{name}'."
            raise invalid(message, name, reason="missing_required_parameter")
        yield file, form
    finally:
        await form.close()


def _age(form: FormData) -> dict[str, Any] | None:
    """`expires_after` of the form, whose every value is a text."""
    told: dict[str, Any] = {_AGE[name]: form[name] for name in _AGE.keys() & form.keys()}
    seconds = told.get("seconds")
    if isinstance(seconds, str) and re.fullmatch("[0-9]{1,9}", seconds):
        told["seconds"] = int(seconds)
    return told or None


async def pieces_of(file: UploadFile) -> AsyncIterator[bytes]:
    while piece := await file.read(PIECE_BYTES):
        yield piece
