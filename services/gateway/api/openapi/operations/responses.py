"""Responses and conversations."""

from typing import Any

from services.gateway.api.openapi.answers.common import PageOf
from services.gateway.api.openapi.answers.responses import (
    DeletedConversation,
    DeletedResponse,
    InputItem,
    Response,
    StoredConversation,
)
from services.gateway.api.openapi.answers.tokens import InputTokens
from services.gateway.api.openapi.operation import Operation
from services.gateway.api.resources.conversations import (
    AddItems,
    CreateConversation,
    ItemQuery,
    UpdateConversation,
)
from services.gateway.api.responses_schema import InputTokensRequest, ResponsesRequest
from services.gateway.api.rest.responses import ItemsQuery, RetrieveQuery

_TAG = "Responses"
_MODEL = {"model": "demo"}

OPERATIONS: dict[str, Operation] = {
    "POST /v1/responses": Operation(
        _TAG,
        "Answers, and stores the answer unless told not to",
        Response,
        ResponsesRequest,
        {**_MODEL, "input": "What is the pressure of the water?"},
        events=dict[str, Any],
        lasting=True,
        resumes=True,
    ),
    "POST /v1/responses/input_tokens": Operation(
        _TAG,
        "How many tokens a response's input has",
        InputTokens,
        InputTokensRequest,
        {**_MODEL, "input": "What is the pressure of the water?"},
    ),
    "GET /v1/responses/{response}": Operation(
        _TAG,
        "A stored response, as far as it is",
        Response,
        query=RetrieveQuery,
        events=dict[str, Any],
        resumes=True,
    ),
    "DELETE /v1/responses/{response}": Operation(
        _TAG, "Deletes a stored response", DeletedResponse
    ),
    "POST /v1/responses/{response}/cancel": Operation(
        _TAG, "Ends a response in the background", Response
    ),
    "GET /v1/responses/{response}/input_items": Operation(
        _TAG, "What a stored response answers", PageOf[InputItem], query=ItemsQuery
    ),
    "POST /v1/conversations": Operation(
        _TAG,
        "Makes a conversation",
        StoredConversation,
        CreateConversation,
        {"items": [{"role": "user", "content": "Hello"}]},
    ),
    "GET /v1/conversations/{conversation}": Operation(_TAG, "A conversation", StoredConversation),
    "POST /v1/conversations/{conversation}": Operation(
        _TAG,
        "Changes what is said of it",
        StoredConversation,
        UpdateConversation,
        {"metadata": None},
    ),
    "DELETE /v1/conversations/{conversation}": Operation(
        _TAG, "Deletes a conversation; responses of it stay", DeletedConversation
    ),
    "GET /v1/conversations/{conversation}/items": Operation(
        _TAG, "What was said in it", PageOf[InputItem], query=ItemsQuery
    ),
    "POST /v1/conversations/{conversation}/items": Operation(
        _TAG,
        "Adds to it",
        PageOf[InputItem],
        AddItems,
        {"items": [{"role": "user", "content": "Hello"}]},
        query=ItemQuery,
    ),
    "GET /v1/conversations/{conversation}/items/{item}": Operation(
        _TAG, "One item of it", InputItem, query=ItemQuery
    ),
    "DELETE /v1/conversations/{conversation}/items/{item}": Operation(
        _TAG, "Takes an item out of it", StoredConversation
    ),
}
