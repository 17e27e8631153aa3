"""gRPC requests in REST's shape, validated by its rules; and what fields are called here."""

import re
from collections.abc import Sequence
from itertools import islice
from typing import Any

from protos.common_pb2 import Message
from protos.gateway_pb2 import ChatRequest, CompleteRequest, SamplingOptions
from services.common.config import GatewaySettings
from services.common.errors import invalid
from services.gateway.api.generation_schema import (
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_DOCUMENTS,
    MAX_STOP_IDS,
    MAX_STOPS,
)
from services.gateway.api.grpc.plain import fields_of
from services.gateway.api.grpc.tool_fields import FORMS, call_fields, form_fields, tool_fields
from services.gateway.api.messages_schema import MAX_PARTS
from services.gateway.api.tools_schema import MAX_STORES

_FUNCTIONS = re.compile(r"((?:tools|tool_calls)\[\d+\])\.function\.")
_STORES = re.compile(r"tools\[\d+\]\.vector_store_ids")
_SEARCH = re.compile(r"tools\[\d+\]\.(?:ranking_options\.)?(?=filters|max_num|score|ranker|hybrid)")
_RANKING = ("score_threshold", "ranker", "hybrid_search")
_PARAMS = (
    ("input", "texts"),
    ("query[0]", "query"),
    *((f"ranking_options.{name}", name) for name in _RANKING),
    ("top_logprobs", "sampling.logprobs"),
    *FORMS,
    *((name, f"sampling.{name}") for name in SamplingOptions.DESCRIPTOR.fields_by_name),
)


def param_of(rest: str) -> str:
    """What is at fault, as it is called here."""
    if found := _STORES.match(rest):
        return "vector_store_ids" + rest[found.end() :]
    if found := _SEARCH.match(rest):
        return "file_search." + rest[found.end() :]
    rest = _FUNCTIONS.sub(r"\1.", rest)
    for theirs, ours in _PARAMS:
        if rest == theirs or rest.startswith((theirs + "[", theirs + ".")):
            return ours + rest[len(theirs) :]
    return rest


def _sampling(options: SamplingOptions) -> dict[str, Any]:
    """Lists cut where they are too long already, which refuses them."""
    fields = {field.name: value for field, value in options.ListFields()}
    for name, most in _LISTS.items():
        if name in fields:
            fields[name] = list(fields[name][: most + 1])
    if "delivery" in fields:
        fields["stream"] = True  # as everything here is
    if "logit_bias" in fields:
        few = islice(options.logit_bias.items(), MAX_BIAS + 1)
        fields["logit_bias"] = {str(id): bias for id, bias in few}  # JSON's names are texts
    return fields


def _of_chat(sampling: dict[str, Any]) -> dict[str, Any]:
    """A chat's form of logprobs is another than a completion's."""
    if "logprobs" in sampling:
        sampling = {**sampling, "logprobs": True, "top_logprobs": sampling["logprobs"]}
    return sampling


_LISTS = {"stop": MAX_STOPS, "bad_words": MAX_BAD_WORDS, "stop_token_ids": MAX_STOP_IDS}


def chat_fields(request: ChatRequest, max_messages: int) -> dict[str, Any]:
    """The request in REST's shape, to be validated by REST's rules. Of what is too many, one more
    than may be: that is enough to be refused.
    """
    documents = request.documents[: MAX_DOCUMENTS + 1]
    stores = list(request.vector_store_ids[: MAX_STORES + 1])
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": message_fields(request.messages, max_messages),
        "documents": [{"title": d.title, "text": d.text} for d in documents],
        **_of_chat(_sampling(request.sampling)),
        **tool_fields(request),
        **(form_fields(request.constraint) if request.HasField("constraint") else {}),
    }
    for index, document in enumerate(documents):
        if document.score or document.source_id or document.position or document.attributes:
            raise invalid("A client's own document has a title and a text.", f"documents[{index}]")
    if request.HasField("file_search") and not stores:
        raise invalid("It goes with 'vector_store_ids'.", "file_search", stage="gateway")
    if stores:
        search = {"type": "file_search", "vector_store_ids": stores, **_file_search(request)}
        fields["tools"] = [*fields.get("tools", ()), search]
    return fields


def _file_search(request: ChatRequest) -> dict[str, Any]:
    return ranked(fields_of(request.file_search))


def ranked(fields: dict[str, Any]) -> dict[str, Any]:
    """Of a search: what REST has in an object of its own."""
    options = {name: fields.pop(name) for name in _RANKING if name in fields}
    return {**fields, "ranking_options": options} if options else fields


def message_fields(messages: Sequence[Message], most: int) -> list[dict[str, Any]]:
    """Those of a chat, and of those that are too many one."""
    return [_message(m, f"messages[{index}]") for index, m in enumerate(messages[: most + 1])]


def _message(message: Message, at: str) -> dict[str, Any]:
    parts = message.content[: MAX_PARTS + 1]
    for index, part in enumerate(parts):
        if part.WhichOneof("kind") is None:
            raise invalid("A part of a kind that is not known here.", f"{at}.content[{index}]")
    content = [{"type": "text", "text": part.text} for part in parts]
    told = {"role": message.role, "content": content or None, "name": message.name or None}
    return {**told, **call_fields(message)}


def completion_fields(request: CompleteRequest, limits: GatewaySettings) -> dict[str, Any]:
    fields = {"model": request.model, **_sampling(request.sampling)}
    if request.HasField("constraint"):
        fields |= form_fields(request.constraint)
    one_more = limits.max_prompt_tokens + 1  # is enough to be refused
    if request.HasField("token_ids"):
        return {**fields, "prompt": list(request.token_ids.ids[:one_more])}
    if not request.HasField("prompts"):
        return {**fields, "prompt": request.text}
    several, most = request.prompts, limits.max_prompts + 1
    if several.texts and several.token_ids:
        raise invalid("Texts or token ids, not both.", "prompts.token_ids")
    ids = [list(one.ids[:one_more]) for one in several.token_ids[:most]]
    return {**fields, "prompt": ids or list(several.texts[:most])}
