"""Answers in the shapes of OpenAI's API, and what Penstock adds to them.

"penstock": {
  "request_id": "req_…",                          for GET /v1/requests/{id}
  "plan": {"window": …, "system": …, …},          tokens per part of the prompt; of several
                                                  prompts "plans", a list
  "passages": [{"index", "file_id", "filename", "title", "score"}, …],   in the prompt, as cited
  "search": {"query": …, "rewritten": …, "tokens": …},    what the stores were searched for
  "citations": {"cited", "unknown", "quoted", "unfounded"},    where there are passages
  "warning": "…"                                  only if something asked for was left out
  "cost": 0.00012, "currency": "USD"              of the whole request, where its model has a
                                                  price; streamed: in the last chunk
}
"""

import json
from collections.abc import Sequence
from typing import Any

import orjson

from protos.common_pb2 import (
    FINISH_CONTENT_FILTER,
    FINISH_LENGTH,
    FINISH_TOOL_CALLS,
    Searched,
    Usage,
)
from protos.tokenizer_pb2 import TextDelta, ToolCallDelta
from services.gateway.api.rest import logprobs
from services.gateway.metering.prices import Cost
from services.gateway.runs.citations import Checked, annotations, filename, place
from services.gateway.runs.prompt import Answer, total_usage

_FINISH = {
    FINISH_LENGTH: "length",
    FINISH_TOOL_CALLS: "tool_calls",
    FINISH_CONTENT_FILTER: "content_filter",
}
DONE = b"data: [DONE]\n\n"
_escaping = json.JSONEncoder(separators=(",", ":")).encode

_PLAN = (
    "window",
    "system",
    "history",
    "passages",
    "user",
    "template",
    "reserved_output",
    "passages_used",
    "passages_dropped",
    "messages_dropped",
)


def event(content: dict[str, Any]) -> bytes:
    """A server-sent event. ASCII only: some clients also split lines at U+2028 and its like."""
    told = orjson.dumps(content)  # a tenth of json's time
    if not told.isascii():
        told = _escaping(content).encode()
    return b"data: " + told + b"\n\n"


def usage(answers: Sequence[Answer]) -> dict[str, Any]:
    return _counts(total_usage(answers))


def _counts(used: Usage) -> dict[str, Any]:
    told: dict[str, Any] = {
        "prompt_tokens": used.prompt_tokens,
        "completion_tokens": used.completion_tokens,
        "total_tokens": used.prompt_tokens + used.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
    }
    if used.draft_tokens:
        accepted = {"draft_tokens": used.draft_tokens, "accepted_tokens": used.accepted_tokens}
        told["speculation"] = accepted
    return told


def finish_reason(answer: Answer) -> str:
    return _FINISH.get(answer.finish, "stop")


def extension(answer: Answer, cost: Cost | None = None) -> dict[str, Any]:
    """The "penstock" object."""
    told = {
        "request_id": answer.request_id,
        "plan": _plan(answer),
        "passages": [
            {
                "index": index,
                "file_id": passage.source_id or None,
                "filename": filename(passage),
                "title": passage.title,
                **place(passage),
                "score": round(passage.score, 4),
            }
            for index, passage in enumerate(answer.passages_used, 1)
        ],
    }
    if answer.search is not None:
        told["search"] = searched(answer.search)
    if answer.finish and (checked := answer.citations) is not None:
        told["citations"] = citations(checked)
    return {**told, **({"warning": answer.warning} if answer.warning else {}), **priced(cost)}


def citations(checked: Checked) -> dict[str, Any]:
    """What the answer says of its passages, and what of that they do not bear out."""
    return {
        "cited": checked.cited,
        "unknown": list(checked.unknown),
        "quoted": checked.quoted,
        "unfounded": [
            {"index": one.index, "length": one.length, "passages": list(one.passages)}
            for one in checked.unfounded
        ],
    }


def searched(search: Searched) -> dict[str, Any]:
    """How a chat's stores were searched."""
    told: dict[str, Any] = {"query": search.query, "tokens": search.tokens}
    if search.rewritten:
        told["rewritten"] = search.rewritten
    if search.age_s:
        told["age_s"] = round(search.age_s, 3)
    if search.stale:
        told["stale"] = True
    if search.reranked:
        told["reranked"] = search.reranked
    if search.not_reranked:
        told["not_reranked"] = search.not_reranked
    return told


def priced(cost: Cost | None) -> dict[str, Any]:
    return {"cost": cost.amount, "currency": cost.currency} if cost else {}


def _plan(answer: Answer) -> dict[str, int]:
    plan = answer.plan
    return {name: getattr(plan, name) for name in _PLAN}


def chat_completion(answers: Sequence[Answer], cost: Cost | None = None) -> dict[str, Any]:
    """`answers`: the choices of one chat. Without their logprobs (whole.py)."""
    first = answers[0]
    return {
        "id": "chatcmpl-" + first.request_id.removeprefix("req_"),
        "object": "chat.completion",
        "created": first.created,
        "model": first.model,
        "choices": [_chat_choice(answer) for answer in answers],
        "usage": usage(answers),
        "penstock": extension(first, cost),
    }


def _chat_choice(answer: Answer) -> dict[str, Any]:
    text = answer.text
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    message["annotations"] = annotations(text, answer.passages_used)
    if answer.calls:
        message["content"] = text or None
        message["tool_calls"] = [
            _call(answer, index, call.name, call.arguments)
            for index, call in enumerate(answer.calls)
        ]
    if answer.reasons:
        message["reasoning_content"] = answer.reasoning
    choice = {
        "index": answer.index,
        "message": message,
        "logprobs": None,
        "finish_reason": finish_reason(answer),
    }
    if answer.choice and (checked := answer.citations) is not None:  # the first one's stand below
        choice["penstock"] = {"citations": citations(checked)}
    return choice


def _call(answer: Answer, index: int, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": answer.call_id(index), "type": "function", "function": function}


def text_completion(answers: Sequence[Answer], cost: Cost | None = None) -> dict[str, Any]:
    """Likewise."""
    choices = [
        {
            "index": answer.index,
            "text": (answer.echo.text if answer.echo else "") + answer.text,
            "logprobs": None,
            "finish_reason": finish_reason(answer),
        }
        for answer in answers
    ]
    first = answers[0]
    prompts = [answer for answer in answers if not answer.choice]
    plans = [_plan(answer) for answer in prompts]
    told = {"request_id": first.request_id, "plans": plans, **priced(cost)}
    return {
        "id": "cmpl-" + first.request_id.removeprefix("req_"),
        "object": "text_completion",
        "created": first.created,
        "model": first.model,
        "choices": choices,
        "usage": usage(answers),
        "penstock": told if len(prompts) > 1 else extension(first, cost),
    }


class Chunks:
    """The events of one streamed answer, which may be one of several in the stream. All but the
    text is made once for the whole stream.
    """

    def __init__(
        self, answer: Answer, *, chat: bool, include_usage: bool, continuous_usage: bool = False
    ) -> None:
        """`continuous_usage`: each event tells what its answer used so far."""
        self._answer = answer
        self._chat = chat
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        id = answer.request_id.removeprefix("req_")
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{id}" if chat else f"cmpl-{id}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": answer.created,
            "model": answer.model,
        }
        self._of_text = logprobs.OfText()
        before, after = self._piece(self._said("\0")).split(rb'"\u0000"')
        self._before, self._after = before, after

    def opening(self) -> bytes:
        """Before a chat's first text: who speaks; before a completion's: the prompt, if it is to
        come back."""
        if self._chat:
            return self._piece({"delta": {"role": "assistant", "content": ""}})
        if (echo := self._answer.echo) is None:
            return b""
        told = self._of_text.echo(echo) if self._answer.wants_logprobs else None
        return self._piece(self._said(echo.text), told)

    def delta(self, delta: TextDelta) -> bytes:
        """Its events, one for each kind of what it says; of text the only work per token. Logprobs
        come with its last event."""
        if not (delta.reasoning or delta.tool_calls or self._answer.wants_logprobs):
            return self._text(delta.text)
        told = None
        if self._answer.wants_logprobs and delta.logprobs:
            told = (logprobs.of_chat if self._chat else self._of_text.next)(delta.logprobs)
        said: list[dict[str, Any]] = []
        if delta.reasoning:
            said.append({"delta": {"reasoning_content": delta.reasoning}})
        if delta.text or not (delta.reasoning or delta.tool_calls or told is None):
            said.append(self._said(delta.text))
        said += [{"delta": {"tool_calls": [self._called(call)]}} for call in delta.tool_calls]
        events = [self._piece(one) for one in said[:-1]]
        return b"".join([*events, *(self._piece(last, told) for last in said[-1:])])

    def _text(self, text: str) -> bytes:
        if not text:
            return b""
        if self._continuous_usage:
            return self._piece(self._said(text))
        return self._before + _escaping(text).encode() + self._after

    def _called(self, call: ToolCallDelta) -> dict[str, Any]:
        piece: dict[str, Any] = {"index": call.index, "function": {"arguments": call.arguments}}
        if call.name:
            piece |= _call(self._answer, call.index, call.name, call.arguments)
        return piece

    def closing(self, cost: Cost | None = None) -> bytes:
        """After the last text: why it ended, and sources. `cost`: of the request, with the last
        answer of it."""
        answer = self._answer
        ended: dict[str, Any] = {"finish_reason": finish_reason(answer)}
        if self._chat:
            ended["delta"] = {}
            if cited := annotations(answer.text, answer.passages_used):
                ended["delta"] = {"annotations": cited}
        else:
            ended["text"] = ""
        return self._event(ended, penstock=extension(answer, cost))

    def ending(self, answers: Sequence[Answer], cost: Cost | None = None) -> bytes:
        """After the last event of all answers: usage if asked for, the end mark."""
        if not self._include_usage:
            return DONE
        told: dict[str, Any] = {**self._head, "choices": [], "usage": usage(answers)}
        return event({**told, "penstock": priced(cost)} if cost else told) + DONE

    def _said(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}} if self._chat else {"text": text}

    def _piece(self, said: dict[str, Any], told: dict[str, Any] | None = None) -> bytes:
        """`told`: logprobs."""
        return self._event({**said, "finish_reason": None, "logprobs": told})

    def _event(self, choice: dict[str, Any], **more: Any) -> bytes:
        if self._continuous_usage:
            more["usage"] = _counts(self._answer.used)
        elif self._include_usage:
            more["usage"] = None  # as OpenAI does on all chunks but the last
        choice = {"index": self._answer.index, "logprobs": None, **choice}
        return event({**self._head, "choices": [choice], **more})
