"""Answers in the shapes of OpenAI's Responses API: items, their events, the whole."""

import hashlib
from collections.abc import Sequence
from typing import Any

from protos.common_pb2 import FINISH_CONTENT_FILTER, FINISH_LENGTH, Passage
from protos.tokenizer_pb2 import TextDelta, TextLogprob, ToolCallDelta
from services.common.errors import PenstockError
from services.gateway.api.rest import logprobs
from services.gateway.api.rest.openai_format import extension
from services.gateway.metering.prices import Cost
from services.gateway.runs.citations import annotations, filename
from services.gateway.runs.prompt import Answer, total_usage
from services.gateway.stores.vector_stores.store_files import told_attributes

Event = dict[str, Any]
PREFIX = "resp_"
_INCOMPLETE = {FINISH_LENGTH: "max_output_tokens", FINISH_CONTENT_FILTER: "content_filter"}


def response_id(request_id: str) -> str:
    return PREFIX + request_id.removeprefix("req_")


def item_id(prefix: str, request_id: str, index: int) -> str:
    digest = hashlib.blake2b(f"{request_id} {prefix} {index}".encode(), digest_size=16)
    return f"{prefix}_{digest.hexdigest()}"


class Items:
    """What an answer has said, item by item, and the events that tell it. All of it follows from
    the deltas alone."""

    def __init__(self, request_id: str, *, results: bool = False) -> None:
        """`results`: of a search are told too."""
        self.output: list[dict[str, Any]] = []
        self.reasoning_tokens = 0
        self._id = request_id
        self._results = results
        self._searched = False  # that is told
        self._open: dict[str, Any] | None = None  # the last one, if more of it may come
        self._pieces: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def push(self, answer: Answer, delta: TextDelta) -> list[Event]:
        events = self._search(answer)
        if delta.reasoning:
            self.reasoning_tokens += len(delta.token_ids)
            events += self._opened(answer, "reasoning")
            events.append(self._part("response.reasoning_text.delta", delta=delta.reasoning))
            self._pieces.append(delta.reasoning)
        if delta.text or (delta.logprobs and not delta.tool_calls):
            events += self._opened(answer, "message")
            told = _logprobs(delta.logprobs)
            self._pieces.append(delta.text)
            self._logprobs += told
            text = self._part("response.output_text.delta", delta=delta.text, logprobs=told)
            events.append(text)
        for call in delta.tool_calls:
            events += self._called(answer, call)
        return events

    def close(self, answer: Answer, status: str = "completed") -> list[Event]:
        """Ends the item that is open."""
        item, self._open = self._open, None
        if item is None:
            return self._search(answer)
        text, self._pieces = "".join(self._pieces), []
        told, self._logprobs = self._logprobs, []
        item["status"] = status
        at = {"item_id": item["id"], "output_index": len(self.output) - 1}
        events: list[Event] = []
        if item["type"] == "function_call":
            item["arguments"] = text
            done = {"name": item["name"], "arguments": text}
            events.append({"type": "response.function_call_arguments.done", **at, **done})
        else:
            at["content_index"] = 0
            (part,) = item["content"]
            part["text"] = text
            if item["type"] == "message":
                part["logprobs"] = told
                part["annotations"] = annotations(text, answer.passages_used)
                events += [
                    {
                        "type": "response.output_text.annotation.added",
                        **at,
                        "annotation_index": index,
                        "annotation": one,
                    }
                    for index, one in enumerate(part["annotations"])
                ]
                done = {"text": text, "logprobs": told}
                events.append({"type": "response.output_text.done", **at, **done})
            else:
                events.append({"type": "response.reasoning_text.done", **at, "text": text})
            events.append({"type": "response.content_part.done", **at, "part": dict(part)})
        index = len(self.output) - 1
        ended = {"type": "response.output_item.done", "output_index": index, "item": dict(item)}
        return [*events, ended]

    def show(self) -> None:
        """The item that is open tells what has come of it."""
        if self._open is None:
            return
        text = "".join(self._pieces)
        if self._open["type"] == "function_call":
            self._open["arguments"] = text
        else:
            self._open["content"][0]["text"] = text

    def _search(self, answer: Answer) -> list[Event]:
        """Of vector stores, once, before all else."""
        if self._searched or answer.search is None:
            return []
        self._searched = True
        item = {
            "id": item_id("fs", self._id, len(self.output)),
            "type": "file_search_call",
            "status": "completed",
            "queries": [answer.search.query],
            "results": _results(answer.passages) if self._results else None,
        }
        index = len(self.output)
        self.output.append(item)
        begun = {**item, "status": "in_progress", "results": None}
        at = {"output_index": index, "item_id": item["id"]}
        steps = ("in_progress", "searching", "completed")
        return [
            {"type": "response.output_item.added", "output_index": index, "item": begun},
            *({"type": f"response.file_search_call.{step}", **at} for step in steps),
            {"type": "response.output_item.done", "output_index": index, "item": dict(item)},
        ]

    def _opened(self, answer: Answer, kind: str) -> list[Event]:
        """Before text of this kind: its item, if that is not open."""
        if self._open is not None and self._open["type"] == kind:
            return []
        if kind == "message":
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
            part["logprobs"] = []
            item: dict[str, Any] = {"type": kind, "role": "assistant"}
        else:
            part = {"type": "reasoning_text", "text": ""}
            item = {"type": kind, "summary": []}
        events = self._begun(answer, {**item, "content": []}, "msg" if kind == "message" else "rs")
        assert self._open is not None
        self._open["content"] = [part]
        return [*events, self._part("response.content_part.added", part=dict(part))]

    def _called(self, answer: Answer, call: ToolCallDelta) -> list[Event]:
        events: list[Event] = []
        if call.name:
            told = {"call_id": answer.call_id(call.index), "name": call.name, "arguments": ""}
            events = self._begun(answer, {"type": "function_call", **told}, "fc")
        if call.arguments and self._open is not None:
            at = {"item_id": self._open["id"], "output_index": len(self.output) - 1}
            delta = {"type": "response.function_call_arguments.delta", **at}
            events.append({**delta, "delta": call.arguments})
            self._pieces.append(call.arguments)
        return events

    def _begun(self, answer: Answer, item: dict[str, Any], prefix: str) -> list[Event]:
        events = self.close(answer)
        index = len(self.output)
        item = {"id": item_id(prefix, self._id, index), "status": "in_progress", **item}
        self.output.append(item)
        self._open = item
        added = {"type": "response.output_item.added", "output_index": index, "item": dict(item)}
        return [*events, added]

    def _part(self, kind: str, **more: Any) -> Event:
        assert self._open is not None
        at = {"item_id": self._open["id"], "output_index": len(self.output) - 1}
        return {"type": kind, **at, "content_index": 0, **more}


def _results(passages: Sequence[Passage]) -> list[dict[str, Any]]:
    """Those that are not the client's own."""
    return [
        {
            "file_id": passage.source_id,
            "filename": filename(passage),
            "score": passage.score,
            "text": passage.text,
            "attributes": told_attributes(passage.attributes),
        }
        for passage in passages
        if passage.source_id
    ]


def _logprobs(told: Sequence[TextLogprob]) -> list[dict[str, Any]]:
    return list(logprobs.of_chat(told)["content"]) if told else []


def status_of(answer: Answer) -> str:
    return "incomplete" if answer.finish in _INCOMPLETE else "completed"


def response(
    request_id: str,
    told: dict[str, Any],
    status: str,
    items: Items | None = None,
    answer: Answer | None = None,
    *,
    cost: Cost | None = None,
    error: PenstockError | None = None,
) -> dict[str, Any]:
    """The whole. `told`: what the request said, in the answer's own terms."""
    incomplete = _INCOMPLETE.get(answer.finish) if answer is not None else None
    running = answer is None or status in ("queued", "in_progress")
    return {
        "id": response_id(request_id),
        "object": "response",
        "status": status,
        "error": {"code": error.reason or "server_error", "message": error.message}
        if error is not None and status == "failed"
        else None,
        "incomplete_details": {"reason": incomplete} if incomplete and not running else None,
        **told,
        "model": answer.model if answer is not None else told["model"],
        "output": [dict(item) for item in items.output] if items is not None else [],
        "usage": _usage(answer, items) if answer and items and not running else None,
        "penstock": extension(answer, cost) if answer is not None else {"request_id": request_id},
    }


def _usage(answer: Answer, items: Items) -> dict[str, Any]:
    used = total_usage([answer])
    cached = {"cached_tokens": used.cached_tokens, "cache_write_tokens": 0}
    return {
        "input_tokens": used.prompt_tokens,
        "input_tokens_details": cached,
        "output_tokens": used.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": items.reasoning_tokens},
        "total_tokens": used.prompt_tokens + used.completion_tokens,
    }
