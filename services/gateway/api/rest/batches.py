"""/v1/batches, as OpenAI has it."""

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from services.gateway.api.generation_schema import Name
from services.gateway.api.rest.http import Exchange
from services.gateway.api.rest.pages import page, page_query
from services.gateway.api.schema import Body, Metadata, bad_value, parse_body
from services.gateway.identity.principal import Permission, Principal
from services.gateway.parts import Gateway

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_S = 7 * 86_400


class CreateBatch(Body):
    NEUTRAL: ClassVar = {"output_expires_after": ()}

    input_file_id: Name
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,5}[smhd]$")]
    metadata: Metadata | None = None


async def create_batch(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    principal.require(Permission.FILES_READ)
    principal.require(Permission.FILES_WRITE)  # its answers are files
    body = await parse_body(CreateBatch, await exchange.json_body())
    window = (body.completion_window, _seconds(body.completion_window))
    batch = await gateway.batches.create(
        principal, body.endpoint, body.input_file_id, window, body.metadata
    )
    await exchange.reply_json(batch.as_json())


async def list_batches(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    query = page_query(exchange.query)
    ids = await gateway.batches.store.ids(principal.tenant)
    listed = page(({"id": id} for id in ids), query)
    shown = await gateway.batches.store.some(
        principal.tenant, [one["id"] for one in listed["data"]]
    )
    await exchange.reply_json({**listed, "data": [batch.as_json() for batch in shown]})


async def get_batch(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    batch = await gateway.batches.store.find(principal.tenant, exchange.path["batch"])
    await exchange.reply_json(batch.as_json())


async def cancel_batch(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    """What of it is under way ends as usual; the rest is told that it was cancelled."""
    batch = await gateway.batches.cancel(principal.tenant, exchange.path["batch"])
    await exchange.reply_json(batch.as_json())


def _seconds(window: str) -> int:
    count, unit = re.fullmatch(r"(\d+)([smhd])", window).groups()  # type: ignore[union-attr]
    seconds = int(count) * _SECONDS[unit]
    if seconds > _LONGEST_S:
        raise bad_value("completion_window", "at most 7d")
    return seconds
