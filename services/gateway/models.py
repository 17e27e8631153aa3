"""The models that can be asked for: what the tokenizers serve."""

import asyncio
import logging
import time

import grpc

from protos import tokenizer_pb2, tokenizer_pb2_grpc
from protos.tokenizer_pb2 import ModelInfo
from services.common.errors import PenstockError, unavailable
from services.common.peers import Peer, Peers
from services.gateway import metrics

log = logging.getLogger(__name__)

_FRESH_S = 10.0
_MIN_AGE_S = 0.5  # between two looks, however many unknown names are asked for
_TIMEOUT_S = 5.0
_PATIENCE_S = 5.0  # for a tokenizer to appear: a restart, an upgrade


class ModelCatalog:
    """A view of the tokenizers' models, renewed in the background while it is used."""

    def __init__(self, tokenizers: Peers) -> None:
        self._tokenizers = tokenizers
        self._models: dict[str, ModelInfo] = {}
        self._looked_at = float("-inf")
        self._look: asyncio.Task[None] | None = None

    async def all(self) -> list[ModelInfo]:
        """By name. Raises UNAVAILABLE when no tokenizer was ever reached."""
        await self._renew(wait=not self._models)
        if not self._models:
            raise unavailable("no tokenizer is available", stage="tokenizer", reason="no_replica")
        return [self._models[name] for name in sorted(self._models)]

    async def find(self, name: str) -> ModelInfo:
        """Raises NOT_FOUND ("model_not_found"), or UNAVAILABLE as `all`."""
        if name not in self._models:
            await self._renew(wait=True)
        await self.all()
        if name not in self._models:
            raise model_not_found(name)
        return self._models[name]

    async def stop(self) -> None:
        if self._look is not None:
            self._look.cancel()
            await asyncio.gather(self._look, return_exceptions=True)

    async def _renew(self, wait: bool) -> None:
        age = time.monotonic() - self._looked_at
        if self._look is None or self._look.done():
            if age < (_MIN_AGE_S if wait else _FRESH_S):
                return
            self._look = asyncio.create_task(self._ask_all())
        if wait:
            await asyncio.shield(self._look)

    async def _ask_all(self) -> None:
        try:
            await self._tokenizers.wait_ready(_PATIENCE_S)
        except TimeoutError:
            return
        answers = await asyncio.gather(*map(self._ask, self._tokenizers.ready()))
        found = {model.name: model for models in answers for model in models}
        if found:
            for name in found.keys() - self._models.keys():
                metrics.show_model(name)
            self._models = found
            self._looked_at = time.monotonic()

    async def _ask(self, peer: Peer) -> list[ModelInfo]:
        async with self._tokenizers.transport.dial(peer.replica.address, "tokenizer") as channel:
            stub = tokenizer_pb2_grpc.TokenizerStub(channel)
            try:
                reply = await stub.ListModels(tokenizer_pb2.ListModelsRequest(), timeout=_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                log.warning("%s did not tell its models: %s", peer.id, error.code().name)
                return []
            except Exception:  # the others' answers count all the same
                log.exception("%s did not tell its models", peer.id)
                return []
            return list(reply.models)


def model_not_found(name: str) -> PenstockError:
    return PenstockError(
        grpc.StatusCode.NOT_FOUND,
        f"The model '{name[:100]}' does not exist.",
        stage="gateway",
        param="model",
        reason="model_not_found",
    )
