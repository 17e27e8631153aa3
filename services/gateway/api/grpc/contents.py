"""What files hold, in pieces: UploadFile, GetFileContent, GetAttachedFileContent."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import Message

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
from services.gateway.stores.files.file_record import Purpose

M = TypeVar("M", bound=Message)
T = TypeVar("T")
_PIECE_BYTES = 64 * 1024
_OF_CONTENT = ("invalid_file", "file_too_large")  # other faults are of the name


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
                first, (purpose, age), content = await arrived(
                    inbox, place, context, limit, UploadFileRequest, _said
                )
                try:
                    record = await gateway.files.create(
                        principal.tenant, first.filename, each(content), purpose, age
                    )
                except PenstockError as error:
                    if error.param == "file":
                        error.param = "data" if error.reason in _OF_CONTENT else "filename"
                    raise
                return told(File, record.as_json())

        return await answered("UploadFile", context, answer)

    return handler


def _said(first: UploadFileRequest) -> tuple[Purpose, int | None]:
    """What the file is for, and how long it stays."""
    purpose = purpose_of(first.purpose)
    age = fields_of(first.expires_after) if first.HasField("expires_after") else None
    return purpose, age_of(age)


async def arrived(
    inbox: Inbox,
    place: Place,
    context: Context,
    limit: int,
    kind: type[M],
    understand: Callable[[M], T],
) -> tuple[M, T, list[bytes]]:
    """The first message, what `understand` makes of it, and what all of them hold.

    A call that ends is no proof that all of it has come: a client that is lost ends it too. So how
    much is to come (`bytes`, at most `limit`) is said first."""
    first: Any = None
    understood: T
    pieces, received = list[bytes](), 0
    async with aclosing(inbox.pieces(place, context)) as messages:
        async for message in messages:
            one: Any = inbox.parse(kind, message)
            if first is None:
                first, understood = one, understand(one)
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
    return first, understood, pieces


async def each(pieces: list[bytes]) -> AsyncIterator[bytes]:
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
