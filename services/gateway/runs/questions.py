"""Questions to vector stores that a served model embeds (decision 0064): in the caller's name, as
/v1/embeddings does it. What has no vector in time is looked for by its words alone."""

import asyncio
from collections.abc import Sequence

import grpc

from protos.common_pb2 import Record
from protos.retrieval_pb2 import SearchReply, SearchRequest
from services.common.errors import PenstockError
from services.common.telemetry.spans import Span
from services.gateway.identity.principal import Principal
from services.gateway.metering.meter import Metered
from services.gateway.parts import Gateway
from services.gateway.runs.numbers import vectors_by_model

_PATIENCE_SHARE = 0.8  # of the time, for a tokenizer
_BYTES_PER_TOKEN = 3  # at least, of most texts
_AROUND = 32  # tokens that are not the question's


class Questions:
    """Of searches by one embedding model; where that is retrieval's own nothing is done."""

    def __init__(self, gateway: Gateway, model: str) -> None:
        self._gateway = gateway
        self._model = model
        self._served = gateway.settings.retrieval.served_embedders.get(model)
        self._tokens = 0
        self.failed = ""  # why there are no vectors, in words

    async def embed(
        self,
        who: Principal,
        metered: Metered,
        requests: Sequence[SearchRequest],
        span: Span,
        below: Record,
    ) -> None:
        """The requests have vectors then, or none has. It belongs to what is `metered`."""
        if self._served is None:
            return
        within_s = self._gateway.settings.retrieval.query_embedding_timeout_s
        with self._gateway.telemetry.span("embed", span, model=self._model) as step:
            try:
                async with asyncio.timeout(within_s):
                    told = await vectors_by_model(
                        self._gateway.tokenizers,
                        who.caller(f"{metered.run.id}:embed"),
                        self._model,
                        self._served.dimension,
                        await self._texts(requests),
                        step,
                        below,
                        _PATIENCE_SHARE * within_s,
                        within_s,
                    )
            except TimeoutError:
                self.failed = f"did not answer within {within_s:g} s"
            except PenstockError as error:
                late = error.code is grpc.StatusCode.DEADLINE_EXCEEDED
                self.failed = "did not answer in time" if late else f"failed: {error.message}"
            if self.failed:
                step.set_attribute("error", self.failed)
                return
        self._tokens = told.tokens
        for request, vector in zip(requests, told.vectors, strict=True):
            request.vector.CopyFrom(vector)

    def settle(self, replies: Sequence[SearchReply]) -> str:
        """Says in them what their questions took, by the first, and in words what a client should
        know."""
        if self._served is None or not replies:
            return ""
        for reply in replies:
            reply.cached, reply.tokens = False, 0
            if self.failed:
                del reply.by_words[:]  # the others' files are no more to be said of
        replies[0].tokens = self._tokens
        if not self.failed:
            return ""
        return (
            f"the embedding model {self._model!r} {self.failed}: its stores were searched by "
            "words alone"
        )

    async def _texts(self, requests: Sequence[SearchRequest]) -> list[str]:
        """Of a question that is too long its two ends."""
        assert self._served is not None
        window = (await self._gateway.models.find(self._model)).window
        room = max(2, _BYTES_PER_TOKEN * (window - _AROUND) - len(self._served.query.encode()))
        return [self._served.query + _ends(request.query, room) for request in requests]


def _ends(text: str, most: int) -> str:
    told = text.encode()
    if len(told) <= most:
        return text
    half = most // 2
    return " ".join(end.decode(errors="ignore") for end in (told[:half], told[-half:]))
