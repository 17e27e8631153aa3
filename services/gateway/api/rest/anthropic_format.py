"""Answers in the shapes of Anthropic's API: blocks, the events that tell of them, errors."""

import json
from typing import Any

from protos.common_pb2 import FINISH_CONTENT_FILTER, FINISH_LENGTH, FINISH_TOOL_CALLS
from protos.tokenizer_pb2 import TextDelta, ToolCallDelta
from services.common.errors import PenstockError
from services.gateway.api.rest.http import http_status
from services.gateway.api.rest.openai_format import extension
from services.gateway.metering.prices import Cost
from services.gateway.runs.prompt import Answer, total_usage

Event = dict[str, Any]
_STOP_REASONS = {
    FINISH_LENGTH: "max_tokens",
    FINISH_TOOL_CALLS: "tool_use",
    FINISH_CONTENT_FILTER: "refusal",
}
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Content:
    """What an answer has said, block by block, and the events that tell it."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._open = ""  # of which type the last one is, if more of it may come
        self._pieces: list[str] = []

    def push(self, answer: Answer, delta: TextDelta) -> list[Event]:
        events: list[Event] = []
        if delta.reasoning:
            events += self._opened("thinking", {"thinking": "", "signature": ""})
            events.append(self._piece("thinking_delta", "thinking", delta.reasoning))
        if delta.text:
            events += self._opened("text", {"text": ""})
            events.append(self._piece("text_delta", "text", delta.text))
        for call in delta.tool_calls:
            events += self._called(answer, call)
        return events

    def close(self) -> list[Event]:
        """Ends the block that is open."""
        if not self._open:
            return []
        block, text = self.blocks[-1], "".join(self._pieces)
        if self._open == "tool_use":
            block["input"] = _read(text)
        else:
            block[self._open] = text
        self._open, self._pieces = "", []
        return [{"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _called(self, answer: Answer, call: ToolCallDelta) -> list[Event]:
        events: list[Event] = []
        if call.name:
            events = self.close()
            named = {"id": answer.call_id(call.index), "name": call.name, "input": {}}
            events += self._opened("tool_use", named)
        if call.arguments:
            events.append(self._piece("input_json_delta", "partial_json", call.arguments))
        return events

    def _opened(self, kind: str, empty: dict[str, Any]) -> list[Event]:
        if self._open == kind and kind != "tool_use":
            return []
        events = self.close()
        self._open = kind
        self.blocks.append({"type": kind, **empty})
        begun = {"index": len(self.blocks) - 1, "content_block": {"type": kind, **empty}}
        return [*events, {"type": "content_block_start", **begun}]

    def _piece(self, kind: str, field: str, text: str) -> Event:
        self._pieces.append(text)
        delta = {"type": kind, field: text}
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def _read(arguments: str) -> Any:
    """Of a call. A model's own, that nothing holds to a schema, may be no JSON."""
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return {"invalid_json": arguments}


def message(answer: Answer, content: Content, cost: Cost | None = None) -> dict[str, Any]:
    reason, stop = stop_reason(answer)
    return {
        **opening(answer),
        "content": content.blocks,
        "stop_reason": reason,
        "stop_sequence": stop,
        "usage": usage(answer),
        "penstock": extension(answer, cost),
    }


def opening(answer: Answer) -> dict[str, Any]:
    """Before anything is said."""
    return {
        "id": "msg_" + answer.request_id.removeprefix("req_"),
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage(answer),
    }


def stop_reason(answer: Answer) -> tuple[str, str | None]:
    if answer.stop:
        return "stop_sequence", answer.stop
    return _STOP_REASONS.get(answer.finish, "end_turn"), None


def usage(answer: Answer) -> dict[str, int]:
    """As Anthropic counts: what the cache had is no input."""
    used = total_usage([answer])
    return {
        "input_tokens": used.prompt_tokens - used.cached_tokens,
        "cache_read_input_tokens": used.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": used.completion_tokens,
    }


def error_body(error: PenstockError) -> dict[str, Any]:
    """Anthropic's error shape, and what Penstock's own tells besides."""
    status = http_status(error)
    kind = _ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    told = {"type": kind, "message": error.message, "param": error.param or None}
    more = {"code": error.reason or error.code.name.lower(), "stage": error.stage or "gateway"}
    return {"type": "error", "error": {**told, **more}}
