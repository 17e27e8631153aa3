"""What becomes of calls when replicas of retrieval are lost, stop, fail or come late."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from protos.common_pb2 import Caller, Record
from protos.retrieval_pb2 import EmbedRequest, IndexRequest, RemoveRequest, SearchRequest
from services.common.config import GatewaySettings, RetrievalSettings, Settings
from services.common.errors import PenstockError, unavailable
from services.common.redis import connect
from services.common.service import Host
from services.common.telemetry import Telemetry
from services.gateway import retrieval_client as module
from services.gateway.retrieval_client import RetrievalClient
from tests.support.gateway_rig import EMBEDDING_MODEL, SmallRetrieval
from tests.support.waiting import until

CALLER = Caller(request_id="r1", tenant="acme")


class Rig:
    def __init__(self, settings: Settings, client: RetrievalClient, stack: AsyncExitStack) -> None:
        self.settings = settings
        self.client = client
        self._stack = stack
        self.replicas: list[Host] = []

    async def replica(self) -> Host:
        host = Host(SmallRetrieval, self.settings)
        await host.start()
        self._stack.push_async_callback(host.stop, 0)
        self.replicas.append(host)
        return host

    async def listed(self, number: int) -> None:
        await until(lambda: len(self.client._channels) == number, 5)

    async def call(self, name: str) -> Any:
        with Telemetry("gateway", "gateway-1").span("request") as span:
            about = {"caller": CALLER, "collection": "c"}
            calls: dict[str, Callable[[], Awaitable[Any]]] = {
                "search": lambda: self.client.search(searched, span, Record()),
                "chat": lambda: self.client.search_for_chat(searched, span, Record()),
                "embed": lambda: self.client.embed(
                    EmbedRequest(caller=CALLER, texts=["tide"]), span, Record()
                ),
                "index": lambda: self.client.index(
                    IndexRequest(**about, source_id="f", text="the tide"), span
                ),
                "remove": lambda: self.client.remove(RemoveRequest(**about, source_id="f"), span),
            }
            searched = SearchRequest(caller=CALLER, collections=["c"], query="tide", limit=1)
            return await calls[name]()

    def begin(self, name: str) -> "asyncio.Task[Any]":
        return asyncio.create_task(self.call(name))

    async def outcome(self, name: str) -> str:
        with pytest.raises(PenstockError) as raised:
            await self.call(name)
        assert raised.value.stage == "retrieval"
        return raised.value.reason or raised.value.code.name


def kill(replica: Host) -> Awaitable[None]:
    """As a process is killed: connections are cut, the registry is told nothing."""
    return replica._server.stop(None)  # type: ignore[no-any-return]


def documents(replica: Host) -> int:
    return len(replica.service.servicer.documents)  # type: ignore[attr-defined]


@pytest.fixture
async def rig(redis_url: str, namespace: str) -> AsyncIterator[Rig]:
    settings = Settings(
        redis_url=redis_url,
        namespace=namespace,
        lease_s=1.0,
        gateway=GatewaySettings(retrieval_patience_s=15),
        retrieval=RetrievalSettings(timeout_s=15),
    )
    async with AsyncExitStack() as stack:
        redis = connect(redis_url)
        stack.push_async_callback(redis.aclose)
        client = RetrievalClient(redis, settings)
        await client.start()
        stack.push_async_callback(client.stop)
        yield Rig(settings, client, stack)


CALLS = ["search", "chat", "embed", "index", "remove"]


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_waits_for_the_first_replica(rig: Rig, name: str) -> None:
    call = rig.begin(name)
    await asyncio.sleep(0)
    await rig.replica()
    await call
    assert rig.client.embedding_model == EMBEDDING_MODEL


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_waits_for_the_one_that_replaces_a_killed_one(rig: Rig, name: str) -> None:
    first = await rig.replica()
    await rig.listed(1)
    await rig.call("embed")  # connected
    await kill(first)
    call = rig.begin(name)
    await until(lambda: call.done() or len(rig.client._channels) == 1, 5)
    assert not call.done()
    assert rig.client.embedding_model == EMBEDDING_MODEL, "what is served is still known"
    await rig.replica()
    await call


@pytest.mark.parametrize("name", ["search", "embed", "remove"])
async def test_what_may_be_repeated_is_when_a_replica_is_killed_over_it(
    rig: Rig, name: str
) -> None:
    first = await rig.replica()
    await rig.listed(1)
    first.service.hold.clear()  # type: ignore[attr-defined]
    call = rig.begin(name)
    await until(lambda: first.service.servicer.calls == 1, 5)  # type: ignore[attr-defined]
    await rig.replica()
    await kill(first)
    await call


async def test_indexing_is_not_given_to_the_next_when_a_replica_is_killed_over_it(
    rig: Rig,
) -> None:
    """What the file did to this one it might do to all of them."""
    first = await rig.replica()
    await rig.listed(1)
    first.service.hold.clear()  # type: ignore[attr-defined]
    call = rig.begin("index")
    await until(lambda: first.service.servicer.calls == 1, 5)  # type: ignore[attr-defined]
    spare = await rig.replica()
    await rig.listed(2)
    await kill(first)
    with pytest.raises(PenstockError) as raised:
        await call
    assert (raised.value.code, raised.value.reason) == (grpc.StatusCode.UNAVAILABLE, "index_lost")
    assert documents(spare) == 0
    assert spare.service.servicer.calls == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", ["killed", "draining"])
@pytest.mark.parametrize("name", ["search", "index"])
async def test_a_replica_that_surely_did_not_begin_is_passed_over(
    rig: Rig, how: str, name: str
) -> None:
    lost, good = await rig.replica(), await rig.replica()
    await rig.listed(2)
    for _ in range(4):
        await rig.call("embed")
    if how == "killed":
        await kill(lost)
    else:
        stopping = unavailable("stopping", stage="retrieval", reason="draining")
        lost.service.failure = stopping  # type: ignore[attr-defined]
    for _ in range(6):  # in random order: each of them tries the lost one first with 1/2
        await rig.call(name)
    assert good.service.servicer.calls >= 6  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["search", "index"])
async def test_a_failure_of_the_service_itself_is_not_tried_elsewhere(rig: Rig, name: str) -> None:
    replicas = [await rig.replica(), await rig.replica()]
    await rig.listed(2)
    for replica in replicas:
        replica.service.failure = PenstockError(  # type: ignore[attr-defined]
            grpc.StatusCode.INTERNAL, "broken", stage="retrieval"
        )
    assert await rig.outcome(name) == "INTERNAL"
    assert sum(r.service.servicer.calls for r in replicas) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", CALLS)
async def test_patience_ends(rig: Rig, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.client, "_patience_s", 0.1)
    monkeypatch.setattr(rig.client, "_search_s", 0.1)
    monkeypatch.setattr(module, "INDEX_TIMEOUT_S", 0.1)
    assert await rig.outcome(name) == "no_replica"
