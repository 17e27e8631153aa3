"""How answers leave: each delta at once, joined after a pause, or whole."""

import asyncio
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from protos.common_pb2 import FINISH_CONTENT_FILTER, FINISH_LENGTH, FINISH_STOP
from protos.gateway_pb2 import CompleteRequest, SamplingOptions
from protos.tokenizer_pb2 import PromptPlan, TextDelta, TextLogprob, ToolCallDelta
from services.common.config import Settings
from services.common.errors import PenstockError, unavailable
from services.gateway.api.generation_schema import ChatCompletionRequest, CompletionRequest
from services.gateway.api.grpc.fields import completion_fields
from services.gateway.api.rest import keep_alive
from services.gateway.api.rest.generation import RestFront
from services.gateway.api.schema import parse, validated
from services.gateway.runs.delivery import joined
from services.gateway.runs.pipeline import serve
from services.gateway.runs.prompt import Answer
from tests.support.gateway_parts import Opened, Tokenizers, gateway_parts
from tests.support.waiting import until
from tests.unit.gateway.test_generate import Front, asks, usage
from tests.unit.gateway.test_rest_front import Exchange


@pytest.fixture
def parts() -> Iterator[Any]:
    with gateway_parts(max_requests=4, hybrid_s=60.0) as parts:
        yield parts


class Listing(Front):
    """Keeps each write."""

    def __init__(self, *prompts: Any) -> None:
        super().__init__(*prompts)
        self.writes: list[list[str]] = []

    async def write(self, answer: Answer, deltas: list[TextDelta]) -> None:
        await super().write(answer, deltas)
        self.writes.append([delta.text for delta in deltas])


async def opened_by(parts: Any, front: Front) -> tuple[Opened, "asyncio.Task[None]"]:
    parts.tokenizers = Tokenizers()
    running = asyncio.create_task(serve(parts, front))
    await until(lambda: bool(parts.tokenizers.opened))
    return parts.tokenizers.opened[0], running


def first(text: str, **more: Any) -> TextDelta:
    return TextDelta(text=text, token_ids=[1], plan=PromptPlan(window=9), **more)


def last(finish: int = FINISH_STOP) -> TextDelta:
    return TextDelta(finish=finish, usage=usage())


async def test_streamed_text_leaves_as_it_comes_and_what_waited_leaves_as_one(parts):
    front = Listing(asks())
    opened, running = await opened_by(parts, front)
    opened.say(first("a"))
    await until(lambda: front.writes == [["a"]])
    opened.say(TextDelta(text="b"), TextDelta(text="c"), last())
    opened.finish()
    await running
    assert front.writes == [["a"], ["bc"]]


class Straight(Listing):
    """Written to by plain calls while it is clear."""

    is_clear = True

    @property
    def write_now(self) -> Callable[[Answer, list[TextDelta]], None] | None:  # type: ignore[override]
        return self._write_now if self.is_clear else None

    def _write_now(self, answer: Answer, deltas: list[TextDelta]) -> None:
        self.writes.append(["straight", *(delta.text for delta in deltas)])


async def test_behind_its_first_words_an_answer_goes_straight_while_nobody_is_waited_for(parts):
    front = Straight(asks())
    opened, running = await opened_by(parts, front)
    opened.say(first("a"))
    await until(lambda: front.writes == [["a"]])
    opened.say(TextDelta(text="b", token_ids=[2]), TextDelta(text="c", token_ids=[3]))
    await until(lambda: len(front.writes) == 2)
    front.is_clear = False
    opened.say(TextDelta(text="d", token_ids=[4]))
    await until(lambda: len(front.writes) == 3)
    front.is_clear = True
    opened.say(TextDelta(text="e", token_ids=[5]), last())
    opened.finish()
    await running
    assert front.writes == [["a"], ["straight", "bc"], ["d"], ["straight", "e"]]
    (answer,) = front.finished
    assert (answer.text, answer.tokens, answer.finish) == ("abcde", 5, FINISH_STOP)


@pytest.mark.parametrize("delivery", ["hold", "hybrid"])
async def test_what_is_held_or_gathered_does_not_go_straight(delivery):
    with gateway_parts(max_requests=10**6, hybrid_s=600.0) as parts:  # pauses of 0.6 ms
        front = Straight(asks(delivery=delivery))
        opened, running = await opened_by(parts, front)
        for count, delta in enumerate((first("a"), TextDelta(text="b"), TextDelta(text="c")), 1):
            opened.say(delta)
            if delivery == "hybrid":
                await until(lambda count=count: len(front.writes) == count)
                await asyncio.sleep(0.005)  # its pause is over: it waits for the next
        opened.say(last())
        opened.finish()
        await running
        assert "".join(text for write in front.writes for text in write) == "abc"


async def test_nothing_overtakes_what_is_being_written(parts):
    class Slow(Straight):
        async def write(self, answer: Answer, deltas: list[TextDelta]) -> None:
            if self.writes:
                await written.wait()
            await super().write(answer, deltas)

    written = asyncio.Event()
    front = Slow(asks())
    opened, running = await opened_by(parts, front)
    opened.say(first("a"))
    await until(lambda: front.writes == [["a"]])
    front.is_clear = False
    opened.say(TextDelta(text="b"))
    for _ in range(20):
        await asyncio.sleep(0)
    front.is_clear = True
    opened.say(TextDelta(text="c"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert front.writes == [["a"]]
    written.set()
    opened.say(last())
    opened.finish()
    await running
    assert front.writes[:2] == [["a"], ["b"]]
    assert "".join(text for write in front.writes for text in write) == "abc"


async def test_what_fails_on_its_straight_way_fails_the_request(parts):
    class Broken(Straight):
        def _write_now(self, answer: Answer, deltas: list[TextDelta]) -> None:
            raise unavailable("it broke", stage="gateway")

    front = Broken(asks())
    opened, running = await opened_by(parts, front)
    opened.say(first("a"))
    await until(lambda: front.writes == [["a"]])
    opened.say(TextDelta(text="b"))
    with pytest.raises(PenstockError, match="it broke"):
        await asyncio.wait_for(running, 10)
    assert opened.cancelled


@pytest.mark.parametrize("by", ["client", "policy", "settings"])
@pytest.mark.parametrize("finish", [FINISH_STOP, FINISH_LENGTH, FINISH_CONTENT_FILTER])
async def test_held_text_leaves_whole_or_not_at_all(by, finish):
    with gateway_parts(delivery="hold" if by == "settings" else "stream") as parts:
        front = Listing(asks(delivery="hold" if by == "client" else ""))
        opened, running = await opened_by(parts, front)
        opened.say(first("a", hold=by == "policy"))
        opened.say(TextDelta(text="b", reasoning="r"))
        opened.say(TextDelta(tool_calls=[ToolCallDelta(name="f", arguments="{}")]))
        for _ in range(20):  # turns in which it could leave
            await asyncio.sleep(0)
        assert front.writes == []
        opened.say(last(finish))
        opened.finish()
        await running
        (answer,) = front.finished
        if finish == FINISH_CONTENT_FILTER:
            assert (front.writes, answer.text, answer.reasoning, answer.calls) == ([], "", "", [])
        else:
            assert (front.writes, answer.text, answer.reasoning) == ([["ab"]], "ab", "r")
        assert answer.finish == finish


async def test_a_held_answer_that_fails_has_shown_nothing(parts):
    front = Listing(asks(delivery="hold"))
    opened, running = await opened_by(parts, front)
    opened.say(first("a"))
    opened.finish()
    with pytest.raises(PenstockError):
        await running
    assert (front.writes, front.shown) == ([], False)


async def test_hybrid_waits_with_the_load_and_never_past_the_end(parts):
    front = Listing(asks(delivery="hybrid"))
    began = time.monotonic()
    opened, running = await opened_by(parts, front)
    opened.say(first("a"))
    await until(lambda: front.writes == [["a"]])  # the first waits for nothing
    for text in "bcd":
        opened.say(TextDelta(text=text))
        await asyncio.sleep(0)
    assert front.writes == [["a"]], "a pause of a quarter of a minute, with one of four slots taken"
    opened.say(last())
    opened.finish()
    await running
    assert front.writes == [["a"], ["bcd"]]
    assert time.monotonic() - began < 10


async def test_hybrid_is_a_stream_where_nothing_runs():
    with gateway_parts(max_requests=10**6, hybrid_s=600.0) as parts:
        front = Listing(asks(delivery="hybrid"))
        opened, running = await opened_by(parts, front)
        for count, delta in enumerate((first("a"), TextDelta(text="b"), TextDelta(text="c")), 1):
            opened.say(delta)
            await until(lambda count=count: len(front.writes) == count)
        opened.say(last())
        opened.finish()
        await running
        assert front.writes == [["a"], ["b"], ["c"], [""]]


def test_only_what_is_of_one_kind_is_joined():
    call = TextDelta(tool_calls=[ToolCallDelta(index=0, arguments="x")])
    told = TextLogprob()
    given = [
        TextDelta(reasoning="r"), TextDelta(reasoning="s"), TextDelta(text="a", logprobs=[told]),
        TextDelta(text="b", logprobs=[told, told]), call, call, TextDelta(text="c", reasoning="t"),
    ]  # fmt: skip
    whole = [(d.text, d.reasoning, len(d.logprobs), len(d.tool_calls)) for d in joined(given)]
    assert whole == [
        ("", "rs", 0, 0), ("ab", "", 3, 0), ("", "", 0, 1), ("", "", 0, 1), ("c", "t", 0, 0),
    ]  # fmt: skip


def test_delivery_is_of_streams():
    body = b'{"model": "m", "messages": [{"role": "user", "content": "Q"}], "delivery": %s%s}'
    settings = Settings().gateway
    held = parse(ChatCompletionRequest, body % (b'"hold"', b', "stream": true'), settings)
    assert held.prompt(4).delivery == "hold"
    for wrong in (body % (b'"hold"', b""), body % (b'"later"', b', "stream": true')):
        with pytest.raises(PenstockError) as refused:
            parse(ChatCompletionRequest, wrong, settings)
        assert refused.value.param == "delivery"


def test_over_grpc_it_is_an_option_too():
    options = SamplingOptions(delivery="hold")
    limits = Settings().gateway
    fields = completion_fields(CompleteRequest(model="m", text="Q", sampling=options), limits)
    (prompt,) = validated(CompletionRequest, fields, limits).prompts(limits)
    assert prompt.delivery == "hold"


async def test_a_silent_stream_is_kept_alive_until_it_ends():
    exchange, settings = Exchange(), Settings()
    settings.gateway.sse_keep_alive_s = 0.01
    front = RestFront(SimpleNamespace(settings=settings), exchange, chat=True)  # type: ignore[arg-type]
    front._prompts(
        b'{"model": "m", "messages": [{"role": "user", "content": "Q"}], "stream": true}'
    )
    front.admitted({})
    await until(lambda: exchange.sent.count(": keep-alive") > 2)
    assert exchange.sent[0] == "start"
    answer = Answer("req_1", "m", [])
    answer.add([TextDelta(text="x")])
    await front.write(answer, [TextDelta(text="x")])
    await until(lambda: exchange.sent[-1] == ": keep-alive")
    answer.add([last()])
    await front.finish([answer], None)
    assert front._keeping._timer is None, "it would speak on"
    assert exchange.sent[-1] == "data: [DONE]"
    assert exchange.sent.count("start") == 1


async def test_who_is_spoken_to_hears_no_comments(monkeypatch):
    due: list[Callable[[], None]] = []

    class Loop:
        def call_later(self, _: float, look: Callable[[int], None], spoke: int) -> Any:
            due.append(partial(look, spoke))
            return SimpleNamespace(cancel=due.clear)

    clock = SimpleNamespace(**{**vars(asyncio), "get_running_loop": Loop})
    monkeypatch.setattr(keep_alive, "asyncio", clock)
    exchange = Exchange()
    front = RestFront(SimpleNamespace(settings=Settings()), exchange, chat=False)  # type: ignore[arg-type]
    front._prompts(b'{"model": "m", "prompt": "Q"}')
    front.admitted({})
    assert not due, "an answer that is not streamed has no comments"
    front._prompts(b'{"model": "m", "prompt": "Q", "stream": true}')
    front.admitted({})
    answer = Answer("req_1", "m", [])
    for spoken in (True, True, False):
        look = due.pop()
        if spoken:
            answer.add([TextDelta(text="x")])
            await front.write(answer, [TextDelta(text="x")])
        look()
        await until(lambda: bool(due))
    front.close()
    assert not due
    assert exchange.sent.count(": keep-alive") == 1
    assert exchange.sent[-1] == ": keep-alive"
