"""The processes that read documents and cut them, so that none can hold up the service.

A regular expression or a parser that runs over a user's text in this process holds the interpreter:
a thread would not help the others, and no deadline would end it. A process can be killed. One that
a document took over its limits fails that document alone, and the next document has a new one.
"""

import asyncio
import itertools
import json
import logging
import signal
import sys
from array import array
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import grpc

from protos import retrieval_pb2 as pb
from services.common.children import plain_environment
from services.common.errors import PenstockError, invalid
from services.common.fairness.turns import Turns
from services.retrieval import metrics
from services.retrieval.documents.chunks import Chunk, ProcessOptions, Span, passage

log = logging.getLogger(__name__)

Buffer = bytes | memoryview

_AT_ONCE = 2  # documents; the second process is started when it is needed
_WALL_PER_CPU = 6  # a busy machine gives a process such a part of a core


# How native code ends that a broken file has led astray.
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGTRAP, signal.SIGFPE)


class Loaded(NamedTuple):
    """A document's text."""

    sections: Sequence[pb.Section]
    note: str  # what its owner should know of it, in words that go on behind its name


@dataclass(frozen=True)
class CutDocument:
    """Chunks of a document, in order, and what the embedding model reads of each."""

    chunks: list[Chunk]
    texts: Sequence[Sequence[int]]  # token ids
    shortened: int  # how many of the texts the model's window had no room for


class Chunkers:
    """May be called by many at once; tenants have their documents looked at in turn."""

    def __init__(self, options: ProcessOptions) -> None:
        self._options = options
        self._turns = Turns(_AT_ONCE)
        self._idle: list[_Process] = []

    async def start(self) -> None:
        """Starts the first process. Raises PenstockError INTERNAL when that fails."""
        self._idle.append(await _Process.start(self._options))

    async def stop(self) -> None:
        while self._idle:
            await self._idle.pop().end()

    async def load(
        self, tenant: str, filename: str, size: int, content: AsyncIterable[Buffer]
    ) -> Loaded:
        """Of `size` bytes. Raises PenstockError INVALID_ARGUMENT ("document_too_large",
        "unsupported_file", "invalid_file"), INTERNAL when its process ended otherwise, and what
        `content` raises.
        """
        request = pb.DocumentRequest(load=pb.LoadRequest(filename=filename, bytes=size))
        answer = await self._ask(tenant, request, content)
        reply = await asyncio.to_thread(pb.LoadReply.FromString, answer)
        if reply.HasField("refused"):
            raise _refusal(reply.refused)
        return Loaded(reply.sections, reply.note)

    async def cut(
        self,
        tenant: str,
        title: str,
        sections: Sequence[pb.Section],
        max_tokens: int,
        overlap_tokens: int,
    ) -> CutDocument:
        """Raises PenstockError: INVALID_ARGUMENT for a text that takes more chunks, time or memory
        than a document may, INTERNAL when its process ended otherwise.
        """
        cut = pb.CutRequest(
            title=title, sections=sections, max_tokens=max_tokens, overlap_tokens=overlap_tokens
        )
        answer = await self._ask(tenant, pb.DocumentRequest(cut=cut), _nothing())
        return await asyncio.to_thread(_read, answer, sections)

    async def _ask(
        self, tenant: str, request: pb.DocumentRequest, content: AsyncIterable[Buffer]
    ) -> bytes:
        await self._turns.take(tenant)
        try:
            process = await self._take()
            try:
                with metrics.CHUNKING_SECONDS.labels(request.WhichOneof("what")).time():
                    answer = await process.ask(
                        request.SerializeToString(), content, _WALL_PER_CPU * self._options.cpu_s
                    )
            except BaseException:
                await process.end()
                raise
            self._idle.append(process)
            return answer
        finally:
            self._turns.give_back()

    async def _take(self) -> "_Process":
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
        return await _Process.start(self._options)


class _Process:
    def __init__(self, process: asyncio.subprocess.Process, options: ProcessOptions) -> None:
        self._process = process
        self._options = options

    @classmethod
    async def start(cls, options: ProcessOptions) -> "_Process":
        own = cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.retrieval.documents.chunk_process",
                json.dumps(options),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=plain_environment(),
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

    async def ask(self, request: bytes, content: AsyncIterable[Buffer], timeout_s: float) -> bytes:
        """One frame there, and what follows it; one back, within so long after that. After an
        exception the process is of no more use."""
        await self._write(len(request).to_bytes(4) + request)
        async for piece in content:
            await self._write(piece)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._receive()
        except TimeoutError:
            raise _too_costly(f"takes more than {timeout_s} s to read", "time") from None

    async def _write(self, piece: Buffer) -> None:
        assert self._process.stdin is not None
        with suppress(ConnectionError):  # it has ended: `_receive` says how
            self._process.stdin.write(piece)
            await self._process.stdin.drain()

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
            return _too_costly(f"takes more than {self._options.cpu_s} s of CPU to read", "cpu")
        if status == -signal.SIGABRT:  # how native code ends that is refused memory
            mib = self._options.memory_bytes >> 20
            return _too_costly(f"takes more than {mib} MiB of memory to read", "memory")
        if -status in _CRASHES:
            metrics.CHUNKERS_LOST.labels("crash").inc()
            log.error("a chunking process ended with signal %d over a document", -status)
            return _refused("cannot be read: the library that reads it fails", "invalid_file")
        metrics.CHUNKERS_LOST.labels("other").inc()
        log.error("a chunking process ended with status %d", status)
        return PenstockError(
            grpc.StatusCode.INTERNAL,
            "the text could not be cut: the process that did it ended",
            stage="retrieval",
            reason="chunking_failed",
        )


async def _nothing() -> AsyncIterator[Buffer]:
    return
    yield


def _read(answer: bytes, sections: Sequence[pb.Section]) -> CutDocument:
    reply = pb.CutReply.FromString(answer)
    if reply.HasField("refused"):
        raise _refusal(reply.refused)
    texts = [section.text for section in sections]
    # A character between, so that what goes on within a section alone does so without a gap.
    begins = [0, *itertools.accumulate(len(text) + 1 for text in texts)]
    chunks = [_chunk(one, texts[one.section], begins[one.section]) for one in reply.chunks]
    ids = [array("I", one.ids) for one in reply.chunks]  # as lists they take nine times as much
    return CutDocument(chunks, ids, sum(one.ids_cut > 0 for one in reply.chunks))


def _chunk(cut: pb.CutChunk, text: str, begins: int) -> Chunk:
    lead = (cut.lead.start, cut.lead.end) if cut.HasField("lead") else None
    return Chunk(
        title=cut.title,
        text=passage(text, cut.start, cut.end, lead),
        start=begins + cut.start,
        end=begins + cut.end,
        tokens=cut.tokens,
        lead=lead[1] - lead[0] if lead else 0,
        pages=Span(cut.pages.first, cut.pages.last) if cut.HasField("pages") else None,
        rows=Span(cut.rows.first, cut.rows.last) if cut.HasField("rows") else None,
    )


def _refusal(told: pb.Refusal) -> PenstockError:
    if told.fault:
        log.info("a document could not be read: %s", told.fault)
    return _refused(told.words, told.reason)


def _too_costly(words: str, what: str) -> PenstockError:
    metrics.CHUNKERS_LOST.labels(what).inc()
    return _refused(words, "document_too_large")


def _refused(words: str, reason: str) -> PenstockError:
    return invalid(f"the file {words}", "file", reason=reason, stage="retrieval")
