"""An answer in one piece of JSON. Its logprobs may be some hundred thousand (16 choices, of each
token the 20 best): they are encoded a few tokens at a time, between which the loop is others'."""

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson

from protos.tokenizer_pb2 import TextLogprob
from services.gateway.api.rest import logprobs
from services.gateway.api.rest.openai_format import chat_completion, text_completion
from services.gateway.metering.prices import Cost
from services.gateway.runs.prompt import Answer

_TOKENS = 32
"""At once: 20 candidates of each take a millisecond."""


async def completion(answers: Sequence[Answer], cost: Cost | None, *, chat: bool) -> dict[str, Any]:
    """For orjson."""
    content = (chat_completion if chat else text_completion)(answers, cost)
    for choice, answer in zip(content["choices"], answers, strict=True):
        if answer.wants_logprobs:
            choice["logprobs"] = await (_of_chat if chat else _of_text)(answer)
    return content


async def _of_chat(answer: Answer) -> orjson.Fragment:
    pieces: list[bytes] = []
    for some in _portions(answer.logprobs):
        pieces.append(_inner(logprobs.of_chat(some)["content"]))
        await asyncio.sleep(0)
    return orjson.Fragment(b'{"content":[' + b",".join(pieces) + b'],"refusal":null}')


async def _of_text(answer: Answer) -> dict[str, orjson.Fragment]:
    of_text = logprobs.OfText()
    pieces: dict[str, list[bytes]] = {name: [] for name in of_text.next(())}

    async def add(told: dict[str, list[Any]]) -> None:
        for name, values in told.items():
            if values:
                pieces[name].append(_inner(values))
        await asyncio.sleep(0)

    if answer.echo is not None:
        for told in of_text.of_echo(answer.echo, _TOKENS):
            await add(told)
    for some in _portions(answer.logprobs):
        await add(of_text.next(some))
    return {name: orjson.Fragment(b"[" + b",".join(of) + b"]") for name, of in pieces.items()}


def _portions(told: Sequence[TextLogprob]) -> list[Sequence[TextLogprob]]:
    return [told[start : start + _TOKENS] for start in range(0, len(told), _TOKENS)]


def _inner(values: list[Any]) -> bytes:
    """Without the list's brackets."""
    return orjson.dumps(values)[1:-1]
