"""What files hold, in pieces: UploadFile, GetFileContent, GetAttachedFileContent."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NamedTuple

from protos.common_pb2 import Caller
from protos.gateway_stores_pb2 import (
    File,
    FileContent,
    GetAttachedFileRequest,
    GetFileContentRequest,
    UploadFileRequest,
)
from services.common.errors import PenstockError, invalid
from services.gateway.api.grpc.calls import (
    Context,
    Enter,
    Handler,
    Writer,
    admitted,
    answered,
    single,
    streaming,
)
from services.gateway.api.grpc.inbox import Inbox, no_message
from services.gateway.api.grpc.kept import id_of, told
from services.gateway.api.grpc.plain import fields_of
from services.gateway.api.resources.files import age_of, content_of, purpose_of
from services.gateway.api.resources.vector_stores import text_of
from services.gateway.api.rest.body import too_large
from services.gateway.intake import Intake, Place
from services.gateway.parts import Gateway
from services.gateway.stores.file_record import Purpose

_PIECE_BYTES = 64 * 1024
_OF_CONTENT = ("invalid_file", "file_too_large")  # other faults are of the name


class Upload(NamedTuple):
    filename: str
    content: list[bytes]
    purpose: Purpose
    expires_after_s: int | None


def methods(gateway: Gateway, inbox: Inbox) -> dict[str, Any]:
    """Their handlers, by route."""
    contents = {"GetFileContent": _FILE, "GetAttachedFileContent": _ATTACHED}
    return {
        "UploadFile": single(_upload_file(gateway, inbox), File),
        **{
            route: streaming(_get_content(gateway, inbox, route, asked), FileContent)
            for route, asked in contents.items()
        },
    }


def _upload_file(gateway: Gateway, inbox: Inbox) -> Handler:
    async def handler(_: object, context: Context) -> File | None:
        async def answer(id: str, metadata: dict[str, str]) -> File:
            entered = admitted(gateway, metadata, "UploadFile", Intake.slot)
            async with entered as (principal, place):
                limit = gateway.settings.gateway.max_upload_bytes
                file = await _arrived(inbox, place, context, limit)
                try:
                    record = await gateway.files.create(
                        principal.tenant,
                        file.filename,
                        _each(file.content),
                        file.purpose,
                        file.expires_after_s,
                    )
                except PenstockError as error:
                    if error.param == "file":
                        error.param = "data" if error.reason in _OF_CONTENT else "filename"
                    raise
                return told(File, record.as_json())

        return await answered("UploadFile", context, answer)

    return handler


async def _arrived(inbox: Inbox, place: Place, context: Context, limit: int) -> Upload:
    """A call that ends is no proof that all of it has come: a client that is lost ends it too. So
    how much is to come is said first."""
    first: UploadFileRequest | None = None
    pieces, received = list[bytes](), 0
    async with aclosing(inbox.pieces(place, context)) as messages:
        async for message in messages:
            one = inbox.parse(UploadFileRequest, message)
            if first is None:
                first, purpose = one, purpose_of(one.purpose)
                said = one.HasField("expires_after")
                age = age_of(fields_of(one.expires_after) if said else None)
                if not one.bytes:
                    raise invalid("Say how many bytes come.", "bytes", stage="gateway")
                if one.bytes > limit:
                    raise too_large(limit, "bytes")
            else:
                for name in (field.name for field, _ in one.ListFields()):
                    if name != "data":
                        raise invalid("Only the first message says it.", name, stage="gateway")
            received += len(one.data)
            if received > first.bytes:
                why = f"More came than the {first.bytes} bytes that were told."
                raise invalid(why, "data", stage="gateway", reason="upload_too_long")
            pieces.append(one.data)
    if first is None:
        raise no_message()
    if received < first.bytes:
        why = f"The upload ended after {received} of {first.bytes} bytes."
        raise invalid(why, "data", stage="gateway", reason="incomplete_upload")
    return Upload(first.filename, pieces, purpose, age)


async def _each(pieces: list[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


class _Content(NamedTuple):
    """What is asked for, and where it is."""

    request: Any
    find: Callable[[Gateway, Caller, Any, Place], Awaitable[bytes]]
    enter: Enter


async def _find(gateway: Gateway, caller: Caller, request: Any, place: Place) -> bytes:
    return await content_of(gateway, caller.tenant, id_of(request, "file_id"), place)


async def _find_attached(gateway: Gateway, caller: Caller, request: Any, place: Place) -> bytes:
    store, file = id_of(request, "vector_store_id"), id_of(request, "file_id")
    return (await text_of(gateway, caller, store, file, place)).encode()


_FILE = _Content(GetFileContentRequest, _find, Intake.visit)
_ATTACHED = _Content(GetAttachedFileRequest, _find_attached, Intake.slot)  # it is read anew


def _get_content(gateway: Gateway, inbox: Inbox, route: str, asked: _Content) -> Handler:
    async def handler(_: object, context: Context) -> None:
        async def answer(id: str, metadata: dict[str, str]) -> None:
            entered = admitted(gateway, metadata, route, asked.enter)
            async with entered as (principal, place):
                request = inbox.parse(asked.request, await inbox.take(place, context))
                content = await asked.find(gateway, principal.caller(id), request, place)
                writer = Writer(context, gateway.settings.gateway)
                for at in range(0, len(content), _PIECE_BYTES):
                    await writer.write(FileContent(data=content[at : at + _PIECE_BYTES]))

        await answered(route, context, answer)

    return handler
