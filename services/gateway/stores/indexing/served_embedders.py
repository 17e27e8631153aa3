"""Served models that embed stores' files (decision 0064).

Retrieval asks for vectors of its texts, and the gateway, which reaches the model, tells them in the
name of whoever attached the file.
"""

import itertools
from collections.abc import Awaitable, Callable, Sequence

import grpc

from protos.common_pb2 import PRIORITY_LOW, Caller, Record, Usage
from protos.retrieval_pb2 import TextVectors
from services.common.config import Settings
from services.common.errors import PenstockError, unavailable
from services.common.peers import Peers
from services.common.telemetry.spans import Span
from services.common.telemetry.telemetry import Telemetry
from services.gateway.runs.numbers import vectors_by_model

Embed = Callable[[Sequence[str], Span], Awaitable[TextVectors]]

_AWAY = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.NOT_FOUND,  # it is not served now
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)
_AGAIN_S = 5.0


class ServedEmbedders:
    def __init__(self, settings: Settings, tokenizers: Peers, telemetry: Telemetry) -> None:
        self._served = settings.retrieval.served_embedders
        self._own = settings.gateway
        self._tokenizers = tokenizers
        self._telemetry = telemetry

    def serves(self, model: str) -> bool:
        return model in self._served

    def of_file(self, caller: Caller, model: str, file_id: str, used: Usage) -> Embed | None:
        """None: the model is retrieval's own. What it returns adds its tokens to `used`, and raises
        UNAVAILABLE ("embedder_away"), and INVALID_ARGUMENT for a text that the model cannot
        read."""
        if (about := self._served.get(model)) is None:
            return None
        numbers = itertools.count()

        async def embed(texts: Sequence[str], span: Span) -> TextVectors:
            behind = Caller()  # everybody who waits
            behind.CopyFrom(caller)
            behind.priority = PRIORITY_LOW
            behind.request_id = f"{caller.request_id}:{file_id}:{next(numbers)}"
            with self._telemetry.span("embed", span, model=model, texts=len(texts)) as step:
                try:
                    told = await vectors_by_model(
                        self._tokenizers,
                        behind,
                        model,
                        about.dimension,
                        texts,
                        step,
                        Record(),
                        self._own.tokenizer_patience_s,
                        self._own.request_timeout_s,
                        judged=True,  # as an upload, by retrieval
                    )
                except PenstockError as error:
                    raise _told(model, error) from None
            used.prompt_tokens += told.tokens
            return told

        return embed


def _told(model: str, error: PenstockError) -> PenstockError:
    """A file's owner knows nothing of the request that was made for it."""
    words = f"the embedding model {model!r}: {error.message}"
    if error.code in _AWAY:
        wait_s = error.retry_after_s or _AGAIN_S
        return unavailable(words, stage="gateway", reason="embedder_away", retry_after_s=wait_s)
    return PenstockError(error.code, words, stage=error.stage, reason=error.reason)
