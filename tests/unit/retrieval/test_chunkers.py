"""The processes that cut documents: what they answer, and that a document ends nothing but one."""

import asyncio
import os
import signal
import subprocess
import sys
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import psutil
import pytest

from services.common.errors import PenstockError
from services.retrieval.documents import chunkers as module
from services.retrieval.documents.chunkers import Chunkers, CutDocument
from services.retrieval.documents.chunks import Limits, ProcessOptions
from services.retrieval.documents.loading import load
from services.retrieval.text_reader import TextReader
from tests.support.documents import chunks
from tests.support.minilm import FOLDER
from tests.support.waiting import until

LIMITS = Limits(chars=2_000_000, pages=100, unpacked_bytes=2**26)
OPTIONS = ProcessOptions(str(FOLDER), max_chunks=200, cpu_s=30, memory_bytes=2**30, limits=LIMITS)
TEXT = "# Guide\n\n" + "The harbour opens at six. Boats pay two coins a night. " * 20
MANY_LINES = "- a\n" * 250_000  # seconds of parsing, 500 MB


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[Chunkers]:
    chunkers = Chunkers(OPTIONS._replace(**options))
    await chunkers.start()
    yield chunkers
    await chunkers.stop()
    assert not [c for c in psutil.Process().children() if "chunk_process" in str(c.cmdline())]


def first(chunkers: Chunkers) -> psutil.Process:
    return psutil.Process(chunkers._idle[0]._process.pid)


async def pieces(content: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(content), 50_000):
        yield content[at : at + 50_000]


async def cut(
    chunkers: Chunkers,
    title: str,
    text: str,
    tokens: int = 48,
    name: str = "a.md",
    tenant: str = "acme",
) -> CutDocument:
    content = text.encode()
    loaded = await chunkers.load(tenant, name, len(content), pieces(content))
    return await chunkers.cut(tenant, title, loaded.sections, tokens, 8)


async def refusal(chunkers: Chunkers, text: str) -> str:
    with pytest.raises(PenstockError) as raised:
        await cut(chunkers, "Doc", text)
    error = raised.value
    assert (error.code, error.param) == (grpc.StatusCode.INVALID_ARGUMENT, "file")
    assert error.reason == "document_too_large"
    return error.message


async def test_it_answers_what_chunking_makes_and_the_model_reads() -> None:
    reader = TextReader(FOLDER)
    sections, _ = load("a.md", TEXT.encode(), LIMITS)
    expected = chunks(sections, reader.plain, "Doc", 48, 8)
    assert len(expected) > 3
    async with running() as chunkers:
        process = first(chunkers)
        for _ in range(2):
            document = await cut(chunkers, "Doc", TEXT)
            assert document.chunks == expected
            read = [reader.passage(chunk.title, chunk.text).ids for chunk in expected]
            assert [list(ids) for ids in document.texts] == read
            assert all(isinstance(ids, array) for ids in document.texts), "millions may wait"
            assert document.shortened == 0
        assert first(chunkers) == process, "it is kept"
        long = "t" * 500 + " long title " * 200
        assert len((await cut(chunkers, long, "tide " * 40)).texts[0]) == 42


async def test_a_text_of_too_many_chunks_is_refused_in_words() -> None:
    async with running(max_chunks=3) as chunkers:
        process = first(chunkers)
        assert await refusal(chunkers, TEXT) == "the file makes more than 3 chunks, the limit"
        assert len((await cut(chunkers, "Doc", "Six. " * 60)).chunks) == 3
        await refusal(chunkers, "Six. " * 80)  # four
        assert first(chunkers) == process


async def test_sections_are_bounded_before_they_leave_their_process() -> None:
    """With their headings they take thirty times what their text does, in the service."""
    content = b"# A\n\nSix.\n\n" * 4
    async with running(max_chunks=3) as chunkers:
        with pytest.raises(PenstockError, match="more than 3 sections") as raised:
            await chunkers.load("acme", "a.md", len(content), pieces(content))
        assert raised.value.reason == "document_too_large"


@pytest.mark.parametrize(
    ("limit", "words"),
    [({"cpu_s": 1}, "1 s of CPU"), ({"memory_bytes": 100 * 2**20}, "100 MiB of memory")],
)
async def test_a_text_over_a_limit_fails_alone(
    limit: dict[str, int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WALL_PER_CPU", 100)
    async with running(**limit) as chunkers:
        costly = asyncio.create_task(refusal(chunkers, MANY_LINES))
        assert (await cut(chunkers, "Doc", TEXT)).chunks, "beside it"
        assert words in await costly
        assert (await cut(chunkers, "Doc", TEXT)).chunks, "after it"


async def test_native_code_that_is_refused_memory_is_told_as_such() -> None:
    async with running() as chunkers:
        process = first(chunkers)
        process.suspend()
        costly = asyncio.create_task(refusal(chunkers, TEXT))
        await until(lambda: not chunkers._idle, 5)
        process.send_signal(signal.SIGABRT)
        process.resume()
        assert await costly == "the file takes more than 1024 MiB of memory to read"


async def test_the_limit_of_cpu_is_one_documents_and_not_the_processs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_WALL_PER_CPU", 100)
    async with running(cpu_s=1, max_chunks=10_000) as chunkers:
        process = first(chunkers)
        while process.cpu_times().user < 2.5:  # each a small part of it
            await cut(chunkers, "Doc", TEXT * 100)
        assert first(chunkers) == process


async def test_a_process_that_stands_still_is_killed_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_WALL_PER_CPU", 0.02)
    async with running() as chunkers:
        process = first(chunkers)
        process.suspend()
        assert "0.6 s" in await refusal(chunkers, TEXT)
        assert not process.is_running()
        monkeypatch.setattr(module, "_WALL_PER_CPU", 4)
        assert (await cut(chunkers, "Doc", TEXT)).chunks


async def test_a_process_that_is_killed_is_an_internal_error_of_one_document() -> None:
    async with running() as chunkers:
        process = first(chunkers)
        process.suspend()
        cutting = asyncio.create_task(cut(chunkers, "Doc", TEXT))
        await until(lambda: not chunkers._idle, 5)
        assert (await cut(chunkers, "Doc", TEXT)).chunks, "a second process cuts beside it"
        process.kill()
        with pytest.raises(PenstockError) as raised:
            await cutting
        assert raised.value.code == grpc.StatusCode.INTERNAL
        assert raised.value.reason == "chunking_failed"
        idle = first(chunkers)
        idle.kill()
        await until(lambda: not chunkers._idle[0].alive, 5)
        assert (await cut(chunkers, "Doc", TEXT)).chunks, "one lost between documents is no failure"


async def test_who_gives_up_ends_the_work() -> None:
    async with running() as chunkers:
        process = first(chunkers)
        process.suspend()
        cutting = asyncio.create_task(cut(chunkers, "Doc", TEXT))
        await until(lambda: not chunkers._idle, 5)
        cutting.cancel()
        await asyncio.gather(cutting, return_exceptions=True)
        assert not process.is_running()


async def test_what_the_model_s_window_has_no_room_for_is_counted_by_texts() -> None:
    async with running() as chunkers:
        document = await cut(chunkers, "Doc", "tide " * 290 + "\n\n# Short\nSix.", 300)
        assert ([len(ids) for ids in document.texts], document.shortened) == ([256, 9], 1)
        process = first(chunkers)
        process.send_signal(signal.SIGINT)  # Ctrl-C is for the service
        assert (await cut(chunkers, "Doc", TEXT)).chunks
        assert first(chunkers) == process


async def test_only_so_many_at_once() -> None:
    async with running() as chunkers:
        cuts = await asyncio.gather(*(cut(chunkers, "Doc", TEXT) for _ in range(6)))
        assert len({len(document.chunks) for document in cuts}) == 1
        assert len(chunkers._idle) == 2


async def test_a_tenants_documents_do_not_stand_before_all_others() -> None:
    """Who reads what many files say had all documents wait behind them."""
    begun, gate = list[str](), asyncio.Event()

    async def held(tenant: str) -> AsyncIterator[bytes]:
        begun.append(tenant)
        await gate.wait()
        yield b"Six."

    async with running() as chunkers:
        tenants = [*["many"] * 6, "few"]
        loads = [asyncio.create_task(chunkers.load(one, "a.md", 4, held(one))) for one in tenants]
        await until(lambda: len(begun) == 2, 5)
        gate.set()
        await asyncio.gather(*loads)
        assert begun.index("few") <= 3


def test_it_does_not_outlive_the_service(tmp_path: Any) -> None:
    script = f"""
import asyncio
from services.retrieval.documents.chunkers import Chunkers, CutDocument
from services.retrieval.documents.chunks import Limits, ProcessOptions

async def main():
    chunkers = Chunkers({OPTIONS!r})
    await chunkers.start()
    print(chunkers._idle[0]._process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    service = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert service.stdout is not None
    child = psutil.Process(int(service.stdout.readline()))
    os.kill(service.pid, signal.SIGKILL)
    service.wait()
    service.stdout.close()
    psutil.wait_procs([child], timeout=20)
    assert not child.is_running()


async def test_options_that_do_not_work_are_told_at_the_start() -> None:
    chunkers = Chunkers(OPTIONS._replace(folder="/nowhere"))
    with pytest.raises(PenstockError) as raised:
        await chunkers.start()
    assert raised.value.code == grpc.StatusCode.INTERNAL


async def test_the_services_secrets_are_not_in_its_environment(monkeypatch: Any) -> None:
    """What a document could make it tell."""
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "redis://:secret@host")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    async with running() as chunkers:
        environment = first(chunkers).environ()
    assert "PATH" in environment
    assert not [name for name, value in environment.items() if "secret" in value]
    assert {name for name in environment if not name.startswith("PYTHON")} <= {
        *("PATH", "LD_LIBRARY_PATH", "TMPDIR", "LANG", "LC_ALL", "LC_CTYPE", "TZ")
    }


def test_it_imports_little() -> None:
    """It starts in the time of a document, and is small beside the model."""
    script = "import sys, services.retrieval.documents.chunk_process; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert not {"torch", "transformers", "grpc", "qdrant_client", "pydantic"} & set(
        loaded.stdout.split()
    )
