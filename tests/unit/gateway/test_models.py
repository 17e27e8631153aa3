"""The catalogue of models, from tokenizers that may answer or not."""

from types import SimpleNamespace
from typing import Any

from protos.tokenizer_pb2 import ModelInfo
from services.gateway import models
from services.gateway.models import ModelCatalog


class Channel:
    def __init__(self, address: str) -> None:
        self.address = address

    async def __aenter__(self) -> "Channel":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


class Tokenizers:
    transport = SimpleNamespace(dial=Channel)

    def ready(self) -> list[Any]:
        return [SimpleNamespace(id=id, replica=SimpleNamespace(address=id)) for id in ("odd", "ok")]

    async def wait_ready(self, patience_s: float) -> None:
        pass


async def test_a_tokenizer_that_answers_oddly_does_not_take_the_others_models(monkeypatch):
    class Stub:
        def __init__(self, channel: Any) -> None:
            self._address = channel.address

        async def ListModels(self, request: Any, timeout: float) -> Any:
            if self._address == "odd":
                raise ValueError("no such thing")
            return SimpleNamespace(models=[ModelInfo(name="m")])

    monkeypatch.setattr(models.tokenizer_pb2_grpc, "TokenizerStub", Stub)
    catalog = ModelCatalog(Tokenizers())  # type: ignore[arg-type]
    assert [model.name for model in await catalog.all()] == ["m"]
