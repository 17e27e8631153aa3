"""The same by a served model, as a small generation of the caller's own: in his lane, within his
limits, in the ledger under its own line."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing

from protos.common_pb2 import ContentPart, Message, Sampling, Usage
from protos.tokenizer_pb2 import Chat, PromptRequest
from services.common.errors import PenstockError
from services.common.telemetry.spans import Span
from services.common.telemetry.telemetry import traceparent
from services.gateway.identity.principal import Principal
from services.gateway.metering.estimate import expected
from services.gateway.metering.meter import Metered
from services.gateway.parts import Gateway
from services.gateway.runs.asked_model import asked_model
from services.gateway.runs.prompt import Prompt
from services.gateway.runs.records import Journal
from services.gateway.runs.rewriting.rule import Turn
from services.gateway.runs.text_stream import TextStream

ROUTE = "rewrite"  # in the ledger
_TASK = (
    "Rewrite the last question so that it can be understood without the conversation. "
    "Answer with the question alone, in its language."
)
_TURNS = 3
_CHARS = 600  # of each text
_MAX_TOKENS = 64
_LONGEST = 400  # characters: more is no question


async def by_model(
    gateway: Gateway,
    principal: Principal,
    metered: Metered,
    turns: Sequence[Turn],
    question: str,
    span: Span,
    journal: Journal,
) -> str:
    """Raises PenstockError; TimeoutError after `rewriting_timeout_s`; ValueError for an answer that
    is no question."""
    own = gateway.settings.retrieval
    principal.authorize(own.rewriting_model)
    request = PromptRequest(
        caller=principal.caller(f"{metered.run.id}:{ROUTE}"),
        model=own.rewriting_model,
        chat=Chat(messages=_messages(turns, question)),
        sampling=Sampling(temperature=0, top_p=1, seed=1, max_tokens=_MAX_TOKENS),
    )
    window = (await asked_model(gateway, own.rewriting_model)).window
    most = expected([Prompt(request)], window, _MAX_TOKENS)
    used = Usage()
    async with (
        asyncio.timeout(own.rewriting_timeout_s),
        gateway.meter.beside(metered, principal, ROUTE, own.rewriting_model, most) as beside,
    ):
        beside.usage = lambda: used
        text = await _answer(gateway, request, span, journal, used)
    line = text.strip().partition("\n")[0].strip().strip('"')
    if not line or len(line) > _LONGEST:
        raise ValueError("not a question")
    return line


async def _answer(
    gateway: Gateway, request: PromptRequest, span: Span, journal: Journal, used: Usage
) -> str:
    timeout_s = gateway.settings.retrieval.rewriting_timeout_s
    stream = TextStream(
        gateway.tokenizers,
        request.SerializeToString(),
        patience_s=timeout_s,
        deadline=time.monotonic() + timeout_s,
        traceparent=traceparent(span),
    )
    pieces = []
    try:
        async with aclosing(stream.batches()) as batches:
            async for deltas in batches:
                for delta in deltas:
                    pieces.append(delta.text)
                    if delta.HasField("usage"):
                        used.CopyFrom(delta.usage)
    finally:
        stream.cancel()
        journal.below.MergeFrom(stream.record)
    if not stream.finished:
        raise PenstockError.from_status(stream.end.status)
    return "".join(pieces)


def _messages(turns: Sequence[Turn], question: str) -> list[Message]:
    said = "\n".join(
        f"User: {turn.question[:_CHARS]}\nAssistant: {turn.answer[:_CHARS]}"
        for turn in turns[-_TURNS:]
    )
    asked = f"{said}\nUser: {question[:_CHARS]}"
    return [
        Message(role=role, content=[ContentPart(text=text)])
        for role, text in (("system", _TASK), ("user", asked))
    ]
