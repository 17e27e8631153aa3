"""A prompt's tokens, as the tokenizer makes them: counted as a request, and charged for nothing."""

import time
from contextlib import aclosing

import grpc

from protos.tokenizer_pb2 import PromptRequest, TextDelta
from services.common.errors import PenstockError
from services.common.telemetry.telemetry import traceparent
from services.gateway.identity.principal import Principal
from services.gateway.parts import Gateway
from services.gateway.runs.asked_model import asked_model
from services.gateway.runs.front import Asked
from services.gateway.runs.records import Journal
from services.gateway.runs.text_stream import TextStream


async def tokens_of(
    gateway: Gateway, asked: Asked, principal: Principal, journal: Journal, request: PromptRequest
) -> tuple[TextDelta, int]:
    """Its ids, and of ids their text; and the model's window. `request` lacks only the caller."""
    model = journal.model = request.model
    principal.authorize(model)
    window = (await asked_model(gateway, model)).window
    journal.served = model
    journal.metered = await gateway.meter.admit(
        principal, asked.request_id, asked.route, model, (0, 0)
    )
    request.caller.CopyFrom(principal.caller(asked.request_id))
    request.tokens_only = True
    request.choices = 1
    own = gateway.settings.gateway
    with gateway.telemetry.span("tokenize") as span:
        stream = TextStream(
            gateway.tokenizers,
            request.SerializeToString(),
            patience_s=own.tokenizer_patience_s,
            deadline=time.monotonic() + own.request_timeout_s,
            traceparent=traceparent(span),
        )
        try:
            async with aclosing(stream.batches()) as batches:
                deltas = [delta async for batch in batches for delta in batch]
        finally:
            stream.cancel()
            journal.below.MergeFrom(stream.record)
    if stream.finished:
        return deltas[-1], window
    if stream.end.status.code:
        raise PenstockError.from_status(stream.end.status)
    raise PenstockError(grpc.StatusCode.INTERNAL, "the tokens did not come", stage="tokenizer")
