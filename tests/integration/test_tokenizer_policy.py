"""The policy in the tokenizer service, between a gateway's end and a scripted router: what reaches
the router, and what leaves."""

import asyncio
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer

from protos.common_pb2 import (
    FINISH_CONTENT_FILTER,
    TokenIds,
)
from protos.router_pb2 import GenerateRequest
from protos.tokenizer_pb2 import PromptRequest, TextDelta
from services.common.config import (
    PolicySettings,
    Settings,
)
from services.common.errors import unavailable
from services.common.link import LinkCall
from services.common.policy.metrics import VERDICTS
from services.common.redis import connect
from services.common.service import Host
from services.tokenizer.server import TokenizerService
from tests.support.prompts import prompt_of
from tests.support.resumes import resume_of
from tests.support.served import checkpoint_of, listing
from tests.support.tokenizer_bed import (
    TOKENIZER,
    Story,
    bed,
    ids,
    question,
    renumber,
    says,
    write_model,
)
from tests.support.waiting import until


async def test_nothing_reaches_the_router_before_the_policy_s_verdict(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    async with bed(tmp_path, redis_url, namespace, says("never")) as b:
        error = await b.refused(question("a TOP secret"))
        assert (error.reason, error.param) == ("content_policy", "messages[1].content")
        assert "'secret'" in error.message
        token_ids = TokenIds(ids=ids("a top secret"))
        error = await b.refused(PromptRequest(model="tiny", token_ids=token_ids))
        assert (error.reason, error.param) == ("content_policy", "prompt")
        for stop in (["a", ""], list("abcde")):
            assert (await b.refused(question(stop=stop))).param == "stop"
        too_long = await b.refused(PromptRequest(model="tiny", text="water " * 900))
        assert too_long.reason == "context_length_exceeded"
        assert b.router().requests == []
        assert b.deltas == []


async def test_a_refusal_by_the_policy_counts_before_a_prompt_s_own_fault(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    async with bed(tmp_path, redis_url, namespace, says("never")) as b:
        counted = VERDICTS.labels("secret", "refuse", "input")._value
        refusals = counted.get()
        error = await b.refused(question("a TOP secret " + "water " * 900))
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "content_policy")
        assert counted.get() == refusals + 1
        for hopeless in (question("top secret " + "water " * 9000), _completion("secret " * 9000)):
            assert (await b.refused(hopeless)).reason == "context_length_exceeded"
        assert counted.get() == refusals + 1, "what no window holds is not looked at"


def _completion(text: str) -> PromptRequest:
    return PromptRequest(model="tiny", text=text)


async def test_ids_that_are_another_text_to_another_checkpoint_are_judged_anew(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    gone: set[str] = set()

    async def replaces(call: LinkCall, request: GenerateRequest) -> None:
        if request.checkpoint in gone:
            raise unavailable("replaced", stage="router", reason="checkpoint_replaced")
        await says("water")(call, request)

    async with bed(tmp_path / "old", redis_url, namespace, replaces) as b:
        (tmp_path / "new").mkdir()
        write_model(tmp_path / "new")
        renumber(tmp_path / "new")
        redis = connect(redis_url)
        listed = await listing(redis, b.settings, checkpoint_of(tmp_path / "new", "tiny"))
        assert (await b.ask(question())).status.code == 0
        (first,) = {r.checkpoint for r in b.router().requests}
        second = "old" if first == checkpoint_of(tmp_path / "new", "tiny").digest else "new"
        other = Tokenizer.from_file(str(tmp_path / second / "tokenizer.json"))
        b.router().requests.clear()
        gone.add(first)
        token_ids = TokenIds(ids=other.encode("a top secret").ids)
        error = await b.refused(PromptRequest(model="tiny", token_ids=token_ids))
        assert (error.reason, error.param) == ("content_policy", "prompt")
        assert [r.checkpoint for r in b.router().requests] == [first], "to it they are another text"
        await listed.stop()
        await redis.aclose()


async def test_a_wrong_policy_fails_the_start_and_is_named(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("rules: [{name: bad, pattern: '('}]")
    settings = Settings(
        redis_url=redis_url,
        namespace=namespace,
        policy=PolicySettings(file=policy),
    )
    with pytest.raises(ValueError, match="'bad'"):
        await Host(TokenizerService, settings).start()


ANSWERS = """
rules:
  - {name: plan, pattern: secret plan, where: [output]}
  - {name: card, pii: [card], where: [input, output], action: redact}
  - {name: local, pattern: only here, action: route, model: other}
"""


async def test_a_blocked_answer_ends_and_its_router_hears_at_once(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    never = asyncio.Event()
    script = says("A secret plan, and more", never)
    async with bed(tmp_path, redis_url, namespace, script, policy=ANSWERS) as b:
        asked = question(choices=2)
        end = await asyncio.wait_for(b.ask(asked), 20)
        assert end.status.code == 0
        of_choice = {0: "", 1: ""}
        for delta in b.deltas:
            of_choice[delta.choice] += delta.text
        assert of_choice == {0: "A ", 1: "A "}
        finishes = [delta.finish for delta in b.deltas if delta.finish]
        assert finishes == [FINISH_CONTENT_FILTER] * 2
        await until(lambda: b.router().cancelled == 2, what="the router was told to stop")
        (told, other) = [d for d in end.record.decisions if d.subject == "policy"]
        assert (told.choice, told.reasons["plan"]) == ("refuse", "refuse, in output")
        assert other == told
        assert "secret" not in str(end.record)
        never.set()


async def test_what_is_redacted_never_reaches_the_router(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    script = says("no. 4111 1111 1111 1111!")
    async with bed(tmp_path, redis_url, namespace, script, policy=ANSWERS) as b:
        asked = question("Mine is 4111 1111 1111 1111, here")
        end = await b.ask(asked)
        assert end.status.code == 0
        sent = TOKENIZER.decode(prompt_of(b.router().requests[0]), skip_special_tokens=False)
        assert "[CARD], here" in sent
        assert "4111" not in sent
        assert b.text == "no. [CARD]!"
        digest = b.pipeline.policy.current.digest
        assert [d.policy for d in b.deltas if d.HasField("plan")] == [digest]
        (first, second) = [d for d in end.record.decisions if d.subject == "policy"]
        assert (first.choice, second.choice) == ("redact", "redact")


async def test_what_is_routed_is_asked_for_again_elsewhere_and_stays_there(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    rule = ANSWERS.replace("model: other", "model: tiny")
    async with bed(tmp_path, redis_url, namespace, says("Yes"), policy=ANSWERS) as b:
        end = await b.ask(question("only here"))
        assert end.status.code == 0
        assert b.deltas == [TextDelta(model="other")]
        assert b.router().requests == []
        assert not [d for d in end.record.decisions if d.subject == "policy"]
        (tmp_path / "policy.yaml").write_text(rule)
        digest = b.pipeline.policy.current.digest
        await until(lambda: b.pipeline.policy.current.digest != digest, what="the file's look")
        end = await b.ask(question("only here"))
        assert b.text == "Yes"
        (made,) = [d for d in end.record.decisions if d.subject == "policy"]
        assert made.choice == "route"


async def test_an_answer_goes_on_under_the_version_that_it_began_with(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    text = "a 4111111111111111, 4242424242424242 b"
    async with bed(tmp_path, redis_url, namespace, Story(text), policy=ANSWERS) as b:
        asked = question("Mine is 4111 1111 1111 1111")
        assert (await b.ask(asked)).status.code == 0
        whole, first = b.text, b.router().requests[0]
        assert whole == "a [CARD], [CARD] b"
        begun = next(n for n in range(len(b.deltas)) if "[CARD]" in b.deltas[n].text) + 1
        before = "".join(delta.text for delta in b.deltas[:begun])
        asked.resume.CopyFrom(resume_of(b.deltas[:begun]))
        digest = asked.resume.policy = b.deltas[0].policy
        file = b.pipeline.policy
        (tmp_path / "policy.yaml").write_text("rules: [{name: all, pattern: .}]")
        await until(lambda: file.current.digest != digest, what="the file was looked at")
        assert (await b.ask(asked)).status.code == 0
        assert before + b.text == whole
        prompt = prompt_of(first)
        assert prompt_of(b.router().requests[-1])[: len(prompt)] == prompt
        asked.resume.policy = "unknown"
        lost = await b.refused(asked)
        assert lost.reason == "cannot_resume", "the prompt would be another"
