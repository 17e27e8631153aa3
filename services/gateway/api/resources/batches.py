"""Batches."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field

from services.gateway.api.generation_schema import Name
from services.gateway.api.resources.files import FileExpiresAfter, seconds_of
from services.gateway.api.resources.pages import PageQuery, page
from services.gateway.api.schema import Body, Metadata, bad_value
from services.gateway.faults import spelt
from services.gateway.identity.principal import Permission, Principal
from services.gateway.parts import Gateway

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_S = 7 * 86_400


class CreateBatch(Body):
    input_file_id: Name
    endpoint: Literal[
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/moderations",
    ]
    completion_window: Annotated[
        str, spelt(r"^[1-9][0-9]{0,5}[smhd]$", "a number of s, m, h or d, such as 24h")
    ]
    metadata: Metadata | None = None
    output_expires_after: FileExpiresAfter | None = Field(None, description="of its answers' files")


def require_files(principal: Principal) -> None:
    """To make a batch. Raises PERMISSION_DENIED."""
    principal.require(Permission.FILES_READ)
    principal.require(Permission.FILES_WRITE)  # its answers are files


async def create_batch(gateway: Gateway, principal: Principal, body: CreateBatch) -> dict[str, Any]:
    window = (body.completion_window, _seconds(body.completion_window))
    kept = seconds_of(body.output_expires_after)
    batch = await gateway.batches.create(
        principal, body.endpoint, body.input_file_id, window, body.metadata, kept
    )
    return batch.as_json()


async def list_batches(gateway: Gateway, tenant: str, query: PageQuery) -> dict[str, Any]:
    ids = await gateway.batches.store.ids(tenant)
    listed = page(({"id": id} for id in ids), query)
    shown = await gateway.batches.store.some(tenant, [one["id"] for one in listed["data"]])
    return {**listed, "data": [batch.as_json() for batch in shown]}


async def get_batch(gateway: Gateway, tenant: str, id: str) -> dict[str, Any]:
    return (await gateway.batches.store.find(tenant, id)).as_json()


async def cancel_batch(gateway: Gateway, tenant: str, id: str) -> dict[str, Any]:
    """What of it is under way ends as usual; the rest is told that it was cancelled."""
    return (await gateway.batches.cancel(tenant, id)).as_json()


def _seconds(window: str) -> int:
    count, unit = re.fullmatch(r"(\d+)([smhd])", window).groups()  # type: ignore[union-attr]
    seconds = int(count) * _SECONDS[unit]
    if seconds > _LONGEST_S:
        raise bad_value("completion_window", "at most 7d")
    return seconds
