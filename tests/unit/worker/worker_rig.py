"""A whole worker, doors and all, around an engine whose steps the test makes."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from protos import common_pb2, worker_pb2
from services.common.config import ModelSpec, RouterSettings, Settings
from services.common.link import End, LinkClient, LinkRequest
from services.common.packed_ids import pack
from services.common.redis import connect
from services.common.service import SERVER_OPTIONS
from services.common.telemetry.telemetry import Telemetry
from services.common.transport import listen
from services.worker import server
from services.worker.engine import (
    EngineConfig,
    EngineDied,
    FinishReason,
    KvBlocks,
    KvReserved,
    Load,
    ModelInfo,
    Request,
    RequestOutput,
    StepOutput,
    Timeline,
    Usage,
)
from services.worker.server import WorkerService
from tests.support.transport import SECRET, TRANSPORT
from tests.support.waiting import until

Work = worker_pb2.WorkRequest
NO_REDIS = connect("redis://127.0.0.1:1/0")  # connects only when it is used

INFO = ModelInfo(
    architecture="LlamaForCausalLM", vocab_size=1000, max_model_len=640, eos_token_ids=(1,),
    dtype="bfloat16", device="cpu", kernels="reference", threads=1, num_parameters=1,
    parameter_bytes=4, weights="memory", huge_bytes=0, workspace_bytes=None, num_blocks=9,
    block_size=16, kv_bytes_per_block=64, kv_shape_per_block=(1, 2, 1, 16, 1),
    kv_format="float32 rows",
)  # fmt: skip
LOAD = Load(
    waiting=1, running=2, max_running=8, free_blocks=3, total_blocks=9, block_size=16,
    queued_prefill_tokens=40, prefill_tokens_per_s=1000.0, decode_step_ms=2.5, prompt_share=0.5,
)  # fmt: skip


class FakeEngine:
    """An EngineClient. It notes what it is given; outputs come as the test says."""

    pid: int | None = None

    def __init__(
        self,
        config: EngineConfig,
        on_step: Callable[[StepOutput], None],
        on_long_step: Callable[[float], None],
    ) -> None:
        self.config = config
        self.on_long_step = on_long_step
        self.running = False
        self.stopped = False
        self.requests: list[Request] = []
        self.cancelled: list[str] = []
        self.written: list[KvBlocks] = []
        self.begun: list[tuple[str, int]] = []
        """Ids and first tokens that `start_decode` was given."""
        self._on_step = on_step
        self._steps = 0
        self._closed = asyncio.Event()

    async def start(self) -> ModelInfo:
        self.running, self.killed = True, False
        return INFO

    async def stop(self) -> None:
        self.stopped, self.running = True, False
        self._closed.set()

    async def wait_closed(self) -> None:
        await self._closed.wait()
        if not self.stopped:
            raise EngineDied("gone", killed=self.killed)

    def add(self, request: Request) -> None:
        self._check()
        self.requests.append(request)

    def cancel(self, request_id: str) -> None:
        self._check()
        self.cancelled.append(request_id)

    def write_kv(self, blocks: KvBlocks) -> None:
        self._check()
        self.written.append(blocks)

    def start_decode(self, request_id: str, first_token: int) -> None:
        self._check()
        self.begun.append((request_id, first_token))

    async def drain(self) -> None: ...

    def _check(self) -> None:
        if not self.running:
            raise EngineDied("not running")

    # ---- of the test ------------------------------------------------------------------------

    def step(self, *outputs: RequestOutput, pending: int = 0, **made: Any) -> None:
        self._steps += 1
        ended_ns = time.time_ns()
        self._on_step(
            StepOutput(
                self._steps, ended_ns - 1000, 1000, LOAD, pending, outputs=[*outputs], **made
            )
        )

    def reserve(self, request_id: str, cached_blocks: int = 0) -> None:
        self.step(kv_reserved=[KvReserved(request_id, cached_blocks)])

    def die(self, killed: bool = False) -> None:
        self.running, self.killed = False, killed
        self._closed.set()


def output(request_id: str, *tokens: int, **fields: Any) -> RequestOutput:
    return RequestOutput(request_id, [*tokens], **fields)


def first(request_id: str, *tokens: int, cached: int = 0, **fields: Any) -> RequestOutput:
    """A request's first tokens."""
    return output(
        request_id, *tokens, num_cached_tokens=cached, timeline=Timeline(10, 20, ()), **fields
    )


def last(request_id: str, *tokens: int, reason: FinishReason, **fields: Any) -> RequestOutput:
    return output(request_id, *tokens, finish_reason=reason, usage=Usage(40, 32, 5), **fields)


class Answer:
    """What a router hears of one request."""

    def __init__(self, link: LinkClient, work: Work) -> None:
        self.deltas: list[worker_pb2.TokenDelta] = []
        self.request: LinkRequest = link.open(
            work.SerializeToString(),
            deadline=time.monotonic() + 60,
            on_item=lambda item: self.deltas.append(worker_pb2.TokenDelta.FromString(item)),
        )

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    async def end(self) -> End:
        return await asyncio.wait_for(self.request.ended(), 20)


class Worker:
    """A running WorkerService, its engine, and a router's link to it."""

    def __init__(self, service: WorkerService, engine: FakeEngine, address: str) -> None:
        self.service = service
        self.engine = engine
        self.address = address
        self.news: list[worker_pb2.WorkerNews] = []
        self.link = LinkClient(
            address,
            "/penstock.v1.Worker/Link",
            transport=TRANSPORT,
            peer_id="router-1",
            on_news=lambda news: self.news.append(worker_pb2.WorkerNews.FromString(news)),
        )

    async def ask(self, **fields: Any) -> tuple[Answer, Request]:
        """A request of a router; returns when the engine has it."""
        had = len(self.engine.requests)
        answer = self.open(**fields)
        await until(lambda: len(self.engine.requests) > had, what="the engine has the request")
        return answer, self.engine.requests[had]

    def open(self, **fields: Any) -> Answer:
        own = self.service._checkpoint.digest
        work = {
            "model": "tiny",
            "checkpoint": own,
            "prompt_token_ids": pack(range(3, 43)),
            **fields,
        }
        return Answer(self.link, Work(**work))


@asynccontextmanager
async def running_worker(
    folder: Path, stall_timeout_s: float = 30.0, **options: Any
) -> AsyncIterator[Worker]:
    """`options`: of WorkerSettings."""
    settings = Settings(
        models=[ModelSpec(name="tiny", path=str(folder))],
        internal_secret=SECRET,
        data_dir=folder,
        router=RouterSettings(stall_timeout_s=stall_timeout_s),
        worker=options,
    )
    made: list[FakeEngine] = []

    def make(*args: Any, **kwargs: Any) -> FakeEngine:
        made.append(FakeEngine(*args, **kwargs))
        return made[0]

    service = WorkerService(settings, NO_REDIS, Telemetry("worker", "w"), "w")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "EngineClient", make)
        grpc_server = TRANSPORT.server(SERVER_OPTIONS)
        await service.start(grpc_server)
    address = f"127.0.0.1:{listen(grpc_server, '127.0.0.1', 0)}"
    await grpc_server.start()
    worker = Worker(service, made[0], address)
    await worker.link.start()
    try:
        await worker.link.wait_ready(20)
        yield worker
    finally:
        await worker.link.close()
        await service.stop()
        await grpc_server.stop(None)


def status_of(end: End) -> tuple[int, str, str, str]:
    """Code, stage, reason and param."""
    return end.status.code, end.status.stage, end.status.reason, end.status.param


def spans_of(end: End) -> dict[str, common_pb2.Span]:
    return {span.name: span for span in end.record.spans}
