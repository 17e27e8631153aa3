"""Files: what is said of one, a list of them, and their end."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from protos.common_pb2 import Caller
from services.common.errors import invalid
from services.gateway.api.resources.pages import PageQuery, page
from services.gateway.api.schema import UNSUPPORTED, Body, validated
from services.gateway.intake import Place
from services.gateway.parts import Gateway
from services.gateway.stores.files.file_record import PURPOSES, Purpose

Anchor = Literal["created_at"]
Seconds = Annotated[int, Field(ge=3600, le=30 * 86_400)]


class FileExpiresAfter(Body):
    """So long after it was made it is gone."""

    anchor: Anchor
    seconds: Seconds


class FileAge(Body):
    """What an upload says of its file's end."""

    expires_after: FileExpiresAfter | None = None


class FileList(PageQuery):
    limit: Annotated[int, Field(ge=1, le=10_000)] = 10_000  # as OpenAI's, and of files alone
    purpose: Purpose | None = None


def purpose_of(told: object) -> Purpose:
    """Of an upload. Raises INVALID_ARGUMENT."""
    for purpose in PURPOSES:
        if told == purpose:
            return purpose
    if not told:
        message = "Missing required parameter: 'purpose'."
        raise invalid(message, "purpose", reason="missing_required_parameter")
    accepted = ", ".join(f"'{one}'" for one in PURPOSES)
    raise invalid(f"Only one of {accepted} is supported.", "purpose", reason=UNSUPPORTED)


def seconds_of(expires_after: FileExpiresAfter | None) -> int | None:
    return expires_after.seconds if expires_after is not None else None


def age_of(told: Mapping[str, Any] | None) -> int | None:
    """Seconds, of an upload's `expires_after`. Raises INVALID_ARGUMENT."""
    return seconds_of(validated(FileAge, {"expires_after": told}).expires_after)


async def list_files(gateway: Gateway, tenant: str, query: FileList) -> dict[str, Any]:
    records = await gateway.files.all(tenant)
    shown = (one.as_json() for one in records if query.purpose in (None, one.purpose))
    return page(shown, query)


async def content_of(gateway: Gateway, tenant: str, id: str, place: Place) -> bytes:
    """Which the place holds. Raises RESOURCE_EXHAUSTED ("too_many_bytes")."""
    record = await gateway.files.get(tenant, id)
    place.hold(record.bytes)
    return await gateway.files.content(tenant, record.id)


async def delete_file(gateway: Gateway, caller: Caller, id: str) -> dict[str, Any]:
    """Takes it out of all stores first. Raises ABORTED while a batch reads it."""
    await gateway.files.get(caller.tenant, id)
    await delete_unused(gateway, caller, id)
    return {"id": id, "object": "file", "deleted": True}


async def delete_unused(gateway: Gateway, caller: Caller, id: str) -> None:
    """Raises ABORTED while a batch reads it, NOT_FOUND where it was gone."""
    await gateway.batches.require_unused(caller.tenant, id)
    await gateway.stores.delete_file(caller, id)
