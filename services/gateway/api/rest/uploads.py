"""/v1/uploads, as OpenAI has them."""

from services.gateway.api.resources import uploads
from services.gateway.api.resources.uploads import CompleteUpload, CreateUpload
from services.gateway.api.rest.files import form_of, pieces_of
from services.gateway.api.rest.http import Exchange
from services.gateway.api.schema import parse_body
from services.gateway.identity.principal import Principal
from services.gateway.parts import Gateway


async def create_upload(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    body = await parse_body(CreateUpload, await exchange.json_body())
    await exchange.reply_json(await uploads.create_upload(gateway, principal.tenant, body))


async def add_part(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    most, id = gateway.settings.gateway.max_upload_bytes, exchange.path["upload"]
    async with form_of(exchange, most, "data") as (data, _):
        part = await gateway.uploads.add(principal.tenant, id, pieces_of(data))
    await exchange.reply_json(part.as_json())


async def complete_upload(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    body = await parse_body(CompleteUpload, await exchange.json_body())
    id = exchange.path["upload"]
    await exchange.reply_json(await uploads.complete_upload(gateway, principal.tenant, id, body))


async def cancel_upload(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    id = exchange.path["upload"]
    await exchange.reply_json(await uploads.cancel_upload(gateway, principal.tenant, id))
