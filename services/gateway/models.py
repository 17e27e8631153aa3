"""The models that can be asked for: what the tokenizers serve."""

import asyncio
import logging
import time

import grpc

from protos import tokenizer_pb2, tokenizer_pb2_grpc
from protos.tokenizer_pb2 import ModelInfo
from services.common.errors import PenstockError, unavailable
from services.common.fresh_look import FreshLook
from services.common.peers import Peer, Peers
from services.gateway import metrics

log = logging.getLogger(__name__)

_FRESH_S = 10.0
_LOOK_EVERY_S = 0.2  # at most, however many unknown names are asked for
_TIMEOUT_S = 5.0
_PATIENCE_S = 5.0  # for a tokenizer to appear: a restart, an upgrade


class ModelCatalog:
    """A view of the tokenizers' models. Who asks for all of them gets what is served now; a request
    for one that was known goes on, and the view is renewed in the background while it is used."""

    def __init__(self, tokenizers: Peers) -> None:
        self._tokenizers = tokenizers
        self._models: dict[str, ModelInfo] | None = None  # None: no tokenizer was reached yet
        self._looked_at = float("-inf")
        self._look = FreshLook(self._ask_all, _LOOK_EVERY_S)
        self._renewal: asyncio.Task[None] | None = None

    async def all(self) -> list[ModelInfo]:
        """By name, those of now; while no tokenizer answers, those of before. Raises UNAVAILABLE
        when none was ever reached."""
        await self._look()
        known = self._known()
        return [known[name] for name in sorted(known)]

    async def find(self, name: str) -> ModelInfo:
        """Raises NOT_FOUND ("model_not_found"), or UNAVAILABLE as `all`."""
        if self._models is None or name not in self._models:
            await self._look()
        known = self._known()
        if name not in known:
            raise model_not_found(name)
        return known[name]

    async def stop(self) -> None:
        await self._look.stop()
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.gather(self._renewal, return_exceptions=True)

    def _known(self) -> dict[str, ModelInfo]:
        """Renewed in the background when it is time. Raises as `all`."""
        if self._models is None:
            raise unavailable("no tokenizer is available", stage="tokenizer", reason="no_replica")
        under_way = self._renewal is not None and not self._renewal.done()
        if not under_way and time.monotonic() - self._looked_at > _FRESH_S:
            self._renewal = asyncio.create_task(self._look())
        return self._models

    async def _ask_all(self) -> None:
        try:
            await self._tokenizers.wait_ready(_PATIENCE_S)
        except TimeoutError:
            return
        answers = await asyncio.gather(*map(self._ask, self._tokenizers.ready()))
        told = [models for models in answers if models is not None]
        if told:
            found = {model.name: model for models in told for model in models}
            for name in found.keys() - (self._models or {}).keys():
                metrics.show_model(name)
            self._models = found
            self._looked_at = time.monotonic()

    async def _ask(self, peer: Peer) -> list[ModelInfo] | None:
        """None: it did not answer."""
        async with self._tokenizers.transport.dial(peer.replica.address, "tokenizer") as channel:
            stub = tokenizer_pb2_grpc.TokenizerStub(channel)
            try:
                reply = await stub.ListModels(tokenizer_pb2.ListModelsRequest(), timeout=_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                log.warning("%s did not tell its models: %s", peer.id, error.code().name)
                return None
            except Exception:  # the others' answers count all the same
                log.exception("%s did not tell its models", peer.id)
                return None
            return list(reply.models)


def model_not_found(name: str) -> PenstockError:
    return PenstockError(
        grpc.StatusCode.NOT_FOUND,
        f"The model '{name[:100]}' does not exist.",
        stage="gateway",
        param="model",
        reason="model_not_found",
    )
