"""Chats, completions, messages, tokens."""

from typing import Any

from services.gateway.api.anthropic_schema import CountTokensRequest, MessagesRequest
from services.gateway.api.generation_schema import ChatCompletionRequest, CompletionRequest
from services.gateway.api.openapi.answers.common import PageOf
from services.gateway.api.openapi.answers.generation import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    DeletedChat,
    SentMessage,
)
from services.gateway.api.openapi.answers.messages import AnthropicError, AnthropicMessage
from services.gateway.api.openapi.answers.tokens import Detokenized, TokenCount, Tokenized
from services.gateway.api.openapi.operation import Operation
from services.gateway.api.rest.lasting import Resume
from services.gateway.api.rest.messages import MessagesQuery
from services.gateway.api.rest.stored_chats import ChatList, SentList, UpdateChat
from services.gateway.api.tokens_schema import DetokenizeRequest, TokenizeRequest

_TAG = "Generation"
_MODEL = {"model": "demo"}
_ASKED = {"messages": [{"role": "user", "content": "What is the pressure of the water?"}]}

OPERATIONS: dict[str, Operation] = {
    "POST /v1/chat/completions": Operation(
        _TAG,
        "Answers a chat",
        ChatCompletion,
        ChatCompletionRequest,
        {**_MODEL, **_ASKED, "max_tokens": 64},
        events=ChatCompletionChunk,
        lasting=True,
        resumes=True,
    ),
    "GET /v1/chat/completions": Operation(
        _TAG, "Stored chats", PageOf[ChatCompletion], query=ChatList
    ),
    "POST /v1/chat/completions/{completion}": Operation(
        _TAG,
        "Changes what is said of a stored chat",
        ChatCompletion,
        UpdateChat,
        {"metadata": None},
    ),
    "DELETE /v1/chat/completions/{completion}": Operation(
        _TAG, "Deletes a stored chat", DeletedChat
    ),
    "GET /v1/chat/completions/{completion}/messages": Operation(
        _TAG, "What a stored chat answers", PageOf[SentMessage], query=SentList
    ),
    "GET /v1/chat/completions/{completion}": Operation(
        _TAG,
        "A chat's answer once more, if it was stored or asked for with an Idempotency-Key",
        ChatCompletion,
        query=Resume,
        events=ChatCompletionChunk,
        resumes=True,
    ),
    "POST /v1/completions": Operation(
        _TAG,
        "Goes on with a text, or several",
        Completion,
        CompletionRequest,
        {**_MODEL, "prompt": ["The water", "The oil"]},
        events=CompletionChunk,
        lasting=True,
        resumes=True,
    ),
    "POST /v1/messages": Operation(
        _TAG,
        "Answers a conversation, as Anthropic has it",
        AnthropicMessage,
        MessagesRequest,
        {**_MODEL, **_ASKED, "max_tokens": 64},
        query=MessagesQuery,
        events=dict[str, Any],
        error=AnthropicError,
    ),
    "POST /v1/messages/count_tokens": Operation(
        _TAG,
        "How many tokens a conversation has, as Anthropic has it",
        TokenCount,
        CountTokensRequest,
        {**_MODEL, **_ASKED},
        query=MessagesQuery,
        error=AnthropicError,
    ),
    "POST /tokenize": Operation(
        _TAG,
        "A prompt's tokens, as vLLM has it",
        Tokenized,
        TokenizeRequest,
        {**_MODEL, "prompt": "The water"},
    ),
    "POST /detokenize": Operation(
        _TAG,
        "The text of tokens, as vLLM has it",
        Detokenized,
        DetokenizeRequest,
        {**_MODEL, "tokens": [17, 4]},
    ),
}
