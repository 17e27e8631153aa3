"""What is known of a chat's next prompt, and whether computing it ahead pays."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from protos.common_pb2 import FINISH_STOP, Message, Passage, Usage
from protos.tokenizer_pb2 import Chat, PromptRequest
from services.common.config import TokenizerSettings
from services.common.errors import unavailable
from services.common.redis import Redis
from services.common.telemetry.telemetry import Telemetry
from services.common.text.content import said
from services.tokenizer import metrics
from services.tokenizer.checkpoints.models import ServedModel
from services.tokenizer.warming.known import Known, known
from services.tokenizer.warming.payoff import Payoff, conversation
from services.tokenizer.warming.warming import Warming
from tests.unit.tokenizer.conftest import MakeModel, messages, passages

ANSWER = "The water at the end of the penstock has a pressure of 12 bar, and it is cold. " * 2
REASONING = "<think>They ask for the pressure: it is told, 12 bar.</think>"

# Whatever was reasoned is not shown again.
REASONS = """\
{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}<|eos|>{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
NO_SYSTEM = """\
{%- if messages[0].role == 'system' -%}{{ raise_exception('no system') }}{%- endif -%}
{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}<|eos|>{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
TALK = messages(("system", "Be brief."), ("user", "What is the pressure of the water?"))


def found(*texts: str) -> list[Passage]:
    """By a search, which the next question has again."""
    some = passages(*texts)
    for one in some:
        one.source_id = "file-1"
    return some


def prompt(model: ServedModel, talk: Sequence[Message], its: Sequence[Passage] = ()) -> list[int]:
    assert model.template is not None
    return list(model.encoder.encode(model.template.render(talk, its)).ids)


def after(
    model: ServedModel, talk: list[Message], answer: str, its: Sequence[Passage] = ()
) -> Known | None:
    """`answer`: as the model wrote it."""
    computed = prompt(model, talk, its)
    computed += model.tokenizer.encode(answer, add_special_tokens=False).ids
    told = answer.removeprefix(REASONING)
    return known(model, Chat(messages=talk, passages=its), told, computed)


def nexts(model: ServedModel, talk: list[Message], its: Sequence[Passage] = ()) -> list[list[int]]:
    questions = ["Why?", "and when does it open?", "x", "12 bar?", "Ünd wo?"]
    return [
        prompt(model, [*talk, said("assistant", ANSWER), said("user", one)], its)
        for one in questions
    ]


def test_an_answer_that_stays_as_it_is_leaves_nothing_to_compute(model: ServedModel) -> None:
    its = after(model, TALK, ANSWER)
    assert its is not None
    assert its.gain < 8  # what the template puts behind it
    assert all(one[: len(its.token_ids)] == its.token_ids for one in nexts(model, TALK))


def test_reasoning_that_leaves_the_history_is_known_to(make_model: MakeModel) -> None:
    model = make_model(chat_template=REASONS)
    its = after(model, TALK, REASONING + ANSWER)
    assert its is not None
    assert its.gain >= len(model.tokenizer.encode(ANSWER).ids)
    assert all(one[: len(its.token_ids)] == its.token_ids for one in nexts(model, TALK))


def test_of_passages_that_the_next_question_finds_nothing_is_taken_for_known(
    make_model: MakeModel,
) -> None:
    """So what is warmed holds nothing of a store, which may be written to meanwhile."""
    talk = TALK[1:]
    model = make_model(chat_template=NO_SYSTEM)
    first = found("The pressure is 12 bar.", "The water is cold.")
    its = after(model, talk, ANSWER, first)
    assert its is not None
    assert its.gain > 32
    text = model.decode(its.token_ids)
    assert ANSWER in text
    assert not any(one in text for one in ("Passages", "The water is cold."))
    for other in ([], found("Something else."), first):
        assert all(one[: len(its.token_ids)] == its.token_ids for one in nexts(model, talk, other))


def test_where_passages_stand_before_the_turns_no_turn_is_known(model: ServedModel) -> None:
    its = after(model, TALK, ANSWER, found("The pressure is 12 bar."))
    assert its is not None
    assert its.gain == 0
    assert "pressure" not in model.decode(its.token_ids)


def test_passages_of_the_client_come_again(model: ServedModel) -> None:
    given = passages("The pressure is 12 bar.")
    its = after(model, TALK, ANSWER, given)
    assert its is not None
    assert its.gain < 8
    assert "12 bar" in model.decode(its.token_ids)
    assert all(one[: len(its.token_ids)] == its.token_ids for one in nexts(model, TALK, given))


def test_what_will_be_cut_or_refused_is_not_known(make_model: MakeModel) -> None:
    assert after(make_model(window=64), TALK, ANSWER) is None
    short = "{%- if messages | length > 2 -%}{{ raise_exception('no') }}{%- endif -%}"
    model = make_model(chat_template=short + "{{ messages[0].content }}")
    assert known(model, Chat(messages=TALK), ANSWER, [1, 2]) is None


# ---- whose next turn it is ----------------------------------------------------------------------


def request(*turns: tuple[str, str], **fields: str) -> PromptRequest:
    return PromptRequest(chat=Chat(messages=messages(*turns)), **{"model": "m", **fields})


TURNS = (("system", "Be brief."), ("user", "What?"))


def test_a_next_turn_is_known_by_what_was_said() -> None:
    key = conversation(request(*TURNS), "Water.")
    assert conversation(request(*TURNS, ("assistant", "Water."), ("user", "Why?"))) == key
    others = [
        request(*TURNS, ("assistant", "Water"), ("user", "Why?")),
        request(*TURNS, ("user", "Why?")),
        request(TURNS[1], ("assistant", "Water."), ("user", "Why?")),
        request(*TURNS, ("assistant", "Water."), ("user", "Why?"), model="n"),
    ]
    assert key not in [conversation(one) for one in others]
    assert conversation(request(*TURNS)) == ""


# ---- whether it pays ----------------------------------------------------------------------------


@pytest.fixture
def payoff(redis: Redis, namespace: str) -> Payoff:
    return Payoff(redis, namespace, tokens_a_minute=100, least=0.25)


async def test_a_tenants_budget_is_its_own(payoff: Payoff, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [6000.0]
    monkeypatch.setattr("services.tokenizer.warming.payoff.time.time", lambda: now[0])
    assert await payoff.take("a", 60)
    assert not await payoff.take("a", 60)
    assert await payoff.take("a", 40), "what was refused was not spent"
    assert await payoff.take("b", 100)
    await payoff.settle("b", 100, 30)
    assert await payoff.take("b", 40), "what was not computed was not spent"
    await payoff.settle("b", 40, 60)
    assert not await payoff.take("b", 11), "what was computed besides was"
    assert await payoff.take("b", 10)
    now[0] += 60
    assert await payoff.take("a", 100)


async def test_what_no_router_took_is_not_spent(
    redis: Redis, namespace: str, model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nobody() -> None:
        raise unavailable("no router is ready", stage="router")

    monkeypatch.setattr("services.tokenizer.warming.warming.known", lambda *_: Known([1] * 99, 0))
    monkeypatch.setattr("services.tokenizer.warming.payoff.time.time", lambda: 6000.0)
    routers, settings = (
        SimpleNamespace(pick_least_loaded=nobody),
        TokenizerSettings(warm_tokens_per_minute=100),
    )
    telemetry = Telemetry("tokenizer", "tokenizer-1")
    warming = Warming(settings, redis, namespace, cast(Any, routers), telemetry)
    output = SimpleNamespace(told=["yes"], token_ids=[2], reasoned=False, finish=FINISH_STOP)
    asked = request(("user", "Is it cold?"))
    asked.caller.tenant = "a"
    prompt = SimpleNamespace(token_ids=[1], was_cut=False)
    warming.answered(model, asked, cast(Any, prompt), cast(Any, output), "")
    await asyncio.gather(*warming._tasks)
    assert await warming._payoff.take("a", 100)
    warming.stop()


async def test_a_hit_is_what_the_next_turn_found_of_it(payoff: Payoff) -> None:
    told = (metrics.WARMED_HIT_TOKENS, metrics.WARMED_SAVED_SECONDS)
    for one in told:
        one.reset()  # sums with what other tests left would be rounded
    await payoff.warmed("a", "m", "talk", tokens=400, ahead=100, took_s=2.0)
    await payoff.next_turn("a", "m", "talk", Usage(prompt_tokens=500, cached_tokens=350))
    assert [one._value.get() for one in told] == [50, 1.0]
    await payoff.next_turn("a", "m", "talk", Usage(prompt_tokens=500, cached_tokens=400))
    assert told[0]._value.get() == 50, "it counts once"


async def test_what_was_evicted_and_another_tenants_is_no_hit(payoff: Payoff) -> None:
    before = metrics.WARMED_HIT_TOKENS._value.get()
    evicted = metrics.WARMED_TURNS.labels("evicted")
    was = evicted._value.get()
    await payoff.warmed("a", "m", "talk", tokens=400, ahead=100, took_s=2.0)
    await payoff.next_turn("b", "m", "talk", Usage(cached_tokens=400))
    await payoff.next_turn("a", "m", "talk", Usage(cached_tokens=300))
    assert metrics.WARMED_HIT_TOKENS._value.get() == before
    assert evicted._value.get() - was == 1


async def test_what_does_not_pay_is_left_but_for_a_few_until_it_does(payoff: Payoff) -> None:
    for number in range(16):
        assert payoff.pays("a", "m")
        await payoff.warmed("a", "m", str(number), 400, 100, 1.0)
    tried = sum(payoff.pays("a", "m") for _ in range(160))
    assert tried == 10
    assert payoff.pays("a", "n")
    assert payoff.pays("b", "m")
    for number in range(4):
        await payoff.next_turn("a", "m", str(number), Usage(cached_tokens=400))
    assert all(payoff.pays("a", "m") for _ in range(10))
