"""What becomes of calls when replicas of retrieval are lost, stop, fail or come late."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, ClassVar

import grpc
import pytest
from grpc import ChannelConnectivity

from protos.common_pb2 import Caller, Record
from protos.retrieval_pb2 import (
    EmbedRequest,
    IndexRequest,
    Ranking,
    ReadPiece,
    ReadRequest,
    RemoveRequest,
    SearchRequest,
    SetAttributesRequest,
    Vector,
)
from services.common.config import GatewaySettings, RetrievalSettings, Settings
from services.common.discovery import Registration, Replica, new_replica_id
from services.common.errors import PenstockError, invalid, unavailable
from services.common.policy import Policy, load_rules
from services.common.redis import connect
from services.common.retrieval_abilities import (
    BLOBS,
    FILTERS,
    MARKS,
    RANKING,
    READING,
    REINDEXING,
    VECTORS,
)
from services.common.service import Host
from services.common.telemetry.telemetry import Telemetry
from services.gateway.stores.retrieval import client as module
from services.gateway.stores.retrieval import needs as retrieval_needs
from services.gateway.stores.retrieval.client import RetrievalClient, is_outage
from services.gateway.stores.retrieval.needs import needs
from tests.support.gateway_rig import EMBEDDING_MODEL, SmallRetrieval
from tests.support.waiting import until

CALLER = Caller(request_id="r1", tenant="acme")


async def unheard(_: object) -> None:
    """How far a file is."""


class Rig:
    def __init__(self, settings: Settings, client: RetrievalClient, stack: AsyncExitStack) -> None:
        self.settings = settings
        self.client = client
        self._stack = stack
        self.replicas: list[Host] = []

    async def replica(self, kind: type[SmallRetrieval] = SmallRetrieval) -> Host:
        host = Host(kind, self.settings)
        await host.start()
        self._stack.push_async_callback(host.stop, 0)
        self.replicas.append(host)
        return host

    async def listed(self, number: int) -> None:
        await until(lambda: len(self.client._channels) == number, 5)

    async def call(self, name: str, record: Record | None = None) -> Any:
        record = Record() if record is None else record
        with Telemetry("gateway", "gateway-1").span("request") as span:
            about = {"caller": CALLER, "collection": "c"}
            calls: dict[str, Callable[[], Awaitable[Any]]] = {
                "search": lambda: self.client.search(searched, span, record),
                "chat": lambda: self.client.search_for_chat(searched, span, record),
                "embed": lambda: self.client.embed(
                    EmbedRequest(caller=CALLER, texts=["tide"]), span, record
                ),
                "index": lambda: self.client.index(
                    IndexRequest(**about, source_id="f"), span, unheard
                ),
                "remove": lambda: self.client.remove(RemoveRequest(**about, source_id="f"), span),
            }
            searched = SearchRequest(caller=CALLER, collections=["c"], query="tide", limit=1)
            return await calls[name]()

    async def begun(self, name: str, replica: Host) -> "asyncio.Task[Any]":
        """Held by the replica."""
        replica.service.hold.clear()  # type: ignore[attr-defined]
        call = self.begin(name)
        await until(lambda: calls(replica) > 0, 5)
        return call

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


def calls(replica: Host) -> int:
    return int(replica.service.servicer.calls)  # type: ignore[attr-defined]


def leave(replica: Host) -> Awaitable[None]:
    """It is no longer registered, and serves on."""
    return replica._registration.stop()  # type: ignore[union-attr]


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


@pytest.mark.parametrize("name", ["search", "chat", "embed", "index"])
async def test_a_call_waits_for_one_that_knows_its_version_of_the_policy(
    rig: Rig, name: str
) -> None:
    """The first looks at its file while the call waits; which is then done once."""
    rig.client._policy.current = Policy.of(load_rules(b"rules: []"))
    first = await rig.replica()
    servicer = first.service.servicer  # type: ignore[attr-defined]
    servicer.policy = "older"
    call = rig.begin(name)
    await until(lambda: servicer.calls > 1, 5)
    assert not call.done()
    assert documents(first) == 0
    servicer.policy = rig.client._policy.current.digest
    await call


async def test_the_models_name_waits_for_the_first_replica(rig: Rig) -> None:
    asking = asyncio.create_task(rig.client.model())
    await asyncio.sleep(0)
    await rig.replica()
    assert await asking == EMBEDDING_MODEL


async def test_the_embedder_is_what_all_replicas_have(rig: Rig) -> None:
    assert rig.client.embedder == ""
    first, second = await rig.replica(), await rig.replica()
    await rig.listed(2)
    assert rig.client.embedder == "e1"
    registration = second._registration
    assert registration is not None
    await registration.tell({"embedding_model": EMBEDDING_MODEL, "embedder": "e2"})
    await until(lambda: rig.client.embedder == "", 5)
    registration = first._registration
    assert registration is not None
    await registration.tell({"embedding_model": EMBEDDING_MODEL, "embedder": "e2"})
    await until(lambda: rig.client.embedder == "e2", 5)


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_waits_for_the_one_that_replaces_a_killed_one(rig: Rig, name: str) -> None:
    first = await rig.replica()
    await rig.listed(1)
    await rig.call("embed")  # connected
    (channel,) = rig.client._channels.values()
    await kill(first)
    await until(lambda: channel.get_state() is not ChannelConnectivity.READY, 5)  # it is noticed
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
        channel = rig.client._channels[lost.id]
        await until(lambda: channel.get_state() is not ChannelConnectivity.READY, 5)
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
    monkeypatch.setattr(module, "INDEX_PATIENCE_S", 0.1)
    assert await rig.outcome(name) == "no_replica"


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_that_is_given_up_is_over(rig: Rig, name: str) -> None:
    call = await rig.begun(name, await rig.replica())
    call.cancel()
    await asyncio.wait([call], timeout=5)
    assert call.cancelled()


async def test_a_replica_that_leaves_ends_the_calls_it_has_and_gets_no_more(rig: Rig) -> None:
    leaving = await rig.replica()
    await rig.listed(1)
    call = await rig.begun("search", leaving)
    await leave(leaving)
    await rig.listed(0)
    other = await rig.replica()
    await rig.call("search")
    assert (calls(leaving), calls(other)) == (1, 1)
    leaving.service.hold.set()  # type: ignore[attr-defined]
    await call
    assert calls(other) == 1, "it was not asked again"


@pytest.mark.parametrize(("name", "outcome"), [("search", ""), ("index", "index_lost")])
async def test_a_call_whose_replica_stays_away_is_as_one_that_is_lost(
    rig: Rig, name: str, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CLOSE_GRACE_S", 0)
    leaving = await rig.replica()
    await rig.listed(1)
    call = await rig.begun(name, leaving)
    other = await rig.replica()
    await rig.listed(2)
    await leave(leaving)
    if outcome:
        with pytest.raises(PenstockError) as raised:
            await call
        assert raised.value.reason == outcome
    else:
        await call
    assert calls(other) == (0 if outcome else 1)


async def test_a_stop_closes_every_connection(rig: Rig) -> None:
    for _ in range(2):
        await rig.replica()
    await rig.listed(2)
    await rig.call("embed")
    channels = list(rig.client._channels.values())
    await rig.client.stop()
    assert [channel.get_state() for channel in channels] == [ChannelConnectivity.SHUTDOWN] * 2


async def test_a_replica_that_names_no_model_takes_the_name_from_nobody(rig: Rig) -> None:
    await rig.replica()
    await rig.listed(1)
    nameless = Replica("retrieval", new_replica_id("retrieval"), "127.0.0.1:1", "host", 1)
    redis = connect(rig.settings.redis_dsn)
    registered = Registration(redis, rig.settings.namespace, nameless, 60)
    await registered.start()
    await rig.listed(2)
    assert rig.client.embedding_model == EMBEDDING_MODEL
    await registered.stop()
    await redis.aclose()


async def test_what_the_replica_did_comes_into_the_record(rig: Rig) -> None:
    replica = await rig.replica()
    for name, span in (("search", "search"), ("chat", "search"), ("embed", "embed")):
        record = Record()
        await rig.call(name, record)
        assert [told.name for told in record.spans] == [span]
    replica.service.failure = invalid("no", "query")  # type: ignore[attr-defined]
    record = Record()
    with pytest.raises(PenstockError) as refused:
        await rig.call("search", record)
    assert refused.value.param == "query"
    assert [told.name for told in record.spans] == ["search"]


# ---- with replicas that are told, and a clock ---------------------------------------------------


class Line:
    """A channel: connected, or as `state` says for ever."""

    outdated = False

    def __init__(self, name: str, state: ChannelConnectivity = ChannelConnectivity.READY) -> None:
        self.name = name
        self.state = state

    def get_state(self, try_to_connect: bool = False) -> ChannelConnectivity:
        if self.state is ChannelConnectivity.SHUTDOWN:
            raise grpc.aio.UsageError
        return self.state

    async def wait_for_state_change(self, last: ChannelConnectivity) -> None:
        await asyncio.Event().wait()


class Told:
    """Calls take a second each and fail as `error` says; how long each could have taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: PenstockError | None = None
        self.timeouts: list[float] = []
        self.lines: list[str] = []
        self.now = 1000.0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(module, "_LOOK_AGAIN_S", 0)
        monkeypatch.setattr(module, "_call_one", self._call)

    async def _call(
        self, line: Line, method: str, request: Any, span: Any, timeout_s: float, *_: Any
    ) -> str:
        self.timeouts.append(timeout_s)
        self.lines.append(line.name)
        self.now += 1
        if self.error is not None:
            raise self.error
        return method


@pytest.fixture
async def client(redis_url: str, namespace: str) -> AsyncIterator[RetrievalClient]:
    redis = connect(redis_url)
    settings = Settings(
        redis_url=redis_url,
        namespace=namespace,
        gateway=GatewaySettings(retrieval_patience_s=10),
        retrieval=RetrievalSettings(timeout_s=3),
    )
    yield RetrievalClient(redis, settings)
    await redis.aclose()


@pytest.mark.parametrize(
    ("name", "timeouts"),
    [
        ("search", range(13, 3, -1)),
        ("chat", range(3, 0, -1)),  # patient for 2.4 s
        ("embed", range(60, 50, -1)),
        ("remove", range(60, 50, -1)),
        ("index", range(2400, 2100, -1)),
    ],
)
async def test_each_try_has_what_is_left_and_patience_is_one_for_all(
    client: RetrievalClient, name: str, timeouts: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(monkeypatch)
    told.error = unavailable("stopping", stage="retrieval", reason="draining")
    client._channels = {"one": Line("one")}  # type: ignore[dict-item]
    rig = Rig(Settings(), client, AsyncExitStack())
    assert await rig.outcome(name) == "draining"
    assert told.timeouts == list(timeouts)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "error",
    [
        unavailable("the store is away", stage="retrieval", reason="store_away"),
        PenstockError(
            grpc.StatusCode.DEADLINE_EXCEEDED, "late", stage="retrieval", reason="timeout"
        ),
        PenstockError(grpc.StatusCode.INTERNAL, "odd", stage="retrieval", reason="unreachable"),
    ],
)
async def test_only_a_lost_replica_is_a_reason_to_ask_again_and_for_a_search_a_late_one(
    client: RetrievalClient, name: str, error: PenstockError, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(monkeypatch)
    told.error = error
    client._channels = {"one": Line("one"), "two": Line("two")}  # type: ignore[dict-item]
    assert await Rig(Settings(), client, AsyncExitStack()).outcome(name) == error.reason
    elsewhere = name in ("search", "chat") and error.code is not grpc.StatusCode.INTERNAL
    assert len(told.timeouts) == (2 if elsewhere else 1)


@pytest.mark.parametrize(
    ("state", "waits_s"),
    [
        (ChannelConnectivity.CONNECTING, 0.001),
        (ChannelConnectivity.TRANSIENT_FAILURE, 600),
        (ChannelConnectivity.SHUTDOWN, 600),
    ],
)
async def test_a_file_is_sent_to_who_is_connected(
    client: RetrievalClient,
    state: ChannelConnectivity,
    waits_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What has failed is waited for no more; what connects, for a time."""
    told = Told(monkeypatch)
    monkeypatch.setattr(retrieval_needs, "_CONNECT_S", waits_s)
    client._channels = {"bad": Line("bad", state), "good": Line("good")}  # type: ignore[dict-item]
    rig = Rig(Settings(), client, AsyncExitStack())
    async with asyncio.timeout(20):
        for _ in range(12):
            await rig.call("index")
    assert set(told.lines) == {"good"}


class EarlierRetrieval(SmallRetrieval):
    abilities = frozenset({BLOBS})


class WordsRetrieval(SmallRetrieval):
    abilities = frozenset({BLOBS, FILTERS, RANKING})


ABOUT_ATTRIBUTES = SearchRequest(caller=CALLER, collections=["c"], query="tide", limit=1)
ABOUT_ATTRIBUTES.filter.comparison.key = "town"
WEIGHED = SearchRequest(caller=CALLER, collections=["c"], query="tide", limit=1)
WEIGHED.ranking.text_weight = 1
LATE = SearchRequest(caller=CALLER, collections=["c"], query="tide", limit=1)
LATE.ranking.MergeFrom(Ranking(text_weight=1, late_weight=1))


@pytest.mark.parametrize(
    ("kind", "request_"),
    [
        (EarlierRetrieval, ABOUT_ATTRIBUTES),
        (EarlierRetrieval, WEIGHED),
        (WordsRetrieval, LATE),
    ],
    ids=["filter", "ranking", "late"],
)
async def test_who_would_leave_a_part_of_a_request_out_is_not_asked(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[SmallRetrieval],
    request_: SearchRequest,
) -> None:
    earlier = await rig.replica(kind)
    await rig.listed(1)
    assert await rig.call("search"), "what it understands it is asked"
    monkeypatch.setattr(rig.client, "_search_s", 0.2)
    asked = calls(earlier)
    with Telemetry("gateway", "gateway-1").span("request") as span:
        with pytest.raises(PenstockError) as refused:
            await rig.client.search_for_chat(request_, span, Record())
        assert refused.value.reason == "retrieval_outdated"
        assert is_outage(refused.value), "a chat is answered without passages, and says so"
        monkeypatch.setattr(rig.client, "_search_s", 10.0)
        waiting = asyncio.create_task(rig.client.search_for_chat(request_, span, Record()))
        await rig.replica()
        await waiting
    assert calls(earlier) == asked


def test_a_document_in_a_blob_goes_to_who_knows_blobs() -> None:
    index = IndexRequest(blob="ns/acme/file-1")
    assert needs("Index", index) == {BLOBS}
    assert needs("IndexServed", index) == {BLOBS, VECTORS}
    index.reindexing = True
    assert needs("Index", index) == {BLOBS, REINDEXING}
    assert needs("Index", IndexRequest()) == needs("Remove", RemoveRequest()) == frozenset()
    assert needs("Search", SearchRequest(vector=Vector())) == {VECTORS}
    assert needs("Read", ReadRequest()) == {READING}
    marks = needs("SetAttributes", SetAttributesRequest())
    assert marks == {MARKS}, "or filters go by those before, for good"


async def test_what_a_lost_replica_told_of_a_document_is_told_anew(
    client: RetrievalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def call(*given: Any) -> None:
        *_, hear = given
        for at, text in ((0, "the har"), (0, "the "), (4, "här")):
            await hear(ReadPiece(at=at, text=text))

    held: list[int] = []
    monkeypatch.setattr(client, "_call", call)
    with Telemetry("gateway", "gateway-1").span("request") as span:
        assert await client.read(ReadRequest(), span, held.append) == "the här"
    assert held == [7, 4, 4], "bytes"


async def test_replicas_share_the_calls(
    client: RetrievalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(monkeypatch)
    client._channels = {"one": Line("one"), "two": Line("two")}  # type: ignore[dict-item]
    rig = Rig(Settings(), client, AsyncExitStack())
    for _ in range(64):  # in random order: in two of 2 ** 64 runs one of them gets none
        await rig.call("embed")
    assert set(told.lines) == {"one", "two"}


def test_what_is_an_outage_and_what_a_wrong_request() -> None:
    outages = {
        code for code in grpc.StatusCode if is_outage(PenstockError(code, "x", stage="retrieval"))
    }
    assert {code.name for code in outages} == {
        "UNAVAILABLE",
        "DEADLINE_EXCEEDED",
        "RESOURCE_EXHAUSTED",
        "INTERNAL",
        "UNKNOWN",
    }


async def test_a_search_that_hangs_is_another_replicas(rig: Rig, monkeypatch: Any) -> None:
    """In the half of its time that is left; what takes its time otherwise stays where it is."""
    slow, quick = await rig.replica(), await rig.replica()
    await rig.listed(2)
    monkeypatch.setattr(module.random, "sample", lambda replicas, _: sorted(
        replicas, key=lambda id: id != slow.id))  # fmt: skip
    rig.client._search_s = 1.0
    slow.service.hold.clear()  # type: ignore[attr-defined]
    for name in ("search", "chat"):
        await rig.call(name)
    assert (calls(slow), calls(quick)) == (2, 2)
    remove = await rig.begun("remove", slow)
    slow.service.hold.set()  # type: ignore[attr-defined]
    await remove
    assert calls(quick) == 2


@pytest.mark.parametrize("reason", ["store_slow", "store_away", "timeout", "embedder_slow"])
async def test_what_one_replica_does_not_reach_another_may(
    rig: Rig, monkeypatch: Any, reason: str
) -> None:
    failing, well = await rig.replica(), await rig.replica()
    await rig.listed(2)
    monkeypatch.setattr(module.random, "sample", lambda replicas, _: sorted(
        replicas, key=lambda id: id != failing.id))  # fmt: skip
    failure = unavailable("away", stage="retrieval", reason=reason)
    failing.service.failure = failure  # type: ignore[attr-defined]
    await rig.call("chat")
    assert (calls(failing), calls(well)) == (1, 1)
    well.service.failure = failure  # type: ignore[attr-defined]
    assert await rig.outcome("chat") == reason


async def test_when_all_hang_the_search_ends_in_its_time(rig: Rig) -> None:
    for _ in range(2):
        (await rig.replica()).service.hold.clear()  # type: ignore[attr-defined]
    await rig.listed(2)
    rig.client._search_s = 0.5
    began = time.monotonic()
    assert await rig.outcome("chat") == "timeout"
    assert time.monotonic() - began < 5


async def test_the_embedders_are_what_replicas_have_by_name(rig: Rig) -> None:
    """Of a name that two have differently none is known; retrieval that is away is as it was."""
    assert not rig.client.has("wide")
    replica = await rig.replica()
    await rig.listed(1)
    assert rig.client.has("wide")
    assert rig.client.fingerprints == {"": "e1", EMBEDDING_MODEL: "e1", "wide": "w1"}

    class Other(SmallRetrieval):
        further: ClassVar = {"wide": "w2", "third": "t1"}

    await rig.replica(Other)
    await rig.listed(2)
    assert rig.client.fingerprints == {
        "": "e1",
        EMBEDDING_MODEL: "e1",
        "wide": "",
        "third": "t1",
    }
    await replica.stop(0)
    await rig.listed(1)
    assert rig.client.fingerprints["wide"] == "w2"
    await rig.replicas[1].stop(0)
    await rig.listed(0)
    assert rig.client.has("third")
