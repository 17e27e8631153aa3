"""A call's deadline, its end and its account, whatever it does; and settings that do not fit."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import grpc
import pytest

from services.common import retrieval_abilities
from services.common.config import RetrievalSettings, Settings
from services.common.errors import invalid
from services.common.telemetry.telemetry import Telemetry
from services.retrieval import metrics, pipeline
from services.retrieval.assembly import refuse_large_chunks
from services.retrieval.server import RetrievalService, Servicer

METHODS = ["Embed", "Search", "Index", "Read", "Remove"]
SETTINGS = RetrievalSettings(timeout_s=20.0, index_timeout_s=400.0)


class Aborted(Exception):
    pass


class Context:
    """A caller that gives the call so many seconds."""

    def __init__(self, remaining_s: float | None = None) -> None:
        self.remaining_s = remaining_s
        self.code = grpc.StatusCode.OK
        self.message = ""

    def time_remaining(self) -> float | None:
        return self.remaining_s

    def invocation_metadata(self) -> None:
        return None

    def set_trailing_metadata(self, trailers: Any) -> None:
        pass

    async def write(self, news: Any) -> None:
        pass

    async def abort(self, code: grpc.StatusCode, message: str, trailers: Any) -> None:
        self.code, self.message = code, message
        raise Aborted


@pytest.fixture
def servicer() -> Servicer:
    parts = SimpleNamespace(settings=SETTINGS, telemetry=Telemetry("retrieval", "r-1"))
    return Servicer(parts)  # type: ignore[arg-type]


def counted(method: str, outcome: str) -> float:
    return metrics.REQUESTS.labels(method.lower(), outcome)._value.get()  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("remaining_s", [None, 10.0, 1000.0])
async def test_a_search_has_its_own_time_and_no_call_more_than_its_caller(
    servicer: Servicer, monkeypatch: pytest.MonkeyPatch, method: str, remaining_s: float | None
) -> None:
    limits: list[float | None] = []
    timeout = asyncio.timeout

    def noted(seconds: float | None) -> asyncio.Timeout:
        limits.append(seconds)
        return timeout(seconds)

    async def work(*_: Any, **__: Any) -> str:
        return "reply"

    monkeypatch.setattr(pipeline, method.lower(), work)
    monkeypatch.setattr("services.retrieval.server.asyncio.timeout", noted)
    before = counted(method, "ok")
    reply = await getattr(servicer, method)(None, Context(remaining_s))
    assert reply == (None if method in ("Index", "Read") else "reply"), "it is told as news"
    assert counted(method, "ok") == before + 1
    own = {"Search": 20.0, "Index": 1000.0}.get(method, 400.0)  # 600 s of it to read the file
    (limit,) = limits
    if remaining_s is None or remaining_s > 2 * own:
        assert limit == own
    else:
        assert limit is not None
        assert 0.8 * remaining_s < limit < remaining_s, "the answer has to travel"


@pytest.mark.parametrize(
    ("failure", "code", "outcome", "words"),
    [
        (invalid("no", "text"), grpc.StatusCode.INVALID_ARGUMENT, "invalid_argument", "no"),
        (ValueError("secret"), grpc.StatusCode.INTERNAL, "internal", "search failed"),
        (None, grpc.StatusCode.UNAVAILABLE, "unavailable", "took longer than 0.0"),
    ],
)
async def test_each_end_is_told_and_counted_once(
    servicer: Servicer,
    monkeypatch: pytest.MonkeyPatch,
    failure: Exception | None,
    code: grpc.StatusCode,
    outcome: str,
    words: str,
) -> None:
    async def work(*_: Any, **__: Any) -> None:
        if failure is not None:
            raise failure
        await asyncio.Event().wait()

    monkeypatch.setattr(pipeline, "search", work)
    before, context = counted("Search", outcome), Context(0.01 if failure is None else None)
    with pytest.raises(Aborted):
        await servicer.Search(None, context)  # type: ignore[arg-type]
    assert (context.code, counted("Search", outcome)) == (code, before + 1)
    assert words in context.message
    await asyncio.wait_for(servicer.drain(0), 5)


async def test_a_drain_waits_for_the_last_call_and_no_longer_than_its_grace(
    servicer: Servicer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = [asyncio.Event(), asyncio.Event()]

    async def work(_parts: Any, gate: asyncio.Event, *_: Any) -> None:
        await gate.wait()

    monkeypatch.setattr(pipeline, "index", work)
    calls = [asyncio.create_task(servicer.Index(gate, Context())) for gate in gates]  # type: ignore[arg-type]
    cancelled = asyncio.create_task(servicer.Index(asyncio.Event(), Context()))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    before = counted("Index", "cancelled")
    await asyncio.wait_for(servicer.drain(0.01), 5)
    draining = asyncio.create_task(servicer.drain(60))
    context = Context()
    with pytest.raises(Aborted):
        await servicer.Index(gates[0], context)  # type: ignore[arg-type]
    assert context.code is grpc.StatusCode.UNAVAILABLE
    cancelled.cancel()
    await asyncio.wait([cancelled])
    assert counted("Index", "cancelled") == before + 1
    for call, gate in zip(calls, gates, strict=True):
        assert not draining.done()
        gate.set()
        await call
    await asyncio.wait_for(draining, 5)


def test_chunks_that_do_not_fit_the_model_are_refused_at_the_start() -> None:
    reader = SimpleNamespace(max_tokens=256, special_tokens=2)
    model: Any = SimpleNamespace(name="small", reader=reader)
    refuse_large_chunks(254, model)
    with pytest.raises(ValueError, match="RETRIEVAL__CHUNK_TOKENS"):
        refuse_large_chunks(255, model)


def test_it_fails_its_check_as_its_embedder_does(tmp_path: Path) -> None:
    def stuck() -> None:
        raise RuntimeError("the embedder is stuck")

    settings = Settings(data_dir=tmp_path)
    service = RetrievalService(settings, None, Telemetry("retrieval", "r-1"), "r-1")  # type: ignore[arg-type]
    service.check()  # it only starts
    its: Any = SimpleNamespace(model=None, embedder=SimpleNamespace(check=stuck), others={})
    service.parts = its
    with pytest.raises(RuntimeError, match="is stuck"):
        service.check()


def test_what_it_understands_is_registered() -> None:
    service = SimpleNamespace(parts=MagicMock(), _of_models=list)
    told = RetrievalService.describe(service)  # type: ignore[arg-type]
    assert retrieval_abilities.of(told) == retrieval_abilities.ALL
