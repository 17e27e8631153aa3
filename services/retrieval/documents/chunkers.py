"""The processes that cut documents into chunks, so that no document can hold up the service.

A regular expression or a parser that runs over a user's text in this process holds the interpreter:
a thread would not help the others, and no deadline would end it. A process can be killed. One that
a document took over its limits fails that document alone, and the next document has a new one.
"""

import asyncio
import json
import logging
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc

from protos import retrieval_pb2 as pb
from services.common.errors import PenstockError, invalid
from services.retrieval import metrics
from services.retrieval.documents.chunks import Chunk, CutOptions

log = logging.getLogger(__name__)

_AT_ONCE = 2  # documents; the second process is started when it is needed
_WALL_PER_CPU = 6  # a busy machine gives a process such a part of a core
_ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class CutDocument:
    """Chunks of a document, in order, and what the embedding model reads of each."""

    chunks: list[Chunk]
    texts: list[list[int]]  # token ids
    shortened: int  # how many of the texts the model's window had no room for


class Chunkers:
    """`cut` may be called by many at once."""

    def __init__(self, options: CutOptions) -> None:
        self._options = options
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._idle: list[_Process] = []

    async def start(self) -> None:
        """Starts the first process. Raises PenstockError INTERNAL when that fails."""
        self._idle.append(await _Process.start(self._options))

    async def stop(self) -> None:
        while self._idle:
            await self._idle.pop().end()

    async def cut(self, title: str, text: str) -> CutDocument:
        """Raises PenstockError: INVALID_ARGUMENT for a text that takes more chunks, time or memory
        than a document may, INTERNAL when its process ended otherwise.
        """
        request = pb.CutRequest(title=title, text=text).SerializeToString()
        async with self._places:
            process = await self._take()
            try:
                with metrics.CHUNKING_SECONDS.time():
                    answer = await process.ask(request, _WALL_PER_CPU * self._options.cpu_s)
            except BaseException:
                await process.end()
                raise
            self._idle.append(process)
        return await asyncio.to_thread(_read, answer, text)

    async def _take(self) -> "_Process":
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
        return await _Process.start(self._options)


class _Process:
    def __init__(self, process: asyncio.subprocess.Process, options: CutOptions) -> None:
        self._process = process
        self._options = options

    @classmethod
    async def start(cls, options: CutOptions) -> "_Process":
        path = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.retrieval.documents.chunk_process",
                json.dumps(options),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            ),
            options,
        )
        try:
            await own._receive()
        except BaseException:
            await own.end()
            raise
        return own

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, request: bytes, timeout_s: float) -> bytes:
        """One frame there, one back. After an exception the process is of no more use."""
        try:
            async with asyncio.timeout(timeout_s):
                assert self._process.stdin is not None
                with suppress(ConnectionError):  # it has ended: `_receive` says how
                    self._process.stdin.write(len(request).to_bytes(4) + request)
                    await self._process.stdin.drain()
                return await self._receive()
        except TimeoutError:
            raise _too_costly(f"takes more than {timeout_s} s to cut", "time") from None

    async def end(self) -> None:
        if self.alive:
            with suppress(ProcessLookupError):
                self._process.kill()
        await self._process.wait()

    async def _receive(self) -> bytes:
        assert self._process.stdout is not None
        try:
            size = int.from_bytes(await self._process.stdout.readexactly(4))
            return await self._process.stdout.readexactly(size)
        except asyncio.IncompleteReadError:
            raise self._death(await self._process.wait()) from None

    def _death(self, status: int) -> PenstockError:
        if status == -signal.SIGXCPU:
            return _too_costly(f"takes more than {self._options.cpu_s} s of CPU to cut", "cpu")
        if status == -signal.SIGABRT:  # how native code ends that is refused memory
            mib = self._options.memory_bytes >> 20
            return _too_costly(f"takes more than {mib} MiB of memory to cut", "memory")
        metrics.CHUNKERS_LOST.labels("other").inc()
        log.error("a chunking process ended with status %d", status)
        return PenstockError(
            grpc.StatusCode.INTERNAL,
            "the text could not be cut: the process that did it ended",
            stage="retrieval",
            reason="chunking_failed",
        )


def _read(answer: bytes, text: str) -> CutDocument:
    reply = pb.CutReply.FromString(answer)
    if reply.refused:
        raise _refused(reply.refused)
    chunks = [Chunk(c.title, text[c.start : c.end], c.start, c.end, c.tokens) for c in reply.chunks]
    texts = [list(c.ids) for c in reply.chunks]
    return CutDocument(chunks, texts, sum(c.ids_cut > 0 for c in reply.chunks))


def _too_costly(words: str, what: str) -> PenstockError:
    metrics.CHUNKERS_LOST.labels(what).inc()
    return _refused(words)


def _refused(words: str) -> PenstockError:
    return invalid(f"the text {words}", "text", reason="document_too_large", stage="retrieval")
