"""A generation over HTTP: how the answers of one request share its stream."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from protos.common_pb2 import FINISH_STOP, Usage
from protos.tokenizer_pb2 import TextDelta
from services.common.config import Settings
from services.gateway.api.rest.generation import RestFront
from services.gateway.runs.prompt import Answer


class Exchange:
    """A client that takes its time with every write."""

    is_clear = False

    def __init__(self) -> None:
        self.request_id, self.route = "req_1", "/x"
        self.endpoint = "POST /x"
        self.headers_out: dict[str, str] = {}
        self.headers = {"authorization": "Bearer k", "traceparent": "t"}
        self.authorization = "Bearer k"
        self.sent: list[str] = []
        self.writing = self.status = 0
        self.whole: Any = None

    async def _slowly(self) -> None:
        self.writing += 1
        assert self.writing == 1, "one event after the other"
        for _ in range(5):
            await asyncio.sleep(0)
        self.writing -= 1

    async def start_events(self) -> None:
        self.status = 200
        await self._slowly()
        self.sent.append("start")

    async def write(self, events: bytes) -> None:
        await self._slowly()
        self.sent += events.decode().split("\n\n")[:-1]

    def write_now(self, events: bytes) -> None:
        assert not self.writing, "one event after the other"
        self.sent += events.decode().split("\n\n")[:-1]

    async def end_events(self, events: bytes) -> None:
        await self.write(events)

    async def reply(self, body: bytes, content_type: str) -> None:
        assert content_type == "application/json"
        self.whole = json.loads(body)


def front(exchange: Exchange, *, chat: bool, **body: Any) -> RestFront:
    made = RestFront(SimpleNamespace(settings=Settings()), exchange, chat=chat)  # type: ignore[arg-type]
    asked = {"messages": [{"role": "user", "content": "Q"}]} if chat else {"prompt": ["a", "b"]}
    made._prompts(json.dumps({"model": "m", **asked, **body}).encode())
    return made


def answers(count: int) -> list[Answer]:
    return [Answer("req_1", "m", [], index) for index in range(count)]


def deltas(answer: Answer, *texts: str) -> list[TextDelta]:
    made = [TextDelta(text=text, token_ids=[1]) for text in texts]
    answer.add(made)
    return made


def texts(exchange: Exchange) -> list[tuple[int, str]]:
    told = [json.loads(e[6:]) for e in exchange.sent if e.startswith("data: {")]
    choices = [choice for chunk in told for choice in chunk["choices"]]
    return [(c["index"], c["text"]) for c in choices if c.get("text")]


async def test_answers_that_come_at_once_begin_one_stream():
    exchange = Exchange()
    made, both = front(exchange, chat=False, stream=True), answers(2)
    await asyncio.gather(*(made.write(a, deltas(a, "x", "", "y")) for a in both))
    await asyncio.gather(*(made.write(a, deltas(a, "z")) for a in both))
    for answer in both:
        answer.add([TextDelta(finish=FINISH_STOP, usage=Usage(completion_tokens=3))])
    await made.finish(both, None)
    assert exchange.sent.count("start") == 1
    assert exchange.sent[0] == "start"
    assert exchange.sent[-1] == "data: [DONE]"
    told = texts(exchange)
    for index in (0, 1):
        assert [text for of, text in told if of == index] == ["x", "y", "z"]
    ends = [json.loads(e[6:]) for e in exchange.sent[-3:-1]]
    assert [e["choices"][0]["finish_reason"] for e in ends] == ["stop", "stop"]
    assert [e["choices"][0]["index"] for e in ends] == [0, 1]


async def test_what_goes_straight_is_what_would_have_been_written_and_waits_its_turn():
    exchange, other = Exchange(), Exchange()
    straight, plain = (front(one, chat=False, stream=True) for one in (exchange, other))
    (answer,), (same,) = answers(1), answers(1)
    assert straight.write_now is None, "nothing has begun"
    await straight.write(answer, deltas(answer, "x"))
    exchange.is_clear = True
    under_way = asyncio.create_task(straight.write(answer, deltas(answer, "y")))
    await asyncio.sleep(0)
    assert straight.write_now is None, "another event is being written"
    await under_way
    write = straight.write_now
    assert write is not None
    write(answer, deltas(answer, "z", ""))
    for texts_ in (("x",), ("y",), ("z", "")):
        await plain.write(same, deltas(same, *texts_))
    assert texts(exchange) == texts(other) == [(0, "x"), (0, "y"), (0, "z")]


async def test_an_answer_without_text_is_a_whole_stream():
    exchange = Exchange()
    made = front(exchange, chat=True, stream=True, stream_options={"include_usage": True})
    (answer,) = answers(1)
    answer.add([TextDelta(finish=FINISH_STOP)])
    await made.finish([answer], None)
    start, opening, closing, usage, done = exchange.sent
    assert (start, done) == ("start", "data: [DONE]")
    assert '"role":"assistant"' in opening
    assert '"finish_reason":"stop"' in closing
    assert '"total_tokens":0' in usage


@pytest.mark.parametrize("stream", [None, False])
async def test_what_is_not_streamed_is_told_at_the_end(stream):
    exchange = Exchange()
    made, both = front(exchange, chat=False, stream=stream), answers(2)
    for answer in both:
        await made.write(answer, deltas(answer, "x", "y"))
    assert exchange.sent == []
    await made.finish(both, None)
    assert [choice["text"] for choice in exchange.whole["choices"]] == ["xy", "xy"]


async def test_who_asks_is_in_the_headers():
    made = front(Exchange(), chat=True)
    assert (made.authorization, made.traceparent) == ("Bearer k", "t")
    assert (made.request_id, made.route) == ("req_1", "/x")
