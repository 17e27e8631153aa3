"""A generation asked for in memory, by stand-ins for the client and the gateway's neighbours."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from protos.common_pb2 import (
    FINISH_STOP,
    Record,
    Span,
    Status,
    Usage,
)
from protos.tokenizer_pb2 import PromptPlan, PromptRequest, TextDelta
from services.common.errors import PenstockError
from services.common.link import End
from services.gateway.identity.principal import Principal
from services.gateway.intake import Place
from services.gateway.metering.prices import Cost
from services.gateway.runs.pipeline import serve
from services.gateway.runs.prompt import Answer, Prompt
from tests.support.gateway_parts import MODEL, Opened, Tokenizers, gateway_parts

CODE = grpc.StatusCode


class Front:
    """A client's side, in memory."""

    write_now: Callable[[Answer, list[TextDelta]], None] | None = None

    def __init__(self, *prompts: Prompt, key: str = "Bearer k") -> None:
        self.request_id = f"req_{id(self)}"
        self.route = "Test"
        self.endpoint = "POST /v1/chat/completions"
        self.authorization: str | None = key
        self.traceparent: str | None = None
        self.prompts = list(prompts) or [asks()]
        self.places: list[Place] = []
        self.refuses: Exception | None = None
        self.texts: dict[int, str] = {}
        self.finished: list[Answer] = []

    async def read(self, principal: Principal, place: Place) -> list[Prompt]:
        self.places.append(place)
        place.hold(10)
        if self.refuses is not None:
            raise self.refuses
        return self.prompts

    async def write(self, answer: Answer, deltas: list[TextDelta]) -> None:
        text = "".join(delta.text for delta in deltas)
        self.texts[answer.index] = self.texts.get(answer.index, "") + text

    def admitted(self, headers: Mapping[str, str]) -> None:
        self.headers = dict(headers)

    @property
    def shown(self) -> bool:
        return bool(self.texts)

    async def finish(self, answers: list[Answer], cost: Cost | None) -> None:
        self.finished, self.cost = answers, cost


def asks(text: str = "Hi", model: str = MODEL, **more: Any) -> Prompt:
    return Prompt(PromptRequest(model=model, text=text), **more)


def usage(prompt: int = 8, cached: int = 4, completion: int = 3) -> Usage:
    return Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion)


def says(*words: str, used: Usage | None = None, passages: int = 9) -> Callable[[Opened], None]:
    def script(opened: Opened) -> None:
        plan = PromptPlan(window=512, passages_used=passages)
        for number, word in enumerate(words):
            first = {} if number else {"plan": plan}
            opened.say(TextDelta(text=word, token_ids=[1, 2], **first))
        opened.say(TextDelta(finish=FINISH_STOP, usage=used or usage()))
        opened.finish()

    return script


def ends(code: grpc.StatusCode, *words: str, **status: Any) -> Callable[[Opened], None]:
    def script(opened: Opened) -> None:
        opened.say(*[TextDelta(text=word, token_ids=[1]) for word in words])
        below = Record(spans=[Span(service="worker", name="step")])
        told = Status(code=code.value[0], **{"stage": "worker", "reason": "odd", **status})
        opened.finish(End(status=told, record=below))

    return script


@contextmanager
def answering_parts() -> Iterator[Any]:
    with gateway_parts(max_requests=4, max_held_bytes=1000) as parts:
        parts.tokenizers = Tokenizers(says("Hello", " world"))
        yield parts


async def served(parts: Any, front: Front) -> dict[str, Any]:
    """Runs it; what its record tells its tenant."""
    async with asyncio.timeout(30):
        await serve(parts, front)
    return record(parts, front)


async def refused(parts: Any, front: Front) -> PenstockError:
    with pytest.raises(PenstockError) as told:
        await served(parts, front)
    return told.value


def record(parts: Any, front: Front, tenant: str = "acme") -> dict[str, Any]:
    journal = parts.records.find(front.request_id, tenant)
    assert journal is not None
    return dict(journal.as_json())


def nothing_is_held(parts: Any) -> bool:
    return (parts.intake.running, parts.intake.bytes_held) == (0, 0)


def several(count: int) -> list[Prompt]:
    return [asks(f"{n}", param=f"prompt[{n}]") for n in range(count)]
