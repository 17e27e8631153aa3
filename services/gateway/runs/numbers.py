"""Numbers that a served model makes of many inputs, by way of the tokenizer."""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import grpc
import numpy as np

from protos.common_pb2 import Caller, Record, Usage
from protos.retrieval_pb2 import TextVectors, Vector
from protos.tokenizer_pb2 import Pool, PromptRequest, TextDelta
from services.common.errors import PenstockError
from services.common.peers import Peers
from services.common.telemetry.spans import Span
from services.common.telemetry.telemetry import traceparent
from services.gateway.metering.prices import Cost
from services.gateway.runs.text_stream import TextStream


@dataclass
class Numbers:
    """What came of it."""

    values: list[bytes]  # of each input: float32, little-endian
    model: str
    usage: Usage = field(default_factory=Usage)
    labels: list[str] = field(default_factory=list)  # of classes
    cost: Cost | None = None
    headers: Mapping[str, str] = field(default_factory=dict)  # what the caller's limits leave
    asked: Sequence[str] = ()  # tokenizers, one after another

    def arrays(self) -> list[np.ndarray]:
        return [np.frombuffer(one, "<f4") for one in self.values]

    def scores(self) -> list[float]:
        """Of each input its one number."""
        return [float(one[0]) for one in self.arrays()]

    def take(self, delta: TextDelta) -> None:
        for one in delta.pooled:
            self.values[one.index] = one.values
        self.labels.extend(delta.labels)
        self.usage.prompt_tokens += delta.usage.prompt_tokens
        self.usage.cached_tokens += delta.usage.cached_tokens


async def by_model(
    tokenizers: Peers,
    request: PromptRequest,
    got: Numbers,
    span: Span,
    below: Record,
    patience_s: float,
    within_s: float,
) -> None:
    """Fills in `got`, and what the services know of it `below`. Raises PenstockError."""
    stream = TextStream(
        tokenizers,
        request.SerializeToString(),
        patience_s=patience_s,
        deadline=time.monotonic() + within_s,
        traceparent=traceparent(span),
    )
    try:
        async with aclosing(stream.batches()) as batches:
            async for deltas in batches:
                for delta in deltas:
                    got.take(delta)
    finally:
        stream.cancel()
        below.MergeFrom(stream.record)
        got.asked = stream.attempts
    if stream.end.status.code and not stream.finished:
        raise PenstockError.from_status(stream.end.status)
    if not all(got.values):
        broken = "the numbers of some inputs did not come"
        raise PenstockError(grpc.StatusCode.INTERNAL, broken, stage="tokenizer")


async def vectors_by_model(
    tokenizers: Peers,
    caller: Caller,
    model: str,
    dimension: int,
    texts: Sequence[str],
    span: Span,
    below: Record,
    patience_s: float,
    within_s: float,
    *,
    judged: bool = False,
) -> TextVectors:
    """Of so many numbers each. `judged`: the policy has said of the texts what it has to. Raises
    PenstockError, INTERNAL ("embedder_mismatch") for other vectors than these."""
    pool = Pool(task=Pool.EMBED, inputs=[Pool.Input(text=text) for text in texts], judged=judged)
    request = PromptRequest(caller=caller, model=model, pool=pool)
    got = Numbers([b""] * len(texts), model)
    await by_model(tokenizers, request, got, span, below, patience_s, within_s)
    made = got.arrays()
    for one in made:
        with np.errstate(over="ignore"):
            length = float(np.linalg.norm(one))
        if len(one) != dimension or not 0 < length < math.inf:
            numbers = f"{len(one)} numbers" if len(one) != dimension else "no direction"
            raise PenstockError(
                grpc.StatusCode.INTERNAL,
                f"the model {model!r} makes vectors of {numbers}: by "
                f"PENSTOCK_RETRIEVAL__SERVED_EMBEDDERS they have {dimension}",
                stage="gateway",
                reason="embedder_mismatch",
            )
    return TextVectors(vectors=[Vector(values=one) for one in made], tokens=got.usage.prompt_tokens)
