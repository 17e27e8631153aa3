"""What a prompt's tokens are, or how many: POST /tokenize and /detokenize as vLLM has them, and
/v1/messages/count_tokens as Anthropic has it, /v1/responses/input_tokens as OpenAI has it."""

from collections.abc import Awaitable, Callable
from typing import Any

from protos.tokenizer_pb2 import PromptRequest, TextDelta
from services.common.config import GatewaySettings
from services.common.errors import PenstockError
from services.gateway.api.anthropic_schema import CountTokensRequest
from services.gateway.api.responses_schema import InputTokensRequest
from services.gateway.api.rest.http import Exchange
from services.gateway.api.rest.messages import authorization, check_query
from services.gateway.api.rest.pooled import asked_of
from services.gateway.api.rest.stored_responses import said_before
from services.gateway.api.schema import parse, read_aside
from services.gateway.api.tokens_schema import DetokenizeRequest, TokenizeRequest
from services.gateway.identity.principal import Principal
from services.gateway.intake import Place
from services.gateway.parts import Gateway
from services.gateway.runs.recorded import recorded
from services.gateway.runs.records import Journal
from services.gateway.runs.tokens import tokens_of

Rename = Callable[[PenstockError], None]
Understood = tuple[PromptRequest, Rename]
Understand = Callable[[Gateway, Principal, Place, bytes], Awaitable[Understood]]


def _endpoint(
    understand: Understand, tell: Callable[[TextDelta, int], dict[str, Any]]
) -> Callable[..., Awaitable[None]]:
    async def serve(gateway: Gateway, exchange: Exchange, key: str | None = None) -> None:
        asked = asked_of(exchange)._replace(authorization=key or exchange.authorization)

        async def work(principal: Principal, place: Place, journal: Journal) -> None:
            exchange.place = place
            body = await exchange.json_body()
            request, rename = await understand(gateway, principal, place, body)
            exchange.watch_client()
            try:
                made, window = await tokens_of(gateway, asked, principal, journal, request)
            except PenstockError as error:
                rename(error)
                raise
            place.hold(16 * len(made.token_ids))
            await exchange.reply_json(tell(made, window))

        await recorded(gateway, asked, work)

    return serve


def _aside(understand: Callable[[bytes, GatewaySettings], Understood]) -> Understand:
    async def read(gateway: Gateway, principal: Principal, place: Place, body: bytes) -> Understood:
        return await read_aside(len(body), lambda: understand(body, gateway.settings.gateway))

    return read


def _tokenize(body: bytes, limits: GatewaySettings) -> Understood:
    return parse(TokenizeRequest, body, limits).request(limits), lambda error: None


def _detokenize(body: bytes, limits: GatewaySettings) -> Understood:
    def rename(error: PenstockError) -> None:
        if error.param.startswith("prompt"):
            error.param = "tokens" + error.param.removeprefix("prompt")

    return parse(DetokenizeRequest, body, limits).request(limits), rename


def _count(body: bytes, limits: GatewaySettings) -> Understood:
    chat = parse(CountTokensRequest, body, limits).chat(limits)
    request = chat.request.prompt(0).request
    request.chat.whole = True
    return request, chat.rename


async def _count_input(
    gateway: Gateway, principal: Principal, place: Place, body: bytes
) -> Understood:
    limits = gateway.settings.gateway
    asked = await read_aside(len(body), lambda: parse(InputTokensRequest, body, limits))
    before, size = await said_before(gateway, principal, place, asked)
    chat = await read_aside(len(body) + size, lambda: asked.chat(before, limits))
    request = chat.request.prompt(0).request
    request.chat.whole = True
    return request, chat.rename


def _tokenized(made: TextDelta, window: int) -> dict[str, Any]:
    ids = list(made.token_ids)
    return {"count": len(ids), "max_model_len": window, "tokens": ids, "token_strs": None}


def _input_tokens(made: TextDelta, window: int) -> dict[str, Any]:
    return {"object": "response.input_tokens", "input_tokens": len(made.token_ids)}


tokenize = _endpoint(_aside(_tokenize), _tokenized)
detokenize = _endpoint(_aside(_detokenize), lambda made, _: {"prompt": made.text})
count_input = _endpoint(_count_input, _input_tokens)
_counted = _endpoint(_aside(_count), lambda made, _: {"input_tokens": len(made.token_ids)})


async def count_tokens(gateway: Gateway, exchange: Exchange) -> None:
    check_query(exchange)
    await _counted(gateway, exchange, authorization(exchange))
