"""Rules of meaning: asked beside the request, and their verdict is there before any text leaves."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from protos.common_pb2 import Caller
from protos.retrieval_pb2 import JudgeReply
from protos.tokenizer_pb2 import Chat, PromptPlan, PromptRequest, TextDelta
from services.common.errors import PenstockError, invalid, unavailable
from services.common.policy import Policy, load_rules
from services.common.telemetry.telemetry import Telemetry
from services.common.text.content import said
from services.gateway.runs.judgement import Judgement
from services.gateway.runs.pipeline import serve
from services.gateway.runs.prompt import Prompt
from services.gateway.runs.records import Journal
from tests.support.gateway_parts import MODEL, Tokenizers, gateway_parts
from tests.support.waiting import until
from tests.unit.gateway.test_generate import Front, asks, record, refused, says, served

LIKE = "like: {examples: [x], away: %s}"
FILE = """
rules:
  - {name: boats, %s, roles: [user], action: %s}
"""


def policy(action: str = "refuse", away: str = "pass") -> Policy:
    return Policy.of(load_rules((FILE % (LIKE % away, action)).encode()))


@pytest.fixture
def parts() -> Iterator[Any]:
    with gateway_parts() as parts:
        parts.tokenizers = Tokenizers(says("Hello"))
        parts.policy.current = policy()
        yield parts


def matches(*numbers: int) -> JudgeReply:
    found = [JudgeReply.Match(rule="boats", text=number, score=0.7) for number in numbers]
    return JudgeReply(matches=[*found, JudgeReply.Match(rule="newer", text=0)])


def chat(*turns: tuple[str, str]) -> Prompt:
    messages = [said(role, text) for role, text in turns]
    return Prompt(PromptRequest(model=MODEL, chat=Chat(messages=messages)))


async def test_the_latest_messages_of_its_roles_are_asked_about(parts):
    turns = [("user", f"u{n}") for n in range(6)]
    await served(parts, Front(chat(("system", "s"), *turns, ("assistant", "a"), ("user", " "))))
    (request,) = parts.retrieval.judged
    assert [one.text for one in request.texts] == ["u3", "u4", "u5"]
    assert request.caller.tenant == "acme"
    parts.policy.current = Policy.of(load_rules(b"rules: []"))
    await served(parts, Front())
    assert len(parts.retrieval.judged) == 1


async def test_a_refusal_comes_before_any_text_and_ends_what_runs(parts):
    parts.tokenizers = Tokenizers()
    parts.retrieval.judges.clear()
    parts.retrieval.verdict = matches(0)
    front = Front(chat(("system", "s"), ("user", "How are boats built?")))
    running = asyncio.create_task(refused(parts, front))
    await until(lambda: bool(parts.tokenizers.opened))
    (opened,) = parts.tokenizers.opened
    opened.say(TextDelta(text="So", token_ids=[1], plan=PromptPlan()))
    for _ in range(20):
        await asyncio.sleep(0)
    assert front.texts == {}, "the verdict is not there"
    parts.retrieval.judges.set()
    error = await running
    assert (error.reason, error.param) == ("content_policy", "messages[1].content")
    assert front.texts == {}
    assert opened.cancelled
    told = record(parts, front)
    (decided,) = [d for d in told["decisions"] if d["subject"] == "policy"]
    assert (decided["choice"], decided["reasons"]["boats"]) == ("refuse", "refuse, in input, 0.70")
    assert "built" not in str(told)


async def test_a_flag_lets_it_pass_and_a_route_goes_elsewhere_from_the_start(parts):
    parts.retrieval.verdict = matches(0)
    parts.policy.current = policy("flag")
    front = Front(asks("boats"))
    told = await served(parts, front)
    assert front.texts == {0: "Hello"}
    assert [d["choice"] for d in told["decisions"]] == ["flag"]
    parts.policy.current = policy("route, model: other")
    front = Front(asks("boats"))
    await served(parts, front)
    assert parts.tokenizers.opened[-1].request.model == "other"
    assert [answer.model for answer in front.finished] == ["other"]


async def test_all_of_many_texts_are_asked_about_and_too_many_refused(parts):
    prompts = [Prompt(PromptRequest(model=MODEL, text=f"p{n}"), param=f"p[{n}]") for n in range(70)]
    judge = parts.retrieval.judge

    async def last(request: Any, *told: Any) -> JudgeReply:
        parts.retrieval.verdict = matches(
            *(n for n, t in enumerate(request.texts) if t.text == "p69")
        )
        return await judge(request, *told)

    parts.retrieval.judge = last
    error = await refused(parts, Front(*prompts))
    assert (error.reason, error.param) == ("content_policy", "p[69]")
    asked = [[one.text for one in request.texts] for request in parts.retrieval.judged]
    assert [text for texts in asked for text in texts] == [f"p{n}" for n in range(70)]
    assert {request.policy for request in parts.retrieval.judged} == {parts.policy.current.digest}
    assert max(map(len, asked)) <= 64, "retrieval takes no more at once"
    given = [(f"inputs[{n}]", "x") for n in range(5000)]
    judgement = Judgement(policy(), (), Journal("r", "Embed"), given)
    judgement.begin(parts.retrieval, Caller(), Telemetry("gateway", "g").span("s").__enter__())
    with pytest.raises(PenstockError) as many:
        await judgement.settled()
    assert (many.value.reason, many.value.param) == ("policy_too_much", "inputs[4096]")


@pytest.mark.parametrize("away", ["pass", "refuse"])
async def test_while_retrieval_is_away_a_rule_says_what_holds(parts, away):
    parts.policy.current = policy(away=away)
    parts.retrieval.verdict = unavailable("gone", stage="retrieval")
    front = Front(asks("boats"))
    if away == "refuse":
        assert (await refused(parts, front)).reason == "content_policy"
    else:
        await served(parts, front)
    (decided,) = [d for d in record(parts, front)["decisions"] if d["subject"] == "policy"]
    assert (decided["choice"], decided["reasons"]["boats"]) == ("not asked", away)
    assert decided["reasons"]["why"] == "gone"


async def test_what_retrieval_finds_wrong_fails_the_request(parts):
    parts.retrieval.verdict = invalid("odd", "texts")
    with pytest.raises(PenstockError):
        await serve(parts, Front(asks("boats")))
