"""Tokenize and Detokenize: REST's requests in gRPC's shape, by REST's rules."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from protos.gateway_pb2 import (
    PublicDetokenizeReply,
    PublicDetokenizeRequest,
    PublicTokenizeReply,
    PublicTokenizeRequest,
)
from protos.tokenizer_pb2 import PromptRequest, TextDelta
from services.common.config import GatewaySettings
from services.common.errors import invalid
from services.gateway.api.grpc.fields import message_fields
from services.gateway.api.grpc.tool_fields import template_fields
from services.gateway.api.schema import validated
from services.gateway.api.tokens_schema import DetokenizeRequest, TokenizeRequest


class Kind(NamedTuple):
    """One of the calls."""

    request: Any
    understand: Callable[[Any, GatewaySettings], PromptRequest]
    tell: Callable[[TextDelta, int], Any]
    """The reply, of what the tokenizer made and the model's window."""
    reply: Any
    called: Sequence[tuple[str, str]]
    """Fields of REST's and of the tokenizer's, and what they are called here."""


def _tokenize(request: PublicTokenizeRequest, limits: GatewaySettings) -> PromptRequest:
    fields: dict[str, Any] = {"model": request.model, **template_fields(request)}
    if request.text:
        for name in ("messages", "tools", "chat_template_kwargs"):
            if getattr(request, name):
                raise invalid("It does not go together with a text.", name)
        fields["prompt"] = request.text
    if request.messages:
        fields["messages"] = message_fields(request.messages, limits.max_messages)
    return validated(TokenizeRequest, fields, limits).request(limits)


def _detokenize(request: PublicDetokenizeRequest, limits: GatewaySettings) -> PromptRequest:
    one_more = limits.max_prompt_tokens + 1  # is enough to be refused
    fields = {"model": request.model, "tokens": list(request.token_ids[:one_more])}
    return validated(DetokenizeRequest, fields, limits).request(limits)


def _ids(made: TextDelta, window: int) -> PublicTokenizeReply:
    return PublicTokenizeReply(token_ids=made.token_ids, window=window)


def _text(made: TextDelta, _: int) -> PublicDetokenizeReply:
    return PublicDetokenizeReply(text=made.text)


TOKENS = {
    "Tokenize": Kind(
        PublicTokenizeRequest, _tokenize, _ids, PublicTokenizeReply, [("prompt", "text")]
    ),
    "Detokenize": Kind(
        PublicDetokenizeRequest,
        _detokenize,
        _text,
        PublicDetokenizeReply,
        [("tokens", "token_ids"), ("prompt", "token_ids")],
    ),
}
