"""Numbers of many inputs (embeddings, scores, classes), the same for REST and gRPC: of a served
model by way of the tokenizer, as any generation; or of retrieval's own embedding model."""

from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import numpy as np

from protos.retrieval_pb2 import EmbedRequest
from protos.tokenizer_pb2 import Pool, PromptRequest
from services.common.errors import PenstockError
from services.common.fairness.fair_threads import FairThreads
from services.common.telemetry.spans import Span
from services.gateway.api.schema import UNSUPPORTED, bad_value
from services.gateway.identity.principal import Principal
from services.gateway.metering.estimate import of_texts
from services.gateway.parts import Gateway
from services.gateway.runs.front import Asked
from services.gateway.runs.judgement import Judgement, Text
from services.gateway.runs.numbers import Numbers, by_model
from services.gateway.runs.records import Journal


@dataclass
class Ask:
    """A validated request. `request` lacks only the caller."""

    request: PromptRequest
    tags: dict[str, str]  # the client's own, shown in the record
    called: Sequence[tuple[str, str]]  # what the client calls the tokenizer's inputs and queries

    @property
    def pool(self) -> Pool:
        return self.request.pool

    @property
    def tokens(self) -> int:
        """At most, by a guess."""
        given = [*self.pool.inputs, *self.pool.queries]
        return of_texts([one.text for one in given]) + sum(len(one.token_ids.ids) for one in given)

    def name_as_the_client_does(self, error: PenstockError) -> None:
        rename(error, self.called)


def rename(error: PenstockError, called: Sequence[tuple[str, str]]) -> None:
    """`inputs[3]` is `documents[3]`, if that is what was sent."""
    for theirs, ours in called:
        if error.param.startswith(theirs):
            param = ours + error.param.removeprefix(theirs)
            error.message = error.message.replace(error.param, param)
            error.param = param
            return


async def compute(
    gateway: Gateway, asked: Asked, principal: Principal, journal: Journal, ask: Ask
) -> Numbers:
    """Raises PenstockError, with the client's names of its fields."""
    model = journal.model = ask.request.model
    journal.tags = ask.tags
    principal.authorize(model)
    by_retrieval = await _is_retrievals(gateway, ask)
    if not by_retrieval:
        await gateway.models.find(model)
    journal.served = model

    with gateway.telemetry.span("limits"):
        metered = journal.metered = await gateway.meter.admit(
            principal, asked.request_id, asked.route, model, (ask.tokens, 0)
        )
    got = Numbers([b""] * len(ask.pool.inputs), model, headers=metered.headers)
    metered.usage = lambda: got.usage
    ask.request.caller.CopyFrom(principal.caller(asked.request_id))

    try:
        with gateway.telemetry.span("compute", inputs=len(got.values)) as computing:
            texts = await _decoded_texts(gateway, ask) if by_retrieval else []
            judgement = Judgement(gateway.policy.current, (), journal, _judged(ask, texts))
            judgement.begin(gateway.retrieval, ask.request.caller, computing)
            try:
                if by_retrieval:
                    await _by_retrieval(gateway, ask, texts, got, computing, journal)
                else:
                    await _by_model(gateway, ask, got, computing, journal)
                await judgement.settled()
            finally:
                judgement.cancel()
    except PenstockError as error:
        ask.name_as_the_client_does(error)
        raise
    journal.usage = got.usage
    await gateway.meter.settle(metered)
    got.cost = metered.cost
    return got


async def _is_retrievals(gateway: Gateway, ask: Ask) -> bool:
    """Whether it is asked of retrieval's model. Raises INVALID_ARGUMENT for what that cannot."""
    known, model = gateway.retrieval.embedding_model, ask.request.model
    if known and model != known:
        return False
    if not known:  # no replica was seen yet: its model may be what nobody else serves
        try:
            await gateway.models.find(model)
            return False
        except PenstockError as error:
            if error.code is not grpc.StatusCode.NOT_FOUND or ask.pool.task != Pool.EMBED:
                raise
            if await gateway.retrieval.model() != model:
                raise
    if ask.pool.task != Pool.EMBED:
        raise bad_value("model", f"'{model}' makes embeddings and nothing else")
    for name, wanted in (
        ("dimensions", ask.pool.dimensions),
        ("pooling", ask.pool.HasField("pooling")),
    ):
        if wanted:
            refused = bad_value(name, f"not supported by the model '{model}'")
            refused.reason = UNSUPPORTED
            raise refused
    return True


async def _by_model(gateway: Gateway, ask: Ask, got: Numbers, span: Span, journal: Journal) -> None:
    own = gateway.settings.gateway
    waiting = (own.tokenizer_patience_s, own.request_timeout_s)
    try:
        await by_model(gateway.tokenizers, ask.request, got, span, journal.below, *waiting)
    finally:
        if len(got.asked) > 1:
            journal.decide("tokenizer", got.asked[-1], lost=", ".join(got.asked[:-1]))


def _judged(ask: Ask, decoded: Sequence[str]) -> list[Text]:
    """What a client asks about; what is scored is as passages are, for which no such rule is."""
    pool = ask.pool
    given = [("queries", pool.queries)]
    if pool.task != Pool.SCORE:
        given.append(("inputs", pool.inputs))
    if decoded:
        return [(f"inputs[{n}]", text) for n, text in enumerate(decoded)]
    return [(f"{name}[{n}]", one.text) for name, inputs in given for n, one in enumerate(inputs)]


async def _by_retrieval(
    gateway: Gateway,
    ask: Ask,
    texts: Sequence[str],
    got: Numbers,
    span: Span,
    journal: Journal,
) -> None:
    request = EmbedRequest(caller=ask.request.caller, texts=texts)
    try:
        reply = await gateway.retrieval.embed(request, span, journal.below)
    except PenstockError as error:
        if error.param.startswith("texts"):
            param = "inputs" + error.param.removeprefix("texts")
            error.message = error.message.replace(error.param, param)
            error.param = param
        raise
    got.model = reply.model
    got.values = [np.asarray(one.values, "<f4").tobytes() for one in reply.vectors]
    got.usage.prompt_tokens = reply.tokens


async def _decoded_texts(gateway: Gateway, ask: Ask) -> list[str]:
    return await texts_of(ask, gateway.threads, gateway.settings.gateway.body_limit_bytes)


async def texts_of(ask: Ask, threads: FairThreads, max_bytes: int) -> list[str]:
    """Of the inputs. Token ids are those of OpenAI's embeddings here, since retrieval's own say
    nothing to anybody; they are decoded in a thread, which takes seconds for 8 MB of text."""
    inputs = ask.pool.inputs
    if all(one.text for one in inputs):
        return [one.text for one in inputs]
    given = [one.text or list(one.token_ids.ids) for one in inputs]
    return await threads.run(ask.request.caller.tenant, lambda: _decoded(given, max_bytes))


def _decoded(given: list[str | list[int]], max_bytes: int) -> list[str]:
    from services.gateway.api import openai_tokens  # 30 MB that few installs need

    return openai_tokens.texts_of(given, "inputs", max_bytes)
