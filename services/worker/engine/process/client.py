"""The asyncio end of an engine process."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from services.worker.engine.adapters import Adapter, PlaceInUse
from services.worker.engine.config import EngineConfig
from services.worker.engine.kv import payload as kv_payload
from services.worker.engine.messages import KvBlocks, Request
from services.worker.engine.outputs import ModelInfo, StepOutput
from services.worker.engine.process import wire
from services.worker.engine.process.how_it_ended import how_it_ended

log = logging.getLogger(__name__)

_ROOT = Path(__file__).resolve().parents[4]
_STREAM_BUFFER = 4 * 2**20


class EngineLoadError(Exception):
    """The engine did not come up: an unsupported or broken checkpoint, no memory, ..."""


class EngineDied(Exception):
    """The engine process ended by itself; the message says how.

    `killed`: by SIGKILL, so not by what it computed, unless that took all memory.
    """

    def __init__(self, message: str, killed: bool = False) -> None:
        super().__init__(message)
        self.killed = killed


class EngineClient:
    """Starts an engine process and talks to it. Use it from one event loop.

    `on_step` is called on the loop for every StepOutput, in order, and `on_long_step` before one
    that is expected to take long; an exception from them ends the client as if the engine had died.
    `KvBlocks`s in a StepOutput belong to the callee (see kv/payload.py).

    Commands return at once and are carried out between steps, in order; only `write_kv` and
    `start_decode`, in order among themselves, may be overtaken by the others: a cancel waits for no
    bulk of KV blocks. An id for which they were given must therefore not be used again.
    A refused or failed request ends with a RequestOutput that carries the error; commands for
    unknown ids are ignored. After the process ended, commands raise EngineDied.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_step: Callable[[StepOutput], None],
        on_long_step: Callable[[float], None] = lambda expected_s: None,
    ) -> None:
        self.config = config
        self.info: ModelInfo | None = None
        """Set once the model is loaded."""
        self._on_step = on_step
        self._on_long_step = on_long_step
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._transfers: asyncio.StreamWriter | None = None
        self._unfinished: set[str] = set()
        self._snapshots: dict[int, asyncio.Future[list[bytes]]] = {}
        self._snapshots_asked = 0
        self._loads: dict[int, asyncio.Future[str]] = {}
        self._loads_asked = 0
        self._receiving: asyncio.Task[None] | None = None
        self._begun = asyncio.Event()
        """Who started it has the ModelInfo, and may be told of steps."""
        self._stopping = False
        self._closed = asyncio.Event()
        self._death: EngineDied | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and not self._closed.is_set()

    async def wait_closed(self) -> None:
        """Returns when the process is gone after `stop`; raises EngineDied if it went by itself."""
        await self._closed.wait()
        if self._death:
            raise self._death

    async def start(self) -> ModelInfo:
        """Starts the process and returns when the model is loaded. Raises EngineLoadError.

        Steps are told of from then on: there may be some before anything was asked for. If the
        waiting is cancelled, the process is ended.
        """
        commands, their_commands = socket.socketpair()
        transfers, their_transfers = socket.socketpair()
        with their_commands, their_transfers:
            theirs = [their_commands.fileno(), their_transfers.fileno()]
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.worker.engine.process.loop",
                *map(str, theirs),
                pass_fds=theirs,
                stdin=asyncio.subprocess.DEVNULL,
                env=self._environment(),
            )
        reader, self._writer = await asyncio.open_connection(sock=commands, limit=_STREAM_BUFFER)
        _, self._transfers = await asyncio.open_connection(sock=transfers)
        self._send(self.config)
        ready: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
        self._receiving = asyncio.create_task(self._receive(reader, ready), name="engine-client")
        try:
            return await ready
        except asyncio.CancelledError:
            self._stopping = True
            self._kill()
            raise
        finally:
            self._begun.set()

    def _environment(self) -> dict[str, str]:
        path = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        if self.config.threads:
            # Read by OpenMP when torch is imported; idle threads must not spin on a shared machine.
            environment["OMP_NUM_THREADS"] = str(self.config.threads)
            environment["OMP_WAIT_POLICY"] = "PASSIVE"
        return environment

    def add(self, request: Request) -> None:
        """Raises ValueError while another request of this id has not ended."""
        if request.request_id in self._unfinished:
            raise ValueError(f"request id {request.request_id!r} is in use")
        self._send(("add", request))
        self._unfinished.add(request.request_id)

    def cancel(self, request_id: str) -> None:
        self._send(("cancel", request_id))

    def write_kv(self, blocks: KvBlocks) -> None:
        """Gives blocks to a reserved request, in order. Takes `blocks.data` over: a SharedRef is
        removed whatever becomes of the request."""
        try:
            self._send(("write_kv", blocks), self._transfers)
        except EngineDied:
            kv_payload.discard(blocks.data)
            raise

    def start_decode(self, request_id: str, first_token: int) -> None:
        self._send(("start_decode", request_id, first_token), self._transfers)

    async def snapshot(self) -> list[bytes]:
        """Hashes of all prefix blocks held now. KvEvents of later StepOutputs may be applied on
        top; some may be contained already, which changes nothing."""
        self._snapshots_asked += 1
        number = self._snapshots_asked
        answer: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        self._snapshots[number] = answer
        self._send(("snapshot", number))
        return await answer

    async def load_adapter(self, adapter: Adapter) -> str:
        """Requests may name it, once this has returned nothing; else it is why not. Raises
        PlaceInUse where it may be asked again."""
        self._loads_asked += 1
        number = self._loads_asked
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._loads[number] = answer
        self._send(("load_adapter", number, adapter))
        return await answer

    def drop_adapter(self, id: str) -> None:
        """Requests that were added before have it to their end; no others get it. Its place is free
        for another one then, whose loading fails until it is."""
        self._send(("drop_adapter", id))

    async def drain(self) -> None:
        """Waits until the `write_kv`s given so far fit the socket's buffer: flow control."""
        if self._transfers:
            await self._transfers.drain()

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Ends the process: unfinished requests are dropped. Kills it after `timeout_s`."""
        if self._process is None or self._receiving is None:
            return
        self._stopping = True
        with suppress(EngineDied):
            self._send(("shutdown",))
        done, _ = await asyncio.wait([self._receiving], timeout=timeout_s)
        if not done:
            self._kill()
            await asyncio.wait([self._receiving])

    def _send(self, message: object, writer: asyncio.StreamWriter | None = None) -> None:
        writer = writer or self._writer
        if writer is None or self._closed.is_set():
            raise EngineDied("the engine process is not running")
        writer.writelines(wire.encode(message))

    async def _receive(
        self, reader: asyncio.StreamReader, ready: asyncio.Future[ModelInfo]
    ) -> None:
        """Handles messages until the process ends, then settles every future."""
        assert self._process is not None
        failed: wire.Failure | None = None
        try:
            while True:
                message = await _read(reader)
                match message:
                    case StepOutput():
                        self._unfinished.difference_update(
                            output.request_id for output in message.outputs if output.finish_reason
                        )
                        self._on_step(message)
                    case wire.LongStep():
                        self._on_long_step(message.expected_s)
                    case wire.Snapshot():
                        answer = self._snapshots.pop(message.number)
                        if not answer.done():
                            answer.set_result(message.hashes)
                    case wire.Done():
                        loaded = self._loads.pop(message.number)
                        if loaded.done():
                            continue
                        if message.in_use:
                            loaded.set_exception(PlaceInUse(message.why_not))
                        else:
                            loaded.set_result(message.why_not)
                    case ModelInfo():
                        self.info = message
                        if not ready.done():
                            ready.set_result(message)
                        await self._begun.wait()
                    case wire.Failure():
                        failed = message
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the process has gone, or is about to
        except Exception as error:
            log.exception("on_step failed; ending the engine")
            failed = wire.Failure(f"on_step failed: {error!r}")
            self._kill()
        await self._settle(failed, ready)

    async def _settle(self, failed: wire.Failure | None, ready: asyncio.Future[ModelInfo]) -> None:
        assert self._process is not None
        for writer in (self._writer, self._transfers):
            if writer is not None:
                writer.close()
        status = await self._process.wait()
        kv_payload.sweep()
        died = EngineDied(
            failed.message if failed else f"the engine process {how_it_ended(status)}",
            killed=failed.killed if failed else status == -signal.SIGKILL,
        )
        asked: list[asyncio.Future[Any]] = [*self._snapshots.values(), *self._loads.values()]
        for answer in asked:
            if not answer.done():
                answer.set_exception(died)
        if not ready.done():
            ready.set_exception(EngineLoadError(str(died)))
        if not self._stopping:
            self._death = died
        self._closed.set()

    def _kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()


async def _read(reader: asyncio.StreamReader) -> object:
    (count,) = wire.COUNT.unpack(await reader.readexactly(wire.COUNT.size))
    sizes = wire.decode_sizes(await reader.readexactly(8 * count))
    return wire.decode([await reader.readexactly(size) for size in sizes])
