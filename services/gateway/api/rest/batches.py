"""/v1/batches, as OpenAI has it."""

from services.gateway.api.resources import batches
from services.gateway.api.resources.batches import CreateBatch, require_files
from services.gateway.api.rest.http import Exchange
from services.gateway.api.rest.queries import page_query
from services.gateway.api.schema import parse_body
from services.gateway.identity.principal import Principal
from services.gateway.parts import Gateway


async def create_batch(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    require_files(principal)
    body = await parse_body(CreateBatch, await exchange.json_body())
    await exchange.reply_json(await batches.create_batch(gateway, principal, body))


async def list_batches(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    query = page_query(exchange.query)
    await exchange.reply_json(await batches.list_batches(gateway, principal.tenant, query))


async def get_batch(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    id = exchange.path["batch"]
    await exchange.reply_json(await batches.get_batch(gateway, principal.tenant, id))


async def cancel_batch(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    id = exchange.path["batch"]
    await exchange.reply_json(await batches.cancel_batch(gateway, principal.tenant, id))
