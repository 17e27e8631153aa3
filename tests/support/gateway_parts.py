"""A gateway of stand-ins, for tests of one part of it without servers."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import grpc

from protos.retrieval_pb2 import JudgeReply, JudgeRequest, SearchReply, SearchRequest
from protos.tokenizer_pb2 import ModelInfo, PromptRequest
from services.common.config import GatewaySettings, MeteringSettings, Settings
from services.common.errors import PenstockError
from services.common.fairness.fair_threads import FairThreads
from services.common.link import End
from services.common.policy import PolicyFile
from services.common.telemetry.metrics import BoundedNames
from services.common.telemetry.telemetry import Telemetry
from services.gateway.identity.principal import GRANTS, Principal, Role
from services.gateway.intake import Intake
from services.gateway.metering.meter import Meter
from services.gateway.metering.run import Run, Verdict
from services.gateway.metering.upkeep import Upkeep
from services.gateway.models import model_not_found
from services.gateway.parts import Gateway
from services.gateway.runs.known_scores import KnownScores
from services.gateway.runs.records import Records
from services.gateway.stores.vector_stores.store_files import Unready

MODEL = "tiny"
EMBEDDING_MODEL = "tiny-embed"


def principal(tenant: str = "acme", models: frozenset[str] | None = None) -> Principal:
    member = frozenset({Role.MEMBER})
    return Principal(tenant, "key_1", member, GRANTS[Role.MEMBER], models=models)


class Auth:
    """Knows the keys in `keys`, which are what stands in the header."""

    def __init__(self) -> None:
        self.keys = {"Bearer k": principal()}
        self.knows_keys = True

    async def identify(self, authorization: str | None) -> Principal:
        if authorization not in self.keys:
            raise PenstockError(grpc.StatusCode.UNAUTHENTICATED, "no", reason="invalid_api_key")
        return self.keys[authorization]


class Models:
    async def all(self) -> list[ModelInfo]:
        return [ModelInfo(name=name, window=512, created=7) for name in ("other", MODEL)]

    async def find(self, name: str) -> ModelInfo:
        for model in await self.all():
            if model.name == name:
                return model
        raise model_not_found(name)


class Retrieval:
    def __init__(self) -> None:
        self.embedding_model = EMBEDDING_MODEL
        self.further: set[str] = set()  # embedding models
        self.searches: list[SearchRequest] = []
        self.reply: SearchReply | PenstockError = SearchReply()
        self.judged: list[JudgeRequest] = []
        self.verdict: JudgeReply | PenstockError = JudgeReply()
        self.judges = asyncio.Event()
        self.judges.set()

    async def model(self, patience_s: float) -> str:
        return self.embedding_model

    def has(self, model: str) -> bool:
        return model in self.further

    async def judge(self, request: JudgeRequest, span: Any, record: Any) -> JudgeReply:
        self.judged.append(request)
        await self.judges.wait()
        if isinstance(self.verdict, PenstockError):
            raise self.verdict
        return self.verdict

    async def search_for_chat(self, request: SearchRequest, span: Any, record: Any) -> SearchReply:
        self.searches.append(request)
        if isinstance(self.reply, PenstockError):
            raise self.reply
        return self.reply


class Stores:
    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        self.unready = Unready()

    async def require(self, tenant: str, ids: tuple[str, ...]) -> Unready:
        self.asked.append((tenant, ids))
        return self.unready


class Opened:
    """One request on a tokenizer's link."""

    def __init__(self, payload: bytes, deadline: float, traceparent: str, on_item: Any) -> None:
        self.request = PromptRequest.FromString(payload)
        self.deadline = deadline
        self.traceparent = traceparent
        self.cancelled = self.settled = False
        self._on_item = on_item
        self.outcome: asyncio.Future[End] = asyncio.get_running_loop().create_future()

    def say(self, *deltas: Any) -> None:
        for delta in deltas:
            self._on_item(delta.SerializeToString())

    def finish(self, end: End | None = None) -> None:
        if not self.outcome.done():
            self.outcome.set_result(end or End())

    def cancel(self) -> None:
        self.cancelled = True

    def settle(self) -> None:
        self.settled = True

    async def ended(self) -> End:
        return await asyncio.shield(self.outcome)


class Tokenizers:
    """Answers as `script` does with each request that is opened, as soon as it is."""

    def __init__(self, script: Callable[[Opened], None] = lambda opened: None) -> None:
        self.script = script
        self.opened: list[Opened] = []
        self.patience_s: float | None = None
        self.linked = True
        self.redis_reachable = True

    def ready(self) -> list[Any]:
        return [SimpleNamespace(id="tokenizer")] * self.linked

    async def pick_least_loaded(self, patience_s: float) -> Any:
        self.patience_s = patience_s
        number = len(self.opened) + 1
        return SimpleNamespace(id=f"tokenizer-{number}", link=SimpleNamespace(open=self._open))

    def _open(self, payload: bytes, *, deadline: float, traceparent: str, on_item: Any) -> Opened:
        opened = Opened(payload, deadline, traceparent, on_item)
        self.opened.append(opened)
        self.script(opened)
        return opened


class SharedMeter:
    """The meter in Redis, as `verdict` says: it has room, or what stands in the way, or it is away.
    Keeps what it was told."""

    def __init__(self) -> None:
        self.verdict: Verdict | Exception = Verdict()
        self.reserved: list[Run] = []
        self.settled: list[Run] = []
        self.released: list[Run] = []
        self.away = False
        self.failure: Exception | None = None

    async def reserve(self, run: Run) -> Verdict:
        if isinstance(self.verdict, Exception):
            raise self.verdict
        self.reserved.append(run)
        return self.verdict

    async def hold_all(self, runs: Sequence[Run]) -> None:
        pass

    async def settle(self, run: Run) -> None:
        if self.failure is not None:
            raise self.failure
        self.settled.append(replace(run))

    async def release(self, run: Run) -> None:
        self.released.append(run)


def meter(
    shared: SharedMeter | None = None,
    settings: MeteringSettings | None = None,
    tenants_told: BoundedNames | None = None,
) -> Meter:
    own, meters = settings or MeteringSettings(), cast(Any, shared or SharedMeter())
    upkeep = Upkeep(meters, cast(Any, None), own)
    return Meter(meters, upkeep, own, tenants_told or BoundedNames(9))


@contextmanager
def gateway_parts(
    metering: MeteringSettings | None = None, shared: SharedMeter | None = None, **gateway: Any
) -> Iterator[Any]:
    """A Gateway whose neighbours are stand-ins; `gateway` are GatewaySettings."""
    own = GatewaySettings(**{"port": 0, **gateway})
    tenants_told = BoundedNames(own.tenants_in_metrics)
    threads = FairThreads(1, "test")
    parts = Gateway(
        settings=Settings(gateway=own),
        telemetry=Telemetry("gateway", "gateway-1"),
        auth=cast(Any, Auth()),
        identity=cast(Any, None),
        meter=meter(shared, metering, tenants_told),
        tokenizers=cast(Any, Tokenizers()),
        models=cast(Any, Models()),
        retrieval=cast(Any, Retrieval()),
        policy=PolicyFile(None, 1.0),
        files=cast(Any, None),
        uploads=cast(Any, None),
        stores=cast(Any, Stores()),
        runs=cast(Any, None),
        conversations=cast(Any, None),
        jobs=cast(Any, None),
        batches=cast(Any, None),
        records=Records(10),
        scores=KnownScores(300.0),
        intake=Intake(own.max_requests, own.max_held_bytes),
        threads=threads,
        tenants_told=tenants_told,
    )
    try:
        yield parts
    finally:
        threads.stop()
        parts.telemetry.close()
