"""The worker's servers around one engine: the link to the routers, and the door for KV blocks."""

import asyncio
import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from services.common.checkpoints.checkpoint import chosen, digest, locate, text_digest
from services.common.config import ModelSpec, Settings
from services.common.discovery import Registration, host_id
from services.common.errors import unavailable
from services.common.link import LinkCall, LinkServer, Vitals
from services.common.redis import Redis
from services.common.served_models import Checkpoint, entry
from services.common.service import Service
from services.common.telemetry.telemetry import Telemetry
from services.common.transport import Transport
from services.worker import pipeline
from services.worker.adapters import ServedAdapters
from services.worker.engine import EngineClient, EngineDied, ModelInfo, StepOutput
from services.worker.engine.kv import payload as kv_payload
from services.worker.engine.parallel.seats import Spread
from services.worker.engine_config import engine_config
from services.worker.engine_metrics import ENGINE
from services.worker.gpu_metrics import GPUS
from services.worker.kv_receiver import KvReceiver
from services.worker.kv_sender import Channels
from services.worker.metrics import Meter
from services.worker.news import News
from services.worker.sequences import Sequences
from services.worker.turns import Turns

if TYPE_CHECKING:
    from services.worker.seats import Seats

log = logging.getLogger(__name__)

# The router's admission keeps the number far lower; this bounds memory should it not.
_MAX_REQUESTS = 4096


class WorkerService(Service):
    """One engine process and its doors. Requests of routers come over links, see pipeline.py."""

    name = "worker"
    grpc_services = ("penstock.v1.Worker",)

    def __init__(self, settings: Settings, redis: Redis, telemetry: Telemetry, id: str) -> None:
        super().__init__(settings, redis, telemetry, id)
        self._model = chosen(settings, settings.worker.model)
        self._channels = Channels(Transport.of(settings, "worker"), settings.router.stall_timeout_s)
        self._steps = 0
        self._pending = 0  # requests that the engine owes a step, as of its last one
        self._moved_at = time.monotonic()
        self._step_s = 0.0  # expected of the step under way, if that is long
        self._engine: EngineClient | None = None
        self._seats: Seats | None = None
        self._meter = Meter(self._model.name, settings.worker.role)
        self._entry: Registration | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self, server: grpc.aio.Server) -> None:
        """Loads the model in the engine's own process; returns when it can compute."""
        self._began = time.time()
        folder = await asyncio.to_thread(locate, self._model)
        quantization = self.settings.worker.quantization
        self._checkpoint = await asyncio.to_thread(_checkpoint, self._model, folder, quantization)
        self._adapters = ServedAdapters(
            self.redis, self.settings, self._model, self._checkpoint, folder
        )
        first = await self._adapters.first()
        digest = self._checkpoint.digest
        spread = await self._spread(str(folder)) if self.settings.worker.is_spread else None
        self._engine = EngineClient(
            engine_config(self.settings, str(folder), digest, spread),
            on_step=self._on_step,
            on_long_step=self._on_long_step,
        )
        self._info: ModelInfo = await self._engine.start()
        self._news = News(self._info, self.settings.worker.max_running)
        self._sequences = Sequences(self._engine)
        self._kv_format = f"{self._checkpoint.digest} {self._info.kv_format}"
        self._receiver = KvReceiver(self._engine, self._kv_format)
        self._stage = pipeline.Stage(
            checkpoint=self._checkpoint,
            kv_format=self._kv_format,
            adapters=self._adapters,
            engine=self._engine,
            sequences=self._sequences,
            turns=Turns(),
            receiver=self._receiver,
            channels=self._channels,
            telemetry=self.telemetry,
            meter=self._meter,
            share_memory_on=host_id(self.settings.peer_host)
            if self.settings.worker.transfer == "auto"
            else "",
        )
        self._links = LinkServer(
            "/penstock.v1.Worker/Link",
            self._handle,
            vitals=self._vitals,
            snapshot=lambda: [self._news.snapshot()],
            more=lambda: self._news.below(),
            max_requests=_MAX_REQUESTS,
        )
        self._links.add_to(server)
        self._receiver.add_to(server)
        self._measure(self._engine)
        self._watching = asyncio.create_task(self._watch(self._engine), name="engine watch")
        self._entry = entry(self.redis, self.settings, self._checkpoint)
        await self._entry.start()
        await self._adapters.start(first, self._engine, self._tell_adapters)

    async def _spread(self, folder: str) -> Spread:
        from services.worker.seats import Seats  # which wants Ray, and a worker may be without

        engine_config(self.settings, folder)  # what cannot work takes no seats
        self._seats = Seats(self.settings)
        return await self._seats.spread(self._model, folder, self._checkpoint.digest)

    def describe(self) -> dict[str, str]:
        """Facts for the registry; routers place by them."""
        options = self.settings.worker
        return {
            "role": options.role,
            "model": self._model.name,
            "digest": self._checkpoint.digest,
            "began": f"{self._began:.3f}",
            "device": self._info.device,
            "kernels": self._info.kernels,
            "threads": str(self._info.threads),
            "weights": self._info.weights,
            "huge_bytes": str(self._info.huge_bytes),
            "dtype": self._info.dtype,
            "quantization": options.quantization,
            "kv_format": self._kv_format,
            "block_size": str(self._info.block_size),
            "max_running": str(options.max_running),
            "max_model_len": str(self._info.max_model_len),
            "adapters": " ".join(self._adapters.digests),
        }

    def check(self) -> None:
        """Raises when the engine is gone, or owes a step for too long."""
        if self._engine is None or not self._engine.running:
            raise unavailable("the engine process ended", stage="worker", reason="engine_died")
        vitals = self._vitals()
        silent_s = time.monotonic() - max(self._moved_at, self._sequences.last_added)
        patience_s = vitals.patience_s(self.settings.router.stall_timeout_s)
        if vitals.pending and silent_s > patience_s:
            raise unavailable(
                f"the engine made no step for {silent_s:.0f} s with work pending",
                stage="worker",
                reason="engine_stalled",
            )

    async def drain(self, grace_s: float) -> None:
        if self._entry is not None:
            await self._adapters.withdraw()
            await self._entry.stop()
        await self._links.drain(grace_s)

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._entry is not None:
            await self._adapters.withdraw()
            await self._entry.stop()
        if self._engine is not None:
            await self._engine.stop()
        if self._seats is not None:
            self._seats.leave()
        await self._channels.close()

    def _tell_adapters(self) -> None:
        self._links.broadcast(self._news.of_adapters(self._adapters.digests))

    def _measure(self, engine: EngineClient) -> None:
        self._meter.watch(lambda: self._vitals().pending, self._info)
        ENGINE.watch(lambda: engine.pid)
        if self.settings.worker.device != "cpu":
            GPUS.watch()

    def _vitals(self) -> Vitals:
        """`pending` are the requests that the next step must move."""
        return Vitals(self._steps, self._pending + self._sequences.unseen, self._step_s)

    async def _handle(self, call: LinkCall) -> None:
        await pipeline.serve(self._stage, call)

    def _on_long_step(self, expected_s: float) -> None:
        self._step_s = expected_s

    def _on_step(self, step: StepOutput) -> None:
        """Hands on all that one step made in one loop turn, so that a link sends one frame."""
        self._steps, self._pending, self._moved_at = step.step, step.pending, time.monotonic()
        self._step_s = 0.0
        for orphan in self._sequences.deliver(step):
            kv_payload.discard(orphan.data)
        for reserved in step.kv_reserved:
            self._receiver.reserved(reserved.request_id, reserved.cached_blocks)
        self._links.broadcast(self._news.of_step(step.load, step.kv_events, step.tier_events))
        self._meter.step(step)

    async def _watch(self, engine: EngineClient) -> None:
        with suppress(asyncio.CancelledError):
            try:
                await engine.wait_closed()
            except EngineDied as death:
                log.error("the engine is gone: %s", death)
                self._sequences.fail_all(death)
                await self._links.drain(grace_s=1)  # routers must not try this worker again


def _checkpoint(model: ModelSpec, folder: Path, quantization: str) -> Checkpoint:
    """Raises OSError. Weights that are rounded when they are loaded make another checkpoint of it:
    no request goes on with them that others began, and no KV goes from one to the other."""
    return Checkpoint(model.name, digest(folder, quantization), text_digest(folder), model.path)
