"""A request for numbers in place of text: embeddings, scores, classes of many inputs.

Each input is a request of its own from here on, through the router's admission and placement, so
many at once and the next when one is done. So a request of thousands takes no more places than a
few chats do, and what is lost under one of them is computed anew.
"""

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from protos.common_pb2 import FINISH_NONE, FINISH_STOP, Pooling, Record, Usage
from protos.router_pb2 import GenerateRequest
from protos.tokenizer_pb2 import Pool, PromptRequest, TextDelta
from protos.worker_pb2 import TokenDelta
from services.common.errors import PenstockError, unavailable
from services.common.link import LinkCall
from services.common.packed_ids import Ids, pack
from services.common.telemetry.spans import Span
from services.common.telemetry.telemetry import decision, traceparent
from services.tokenizer import metrics
from services.tokenizer.answers.generation import Way, generate
from services.tokenizer.checkpoints.models import ServedModel
from services.tokenizer.numbers.pool_prompts import (
    Place,
    check_lengths,
    check_model,
    embeds_both,
    pieces_of,
    pooling_of,
    prompt_of,
    too_many,
)
from services.tokenizer.parts import Pipeline, model_of
from services.tokenizer.prompts.allowed import allowed, policy_of

_TOLD = 8  # inputs whose way the record has
REPLACED = "checkpoint_replaced"

Numbers = NDArray[np.float64]


class Numbered:
    """Takes what one input gets, as an Output takes tokens."""

    token_ids: Sequence[int] = ()
    stop = None

    def __init__(self) -> None:
        self.finish = FINISH_NONE
        self.pooled = b""
        self.usage = Usage()

    def push(self, delta: TokenDelta) -> None:
        self.finish, self.pooled, self.usage = delta.finish, delta.pooled, delta.usage

    @property
    def numbers(self) -> Numbers:
        return np.frombuffer(self.pooled, "<f4").astype(np.float64)


async def pool(
    pipeline: Pipeline, call: LinkCall, request: PromptRequest, span: Span, record: Record
) -> None:
    """Sends a delta for each input, in any order; see `pipeline.run`. Raises PenstockError."""
    replaced: set[str] = set()
    while True:
        model = await model_of(pipeline, request, replaced, span)
        work = _Work(pipeline, call, request, model, span, record)
        try:
            await work.run()
            return
        except PenstockError as error:
            if error.reason != REPLACED or work.told or request.HasField("resume"):
                raise
        replaced.add(model.checkpoint)


class _Work:
    """One request, with one checkpoint."""

    def __init__(
        self,
        pipeline: Pipeline,
        call: LinkCall,
        request: PromptRequest,
        model: ServedModel,
        span: Span,
        record: Record,
    ) -> None:
        self._pipeline, self._call, self._request = pipeline, call, request
        self._model, self._span, self._record = model, span, record
        self._pool = request.pool
        self._left = sorted({*range(len(self._pool.inputs))} - {*request.resume.pooled})
        """Inputs that nothing was told of."""
        self._queries: list[Numbers] = []
        """Their embeddings, of a score that is made of two."""
        self._asked = 0
        self.told = 0
        """Inputs that something was told of here."""

    async def run(self) -> None:
        check_model(self._model, self._pool)
        check_lengths(self._model, self._pool, self._pipeline.max_pooled_tokens)
        queries: list[Place] = []
        if embeds_both(self._model, self._pool):
            queries = [("queries", index) for index in range(len(self._pool.queries))]
        inputs: list[Place] = [("inputs", index) for index in self._left]
        self._policy = policy_of(self._pipeline, self._request)
        _, prompts = await allowed(
            self._pipeline,
            self._policy,
            self._model,
            self._request,
            self._span,
            self._record,
            lambda _: self._prompts(queries + inputs),
        )
        tokens = sum(map(len, prompts.values()))
        metrics.PROMPT_TOKENS.labels(self._model.name).inc(tokens)
        self._span.set_attribute("prompt_tokens", tokens)
        self._note(len(inputs), tokens)
        pooling = pooling_of(self._model, self._pool)
        found = await self._all(queries, prompts, pooling)
        self._queries = [one.numbers for one in found]
        # Told with the first input: computed again after a loss, they were told of already.
        again = len(self._left) < len(self._pool.inputs)
        self._usage = Usage() if again else _sum([one.usage for one in found])
        await self._all(inputs, prompts, pooling)

    async def _prompts(self, places: Sequence[Place]) -> dict[Place, Ids]:
        """In pieces, between which it is other tenants' turn. Raises INVALID_ARGUMENT."""
        found: dict[Place, Ids] = {}
        tokens, most = 0, self._pipeline.max_pooled_tokens
        for piece in pieces_of(self._pool, places):

            def work(piece: Sequence[Place] = piece) -> list[Ids]:
                return [prompt_of(self._model, self._pool, place) for place in piece]

            tenant = self._request.caller.tenant
            prompts = await self._pipeline.threads.run(tenant, work)
            tokens += sum(map(len, prompts))
            if tokens > most:
                raise too_many(most)
            found |= zip(piece, prompts, strict=True)
        return found

    async def _all(
        self, places: Sequence[Place], prompts: dict[Place, Ids], pooling: Pooling
    ) -> list[Numbered]:
        """Of each place what it got, so many at once. The first that fails ends the others."""
        found = [Numbered() for _ in places]
        waiting = iter(range(len(places)))

        async def work() -> None:
            for index in waiting:
                place = places[index]
                await self._one(place, prompts[place], pooling, found[index])
                if place[0] == "inputs":
                    self._tell(place[1], found[index])

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._pipeline.pooled_at_once, len(places))):
                    group.create_task(work())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return found

    async def _one(self, place: Place, prompt: Ids, pooling: Pooling, into: Numbered) -> None:
        asked = GenerateRequest(
            caller=self._request.caller,
            model=self._model.routed_as,
            checkpoint=self._model.checkpoint,
            prompt_token_ids=pack(prompt),
            pooling=pooling,
        )
        asked.sampling.max_tokens = 1
        shown = self._record if self._asked < _TOLD else Record()
        self._asked += 1
        pipeline = self._pipeline
        way = Way(
            self._call, pipeline.routers, pipeline.router_patience_s, traceparent(self._span), shown
        )
        end = await generate(asked.SerializeToString(), into, way)
        if into.finish:
            return
        if end.status.code:
            error = PenstockError.from_status(end.status)
            if error.param == "prompt_token_ids":
                error.param = f"{place[0]}[{place[1]}]"
            raise error
        raise unavailable("the numbers did not come", stage="router", reason="broken_off")

    def _tell(self, index: int, got: Numbered) -> None:
        delta = TextDelta(checkpoint=self._model.checkpoint, policy=self._policy.digest)
        delta.usage.CopyFrom(_sum([got.usage, self._usage]))
        self._usage = Usage()
        delta.pooled.add(index=index, values=self._values(index, got))
        if not self.told and self._pool.task == Pool.CLASSIFY:
            delta.labels.extend(self._model.kind.labels)
        self.told += 1
        if self.told == len(self._left):
            delta.finish = FINISH_STOP
        self._call.send(delta.SerializeToString())

    def _values(self, index: int, got: Numbered) -> bytes:
        """What the client gets of the numbers that the engine gave."""
        if self._pool.task == Pool.EMBED:
            return got.pooled
        if self._pool.task == Pool.CLASSIFY:
            found = _probabilities(got.numbers)
        elif self._queries:
            found = np.dot(got.numbers, self._queries[index % len(self._queries)])
        else:
            relevant, *irrelevant = got.numbers
            found = 1 / (1 + np.exp(np.clip(sum(irrelevant) - relevant, -500, 500)))
        return np.asarray(found, "<f4").tobytes()

    def _note(self, inputs: int, tokens: int) -> None:
        figures = {"inputs": inputs, "tokens": tokens, "at_once": self._pipeline.pooled_at_once}
        task = Pool.Task.Name(self._pool.task).lower()
        self._record.decisions.append(decision("tokenizer", "pool", task, figures))


def _probabilities(logits: Numbers) -> Numbers:
    """Of classes that exclude each other; of a single one, of it against none."""
    if len(logits) == 1:
        logits = np.append(logits, 0.0)
        return _probabilities(logits)[:1]
    powers = np.exp(logits - logits.max())
    found: Numbers = powers / powers.sum()
    return found


def _sum(usages: Sequence[Usage]) -> Usage:
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
    )
