"""Embeddings: who may have them of which model, and what retrieval's refusals are called."""

from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from prometheus_client import generate_latest

from protos.common_pb2 import FINISH_STOP, Status, Usage
from protos.retrieval_pb2 import EmbedReply, EmbedRequest, JudgeReply
from protos.tokenizer_pb2 import Pooled, TextDelta
from services.common.errors import PenstockError, invalid, unavailable
from services.common.link import End
from services.common.policy import Policy, load_rules
from services.gateway.api.pooled_schema import (
    ClassifyRequest,
    EmbeddingsRequest,
    RerankRequest,
    ScoreRequest,
)
from services.gateway.api.schema import validated
from services.gateway.identity.principal import Principal
from services.gateway.runs.pooling import Numbers, compute
from services.gateway.runs.records import Journal
from tests.support.gateway_parts import Opened, Tokenizers, gateway_parts


class Retrieval:
    def __init__(self, model: str, error: PenstockError | None = None) -> None:
        self.embedding_model = model
        self.error = error
        self.comes = ""  # after a while
        self.asked: list[EmbedRequest] = []

    async def model(self) -> str:
        self.embedding_model = self.embedding_model or self.comes
        if not self.embedding_model:
            raise unavailable("none", stage="retrieval", reason="no_replica")
        return self.embedding_model

    async def embed(self, request: EmbedRequest, span: Any, record: Any) -> EmbedReply:
        self.asked.append(request)
        if self.error is not None:
            raise self.error
        return EmbedReply(tokens=7)


async def ask(retrieval: Retrieval, model: str = "m", *, models: Any = None) -> Numbers:
    principal = Principal("acme", "key_1", models=models, priority="high", weight=2.0)
    asked = validated(EmbeddingsRequest, {"model": model, "input": ["a", "b"]}).ask()
    origin: Any = SimpleNamespace(request_id="req_1", route="Embed")
    with gateway_parts() as gateway:
        gateway.retrieval = retrieval
        gateway.tokenizers = Tokenizers(lambda opened: opened.finish())
        return await compute(gateway, origin, principal, Journal("req_1", "Embed"), asked)


async def refusal(retrieval: Retrieval, model: str = "m", **more: Any) -> PenstockError:
    with pytest.raises(PenstockError) as refused:
        await ask(retrieval, model, **more)
    return refused.value


async def test_retrieval_is_told_who_asks_and_what():
    retrieval = Retrieval("m")
    got = await ask(retrieval, models=frozenset({"m"}))
    assert got.usage.prompt_tokens == 7
    (request,) = retrieval.asked
    assert (request.caller.tenant, request.caller.request_id) == ("acme", "req_1")
    assert list(request.texts) == ["a", "b"]


async def test_another_model_than_retrievals_is_refused_before_it_is_asked():
    retrieval = Retrieval("m")
    error = await refusal(retrieval, "nobody")
    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "model_not_found")
    for model in ("m", "nobody"):  # what a key does not cover, it is not told of
        error = await refusal(retrieval, model, models=frozenset({"chat"}))
        assert error.code == grpc.StatusCode.PERMISSION_DENIED
    assert retrieval.asked == []


def models_told() -> set[str]:
    return {line for line in generate_latest().decode().splitlines() if 'model="made-up' in line}


async def test_while_no_replica_was_seen_no_name_is_taken_for_its_model():
    """Each would be in the metrics and in the ledger."""
    retrieval = Retrieval("")
    assert (await refusal(retrieval, "made-up-1")).reason == "no_replica"
    assert (await refusal(retrieval, "tiny")).stage == "tokenizer", "it is there"
    retrieval.comes = "m"
    assert (await refusal(retrieval, "made-up-2")).reason == "model_not_found"
    retrieval.embedding_model = ""
    assert (await ask(retrieval)).usage.prompt_tokens == 7
    assert models_told() == set()


@pytest.mark.parametrize(
    ("param", "named"),
    [("texts[1]", "input[1]"), ("texts", "input"), ("", ""), ("model", "model")],
)
async def test_a_text_at_fault_has_the_clients_name(param, named):
    error = await refusal(Retrieval("m", invalid(f"bad: {param} texts", param)))
    assert error.param == named
    assert error.message.startswith(f"bad: {named} ")


LIKE = """
rules: [{name: boats, like: {examples: [x]}, action: %s}]
"""


@pytest.mark.parametrize(
    ("form", "body", "param"),
    [
        (EmbeddingsRequest, {"input": ["a", "b"]}, "input[1]"),
        (ClassifyRequest, {"input": ["a", "b"]}, "input[1]"),
        (ScoreRequest, {"queries": ["a", "b"], "documents": ["c", "d"]}, "queries[1]"),
        (RerankRequest, {"query": "b", "documents": ["c", "d"]}, "query"),
    ],
)
@pytest.mark.parametrize("model", ["tiny", "m"])
async def test_rules_of_meaning_are_asked_about_what_gets_numbers(form, body, param, model):
    asked = validated(form, {"model": model, **body}).ask()
    if model == "m" and form is not EmbeddingsRequest:
        return  # retrieval's makes embeddings alone
    origin: Any = SimpleNamespace(request_id="req_1", route="Embed")
    principal = Principal("acme", "key_1", models=None, priority="high", weight=2.0)
    texts = ["a", "b"] if param[-1] == "]" else ["b"]
    for action, wanted in (("refuse", param), ("route, model: other", "model")):
        with gateway_parts() as gateway:
            gateway.policy.current = Policy.of(load_rules((LIKE % action).encode()))
            gateway.tokenizers = Tokenizers(numbers)
            judge, retrieval = gateway.retrieval, Retrieval("m")
            retrieval.judge = judge.judge
            gateway.retrieval = retrieval
            found = JudgeReply.Match(rule="boats", text=len(texts) - 1, score=0.7)
            judge.verdict = JudgeReply(matches=[found])
            with pytest.raises(PenstockError) as refused:
                await compute(gateway, origin, principal, Journal("req_1", "Embed"), asked)
        assert [one.text for one in judge.judged[0].texts] == texts
        assert (refused.value.reason, refused.value.param) == ("content_policy", wanted)


def numbers(opened: Opened) -> None:
    """To each input one."""
    for index in range(len(opened.request.pool.inputs)):
        delta = TextDelta(checkpoint="c")
        delta.pooled.append(Pooled(index=index, values=bytes(4)))
        opened.say(delta)
    opened.finish()


async def test_another_tokenizer_is_asked_for_the_rest_alone():
    """And what came before counts once."""
    lost = End(status=Status(code=14, reason="peer_lost", stage="tokenizer"))

    def script(opened: Opened) -> None:
        known = list(opened.request.resume.pooled)
        assert (known, opened.request.resume.checkpoint) in (([], ""), ([1], "c"))
        for index in (0, 2) if known else (1,):
            delta = TextDelta(checkpoint="c", usage=Usage(prompt_tokens=5))
            delta.pooled.append(Pooled(index=index, values=bytes([index]) * 4))
            if index == 2:
                delta.finish = FINISH_STOP
            opened.say(delta)
        opened.finish(None if known else lost)

    asked = validated(EmbeddingsRequest, {"model": "tiny", "input": ["a", "b", "c"]}).ask()
    origin: Any = SimpleNamespace(request_id="req_1", route="Embed")
    principal = Principal("acme", "key_1", models=None, priority="high", weight=2.0)
    with gateway_parts() as gateway:
        gateway.tokenizers = Tokenizers(script)
        got = await compute(gateway, origin, principal, Journal("req_1", "Embed"), asked)
        assert len(gateway.tokenizers.opened) == 2
    assert got.values == [bytes([index]) * 4 for index in range(3)]
    assert got.usage.prompt_tokens == 15
