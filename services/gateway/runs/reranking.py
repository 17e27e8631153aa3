"""What a search found, ranked anew by a served model that is named for it (decision 0062).

As /v1/rerank does it, in the caller's name: in his lane, within his limits and permissions, in the
ledger under its own line. What the model does not say in time stays as the search ranked it.
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import grpc
import numpy as np

from protos.common_pb2 import Passage, Record, Scores
from protos.retrieval_pb2 import Ranking, SearchReply, SearchRequest
from protos.tokenizer_pb2 import Pool, PromptRequest
from services.common.errors import PenstockError
from services.common.telemetry.spans import Span
from services.gateway import metrics
from services.gateway.identity.principal import Principal
from services.gateway.metering.estimate import of_texts
from services.gateway.metering.meter import Metered
from services.gateway.parts import Gateway
from services.gateway.runs.asked_model import asked_model
from services.gateway.runs.known_scores import key_of
from services.gateway.runs.numbers import Numbers, by_model
from services.gateway.stores.retrieval.joining import chunks_of, put

ROUTE = "rerank"  # in the ledger
_BYTES_PER_TOKEN = 3  # at least, of most texts: what has fewer may be too long, and is not ranked
_AROUND = 32  # tokens of a pair that are neither the question's nor the passage's


class Pair(NamedTuple):
    query: str
    passage: Passage


class Reranking:
    """Of one request's searches. `model`: that is to do it; empty: none is.

    Who says how a search's scores are to be made gets these.
    """

    def __init__(self, gateway: Gateway, ranking: Ranking | None) -> None:
        own, ranking = gateway.settings.retrieval, ranking or Ranking()
        weighed = ranking.embedding_weight + ranking.text_weight
        is_free = ranking.ranker == Ranking.AUTO and not weighed
        self.model = own.reranking_model if is_free else ""
        self.by = ""  # the model, once it has
        self.failed = ""  # or why it has not, a word for programs
        self._gateway = gateway
        self._within_s = own.reranking_timeout_s
        self._passages = own.reranking_passages

    def widened(self, request: SearchRequest) -> SearchRequest:
        """What retrieval is asked: for more than are wanted, whatever it thinks of them."""
        if not self.model:
            return request
        wide = SearchRequest()
        wide.CopyFrom(request)
        wide.limit = max(request.limit, self._passages)
        wide.score_threshold = 0
        return wide

    async def rank(
        self,
        who: Principal,
        metered: Metered,
        searches: Sequence[tuple[SearchRequest, SearchReply]],
        span: Span,
        below: Record,
    ) -> None:
        """The replies' passages, best first and as many as the requests say; their scores are of a
        kind, all by the model or none."""
        if not self.model:
            return
        pairs = [
            Pair(request.query, passage)
            for request, reply in searches
            for passage in reply.passages
        ]
        if pairs:
            with self._gateway.telemetry.span(
                "rerank", span, model=self.model, passages=len(pairs)
            ) as step:
                self.failed, outcome = await self._tried(who, metered, pairs, step, below)
                metrics.reranked.labels(outcome).inc()
                if self.failed:
                    step.set_attribute("error", self.failed)
                else:
                    self.by = self.model
        for request, reply in searches:
            _cut(request, reply, in_order=not self.by)

    async def _tried(
        self, who: Principal, metered: Metered, pairs: Sequence[Pair], span: Span, below: Record
    ) -> tuple[str, str]:
        """Why it failed, and the metric's word of it."""
        try:
            scores = await self._asked(who, metered, pairs, span, below)
        except TimeoutError:
            return "timeout", "late"
        except PenstockError as error:
            if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:  # as a service says it, just before
                return "timeout", "late"
            return error.reason or error.code.name.lower(), "failed"
        for pair, score in zip(pairs, scores, strict=True):
            pair.passage.score = score
            pair.passage.scores.MergeFrom(Scores(reranked=score))
        return "", "reranked"

    async def _asked(
        self, who: Principal, metered: Metered, pairs: Sequence[Pair], span: Span, below: Record
    ) -> list[float]:
        """What it said a while ago it is not asked again. Raises PenstockError, TimeoutError."""
        who.authorize(self.model)
        keys = [
            key_of(who.tenant, self.model, query, passage.title, passage.text)
            for query, passage in pairs
        ]
        known = self._gateway.scores.of(keys)
        span.set_attribute("known", len(known))
        if new := {key: pair for key, pair in zip(keys, pairs, strict=True) if key not in known}:
            scores = await self._said(who, metered, [*new.values()], span, below)
            self._gateway.scores.keep([*zip(new, scores, strict=True)])
            known.update(zip(new, scores, strict=True))
        return [known[key] for key in keys]

    async def _said(
        self, who: Principal, metered: Metered, pairs: Sequence[Pair], span: Span, below: Record
    ) -> list[float]:
        async with asyncio.timeout(self._within_s):
            window = (await asked_model(self._gateway, self.model)).window
            pool = _pool(pairs, window)
            request = PromptRequest(
                caller=who.caller(f"{metered.run.id}:{ROUTE}"), model=self.model, pool=pool
            )
            most = of_texts([one.text for one in (*pool.queries, *pool.inputs)])
            got = Numbers([b""] * len(pairs), self.model)
            async with self._gateway.meter.beside(
                metered, who, ROUTE, self.model, (most, 0)
            ) as beside:
                beside.usage = lambda: got.usage
                within = (self._within_s, self._within_s)
                await by_model(self._gateway.tokenizers, request, got, span, below, *within)
        scores = got.scores()
        if not np.isfinite(scores).all():
            broken = "the scores of some passages are no numbers"
            raise PenstockError(grpc.StatusCode.INTERNAL, broken, reason="no_numbers")
        return scores


def _pool(pairs: Sequence[Pair], window: int) -> Pool:
    """Of a passage that is too long its beginning."""
    queries = [query for query, _ in pairs]
    asked = queries[:1] if len(set(queries)) == 1 else queries
    pool = Pool(task=Pool.SCORE, queries=[Pool.Input(text=query) for query in asked])
    for query, passage in pairs:
        room = max(1, _BYTES_PER_TOKEN * (window - _AROUND) - len(query.encode()))
        said = f"{passage.title}\n{passage.text}".strip() or " "
        pool.inputs.add(text=said.encode()[:room].decode(errors="ignore"))
    return pool


def _cut(request: SearchRequest, reply: SearchReply, *, in_order: bool) -> None:
    least, best = request.score_threshold, chunks_of(reply)
    if not in_order:
        best.sort(key=lambda chunk: -chunk.passage.score)
    good = [chunk for chunk in best if not least or chunk.passage.score >= least]
    put(good[: request.limit], reply)
