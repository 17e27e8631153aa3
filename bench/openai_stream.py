"""One request of a workload through an OpenAI-compatible server, with the times of its stream."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.workload import WorkloadRequest


class StreamError(Exception):
    """The server refused the request, or its stream is not what the API promises."""


@dataclass
class Outcome:
    """What a client saw. Times are in seconds; those of the stream count from `started_s`."""

    id: str
    arrival_s: float  # when the workload wanted it to be sent
    started_s: float = 0.0  # when it was, from the run's start
    ttft_s: float | None = None  # to the first piece of text
    itl_s: list[float] = field(default_factory=list)  # between pieces, of one or more tokens each
    e2e_s: float = 0.0
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first piece; None for fewer than two tokens."""
        if self.ttft_s is None or self.completion_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.completion_tokens - 1)


def body_of(request: WorkloadRequest, model: str) -> tuple[str, dict[str, Any]]:
    """(path below /v1, JSON body)."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.ignore_eos:
        body["ignore_eos"] = True  # an extension that Penstock, vLLM and SGLang share
    if request.seed is not None:
        body["seed"] = request.seed
    if request.messages is not None:
        return "chat/completions", body | {"messages": request.messages}
    prompt = request.prompt if request.prompt is not None else request.prompt_token_ids
    return "completions", body | {"prompt": prompt}


async def perform(
    http: aiohttp.ClientSession,
    request: WorkloadRequest,
    model: str,
    run_start: float,
    limit_s: float,
) -> Outcome:
    """Sends `request` now and reads its stream to the end. Failures are in `Outcome.error`."""
    path, body = body_of(request, model)
    began = time.perf_counter()
    outcome = Outcome(request.id, request.arrival_s, began - run_start)
    try:
        async with asyncio.timeout(limit_s), http.post(path, json=body) as response:
            if response.status != 200:
                raise StreamError(_refusal(response.status, await response.read()))
            await _read(response, outcome, began)
    except aiohttp.ClientError as error:
        outcome.error = f"{type(error).__name__}: {error}"
    except TimeoutError:
        outcome.error = f"not finished within {limit_s:g} s"
    except StreamError as error:
        outcome.error = str(error)
    except (LookupError, TypeError, AttributeError):
        outcome.error = "an event of the stream has not the API's shape"
    outcome.e2e_s = outcome.e2e_s or time.perf_counter() - began
    return outcome


async def _read(response: aiohttp.ClientResponse, outcome: Outcome, began: float) -> None:
    """Whole only with text's end, a finish reason, the usage, and [DONE]."""
    last = began
    pieces: list[str] = []
    usage: dict[str, Any] | None = None
    done = False
    async for at, event in _events(response):
        if event is None:
            done = True  # read on to the response's end, so that the connection is kept
            continue
        if "error" in event:
            raise StreamError(f"in the stream: {_message(event)}")
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            outcome.finish_reason = choice.get("finish_reason") or outcome.finish_reason
            if text:
                if not pieces:
                    outcome.ttft_s = at - began
                else:
                    outcome.itl_s.append(at - last)
                pieces.append(text)
            last = at
    outcome.text = "".join(pieces)
    outcome.e2e_s = last - began
    if not done or outcome.finish_reason is None or usage is None:
        lacks = "[DONE]" if not done else "a finish reason" if usage else "usage"
        raise StreamError(f"the stream ended without {lacks}")
    outcome.prompt_tokens = usage["prompt_tokens"]
    outcome.completion_tokens = usage["completion_tokens"]
    outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def _events(
    response: aiohttp.ClientResponse,
) -> AsyncIterator[tuple[float, dict[str, Any] | None]]:
    """(arrival, event) for each `data:` line of the stream; None for [DONE]."""
    rest = b""
    async for block in response.content.iter_any():
        at = time.perf_counter()
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue  # an empty line, a comment that keeps the connection alive
            data = line[5:].strip()
            if data == b"[DONE]":
                yield at, None
                continue
            try:
                yield at, json.loads(data)
            except ValueError:
                raise StreamError("an event of the stream is not JSON") from None


def _refusal(status: int, body: bytes) -> str:
    try:
        return f"HTTP {status}: {_message(json.loads(body))}"
    except ValueError:
        return f"HTTP {status}: {body[:200].decode(errors='replace')}"


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
