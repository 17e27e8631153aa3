"""Files: a list of them, and their end."""

from typing import Any

from protos.common_pb2 import Caller
from services.common.errors import invalid
from services.gateway.api.resources.pages import PageQuery, page
from services.gateway.api.schema import UNSUPPORTED
from services.gateway.intake import Place
from services.gateway.parts import Gateway
from services.gateway.stores.file_record import PURPOSES, Purpose


class FileList(PageQuery):
    purpose: Purpose | None = None


def purpose_of(told: object) -> Purpose:
    """Of an upload. Raises INVALID_ARGUMENT."""
    for purpose in PURPOSES:
        if told == purpose:
            return purpose
    accepted = ", ".join(f"'{one}'" for one in PURPOSES)
    raise invalid(f"Only one of {accepted} is supported.", "purpose", reason=UNSUPPORTED)


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
    await gateway.batches.require_unused(caller.tenant, id)
    await gateway.stores.delete_file(caller, id)
    return {"id": id, "object": "file", "deleted": True}
