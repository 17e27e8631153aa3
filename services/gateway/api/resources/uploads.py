"""Uploads in parts: what is said of one, its parts in their order, and its end."""

from typing import Annotated, Any, Literal

from pydantic import Field

from services.gateway.api.resources.files import FileExpiresAfter, seconds_of
from services.gateway.api.schema import Body
from services.gateway.faults import spelt
from services.gateway.parts import Gateway
from services.gateway.stores.files.file_record import PURPOSES
from services.gateway.stores.files.uploads import MAX_PARTS

_PartId = Annotated[str, Field(min_length=1, max_length=64)]


class CreateUpload(Body):
    filename: str
    purpose: Literal[PURPOSES]  # type: ignore[valid-type]
    bytes: Annotated[int, Field(ge=1)]
    mime_type: Annotated[str, Field(min_length=1, max_length=255)] = Field(
        description="no effect: what a file is, its content says, then its name"
    )
    expires_after: FileExpiresAfter | None = Field(None, description="of its file")


class CompleteUpload(Body):
    part_ids: Annotated[list[_PartId], Field(min_length=1, max_length=MAX_PARTS)]
    md5: Annotated[str, spelt("^[0-9a-fA-F]{32}$", "32 hex digits")] | None = None


async def create_upload(gateway: Gateway, tenant: str, body: CreateUpload) -> dict[str, Any]:
    expires_s = seconds_of(body.expires_after)
    told = (body.filename, body.bytes, body.purpose, expires_s)
    return (await gateway.uploads.create(tenant, *told)).as_json()


async def complete_upload(
    gateway: Gateway, tenant: str, id: str, body: CompleteUpload
) -> dict[str, Any]:
    upload, file = await gateway.uploads.complete(tenant, id, body.part_ids, body.md5 or "")
    return upload.as_json(file)


async def cancel_upload(gateway: Gateway, tenant: str, id: str) -> dict[str, Any]:
    return (await gateway.uploads.cancel(tenant, id)).as_json()
