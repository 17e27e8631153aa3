"""The catalogue of models, from tokenizers that may answer or not."""

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from protos.tokenizer_pb2 import ModelInfo
from services.common.errors import PenstockError
from services.gateway import models
from services.gateway.models import ModelCatalog
from tests.support.waiting import until


class Tokenizers:
    """What each serves, by its address, or how it fails; `asked` are the addresses in order."""

    def __init__(self, **served: Any) -> None:
        self.served: dict[str, Any] = served
        self.asked: list[str] = []
        self.open = 0
        self.gate = asyncio.Event()
        self.gate.set()  # cleared: all answers wait
        self.transport = SimpleNamespace(dial=lambda address, _: Channel(self, address))

    def ready(self) -> list[Any]:
        return [SimpleNamespace(id=id, replica=SimpleNamespace(address=id)) for id in self.served]

    async def wait_ready(self, patience_s: float) -> None:
        if not self.served:
            raise TimeoutError


class Channel:
    def __init__(self, tokenizers: Tokenizers, address: str) -> None:
        self.tokenizers = tokenizers
        self.address = address

    async def __aenter__(self) -> "Channel":
        self.tokenizers.open += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self.tokenizers.open -= 1


class Stub:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def ListModels(self, request: Any, timeout: float) -> Any:
        assert timeout > 0
        tokenizers = self._channel.tokenizers
        tokenizers.asked.append(self._channel.address)
        await tokenizers.gate.wait()
        told = tokenizers.served[self._channel.address]
        if isinstance(told, BaseException):
            raise told
        return SimpleNamespace(models=[ModelInfo(name=name) for name in told])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(models.tokenizer_pb2_grpc, "TokenizerStub", Stub)
    monkeypatch.setattr(models, "_LOOK_EVERY_S", 0.01)
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(models, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def catalog_of(tokenizers: Tokenizers) -> ModelCatalog:
    return ModelCatalog(tokenizers)  # type: ignore[arg-type]


async def names(catalog: ModelCatalog) -> list[str]:
    return [model.name for model in await catalog.all()]


async def refusal(catalog: ModelCatalog, name: str) -> PenstockError:
    with pytest.raises(PenstockError) as refused:
        await catalog.find(name)
    return refused.value


def lost() -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing)


@pytest.mark.parametrize("odd", [ValueError("no such thing"), lost()])
async def test_a_tokenizer_that_fails_does_not_take_the_others_models(clock, odd):
    tokenizers = Tokenizers(odd=odd, ok=["m"])
    assert await names(catalog_of(tokenizers)) == ["m"]
    assert tokenizers.open == 0


async def test_all_models_of_all_tokenizers_by_name(clock):
    catalog = catalog_of(Tokenizers(one=["m", "c"], two=["a", "m"]))
    assert await names(catalog) == ["a", "c", "m"]
    assert (await catalog.find("c")).name == "c"


async def test_known_models_are_looked_up_anew_in_the_background_and_seldom(clock):
    tokenizers = Tokenizers(one=["m"])
    catalog = catalog_of(tokenizers)
    assert await names(catalog) == ["m"]
    tokenizers.served = {"one": ["m", "new"]}
    clock.now += 9.9
    assert (await catalog.find("m")).name == "m"
    assert len(tokenizers.asked) == 1
    tokenizers.gate.clear()
    clock.now += 0.2
    assert (await catalog.find("m")).name == "m", "nobody waits for what is being looked up"
    await until(lambda: len(tokenizers.asked) == 2, 5)
    assert (await catalog.find("m")).name == "m"
    tokenizers.gate.set()

    await until(lambda: set(catalog._models or ()) == {"m", "new"}, 5)
    assert len(tokenizers.asked) == 2
    tokenizers.served = {"one": ["new"]}
    clock.now += 10.1

    async def gone() -> bool:
        try:
            await catalog.find("m")
        except PenstockError as refused:
            return refused.reason == "model_not_found"
        return False

    await until(gone, 5, "who only ever asks for one name hears of its end")


async def test_the_list_is_that_of_now(clock):
    """Who removed a model looks into it, and who started anew finds nothing of before."""
    tokenizers = Tokenizers(one=["m", "removed"])
    catalog = catalog_of(tokenizers)
    assert await names(catalog) == ["m", "removed"]
    tokenizers.served = {"one": ["m"]}
    assert await names(catalog) == ["m"]
    assert len(tokenizers.asked) == 2


async def test_an_unknown_name_is_asked_for_at_once_but_not_by_everyone(clock):
    tokenizers = Tokenizers(one=["m"])
    catalog = catalog_of(tokenizers)
    await catalog.all()
    tokenizers.served = {"one": ["m", "new"]}
    assert (await catalog.find("new")).name == "new"
    assert len(tokenizers.asked) == 2
    error = await refusal(catalog, "x" * 1000)
    assert len(tokenizers.asked) == 3
    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "model_not_found")
    assert (error.param, error.stage) == ("model", "gateway")
    assert len(error.message) < 200
    tokenizers.gate.clear()
    asked = [asyncio.create_task(refusal(catalog, "nobody")) for _ in range(30)]
    await until(lambda: len(tokenizers.asked) == 4, 5)
    tokenizers.served = {"one": ["m", "new", "newer"]}  # as a command said meanwhile
    found = [asyncio.create_task(catalog.find("newer")) for _ in range(30)]
    await asyncio.sleep(0)
    tokenizers.gate.set()
    await asyncio.gather(*asked)
    assert {model.name for model in await asyncio.gather(*found)} == {"newer"}
    assert len(tokenizers.asked) <= 5, "one look for all that wait, and one for who came later"


async def test_what_was_known_stands_while_no_tokenizer_answers(clock):
    tokenizers = Tokenizers(one=["m"])
    catalog = catalog_of(tokenizers)
    await catalog.all()
    for served in ({}, {"one": lost()}):
        tokenizers.served = served
        clock.now += 60
        assert (await refusal(catalog, "new")).reason == "model_not_found"
        assert await names(catalog) == ["m"]
    tokenizers.served = {"two": ["m", "new"]}
    assert (await catalog.find("new")).name == "new", "a look that failed is no look"


async def test_that_there_is_no_model_is_known_too(clock):
    """All were removed: that is no tokenizer that cannot be reached."""
    tokenizers = Tokenizers(one=[])
    catalog = catalog_of(tokenizers)
    assert await names(catalog) == []
    assert (await refusal(catalog, "m")).reason == "model_not_found"
    tokenizers.served = {"one": ["m"]}
    assert (await catalog.find("m")).name == "m"


async def test_before_any_tokenizer_was_reached_nothing_is_known(clock):
    tokenizers = Tokenizers()
    catalog = catalog_of(tokenizers)
    with pytest.raises(PenstockError) as away:
        await catalog.all()
    error = await refusal(catalog, "m")
    for told in (away.value, error):
        assert (told.code, told.reason) == (grpc.StatusCode.UNAVAILABLE, "no_replica")
    tokenizers.served = {"one": ["m"]}
    assert (await catalog.find("m")).name == "m"


async def test_who_gives_up_waiting_ends_nobody_elses_look(clock):
    tokenizers = Tokenizers(one=["m"])
    catalog = catalog_of(tokenizers)
    tokenizers.gate.clear()
    first, second = (asyncio.create_task(catalog.find("m")) for _ in range(2))
    await until(lambda: tokenizers.asked, 5)
    first.cancel()
    await asyncio.wait([first])
    tokenizers.gate.set()
    assert (await second).name == "m"


async def test_a_stop_ends_the_look_under_way(clock):
    tokenizers = Tokenizers(one=["m"])
    catalog = catalog_of(tokenizers)
    await catalog.stop()
    tokenizers.gate.clear()
    asked = asyncio.create_task(catalog.all())
    await until(lambda: tokenizers.open == 1, 5)
    await catalog.stop()
    assert tokenizers.open == 0
    await asyncio.wait([asked])
    assert asked.cancelled()
