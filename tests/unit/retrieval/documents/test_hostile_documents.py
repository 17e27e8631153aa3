"""A document that is made to do harm, or is broken, costs its own job alone, and is told in words.

Each goes through the processes as the service has them; afterwards a good document does too.
"""

import asyncio
import io
import random
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import docx
import grpc
import pptx
import psutil
import pytest

from services.common.errors import PenstockError
from services.retrieval.documents.chunkers import Chunkers
from services.retrieval.documents.chunks import Limits, ProcessOptions
from tests.support.documents import pdf
from tests.support.minilm import FOLDER

MIB = 2**20
OPTIONS = ProcessOptions(
    str(FOLDER),
    max_chunks=5000,
    cpu_s=2,
    memory_bytes=512 * MIB,
    limits=Limits(chars=2_000_000, pages=1000, unpacked_bytes=64 * MIB),
)
TOLD = ("document_too_large", "invalid_file", "unsupported_file")


@pytest.fixture
async def chunkers(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Chunkers]:
    # What ends them here is CPU time, however little of it a busy machine gives.
    monkeypatch.setattr("services.retrieval.documents.chunkers._WALL_PER_CPU", 100)
    made = Chunkers(OPTIONS)
    await made.start()
    yield made
    await made.stop()


async def outcome(chunkers: Chunkers, name: str, content: bytes) -> str:
    """Its text, or why it is refused."""

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(content), MIB):
            yield content[at : at + MIB]

    refused: PenstockError | None = None
    try:
        loaded = await chunkers.load("acme", name, len(content), pieces())
        cut = await chunkers.cut("acme", name, loaded.sections, 96, 16)
    except PenstockError as error:
        refused = error
    if refused is None:
        return "\n".join(chunk.text for chunk in cut.chunks)
    assert refused.code == grpc.StatusCode.INVALID_ARGUMENT, refused
    assert refused.reason in TOLD
    assert refused.message.startswith("the file ")
    return refused.message


def office(part: str, text: bytes, times: int = 1) -> bytes:
    """A document whose part holds so much."""
    good = io.BytesIO()
    docx.Document().save(good)
    out = io.BytesIO()
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            if name != part:
                new.writestr(name, old.read(name))
        with new.open(part, "w") as file:
            for _ in range(times):
                file.write(text)
    return out.getvalue()


def bomb(declared: int | None = None) -> bytes:
    content = office("word/document.xml", b" " * MIB, 70)
    if declared is None:
        return content
    for head, at in ((b"PK\x01\x02", 24), (b"PK\x03\x04", 22)):  # what the archive says of sizes
        place = content.find(b"word/document.xml")
        while place >= 0:
            start = content.rfind(head, 0, place)
            if start >= 0 and place - start in (30, 46):
                content = (
                    content[: start + at]
                    + declared.to_bytes(4, "little")
                    + content[start + at + 4 :]
                )
            place = content.find(b"word/document.xml", place + 1)
    return content


WORD = '<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main">'


def entities(doctype: str) -> bytes:
    text = f"<!DOCTYPE x [{doctype}]>{WORD}<w:body><w:p><w:r><w:t>A&e;B</w:t></w:r></w:p></w:body>"
    return office("word/document.xml", (text + "</w:document>").encode())


LAUGHS = '<!ENTITY a0 "haha">' + "".join(
    f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 10)
)

HOSTILE: dict[str, tuple[str, Callable[[], bytes], tuple[str, ...]]] = {
    "an archive of 70 MB in 70 kB": ("a.docx", bomb, ("unpacks to",)),
    "one that says it is small": ("a.docx", lambda: bomb(1000), ("broken", "has no text")),
    "laughs": (
        "a.docx",
        lambda: entities(LAUGHS + '<!ENTITY e "&a9;">'),
        ("AB", "broken", "no text"),
    ),
    "many pages": ("a.pdf", lambda: pdf(["x"] * 1001), ("1,001 pages",)),
    "one line": ("a.txt", lambda: b"x" * 64 * MIB, ("more than 2,000,000 characters",)),
    "one line that fits": ("a.txt", lambda: b"x" * 1_500_000, ("x", "chunks")),
    "many chunks of one line": ("a.txt", lambda: "\u202eabc\u202c ".encode() * 200_000, ("abc",)),
    "one line of a table": ("a.csv", lambda: b'a,b\n"' + b"x" * 1_900_000, ("x",)),
    "deep pages": ("a.html", lambda: b"<div>" * 300_000, ("CPU", "memory", "no text")),
    "deep tables": ("a.html", lambda: b"<table><tr><td>x" * 50_000, ("x", "CPU", "memory")),
    "deep letters": ("a.html", lambda: b"<b>" * 100_000 + b"deep", ("deep",)),
    "deep values": ("a.json", lambda: b'{"a":' * 300_000, ("not JSON",)),
    "wide values": (
        "a.json",
        lambda: b"[" + b"1," * 900_000 + b"1]",
        ("chunks", "characters", "CPU"),
    ),
    "deep lists": ("a.md", lambda: b"- " * 100_000 + b"x", ("x", "nested", "CPU", "memory")),
    "deep paragraphs": (
        "a.docx",
        lambda: office(
            "word/document.xml",
            f"{WORD}<w:body>{'<w:tbl><w:tr><w:tc>' * 5000}".encode(),
        ),
        ("broken",),
    ),
    "a wide cell": (
        "a.docx",
        lambda: office(
            "word/document.xml",
            f'{WORD}<w:body><w:tbl><w:tblGrid/><w:tr><w:tc><w:tcPr><w:gridSpan w:val="99999999"/>'
            "</w:tcPr><w:p/></w:tc></w:tr></w:tbl></w:body></w:document>".encode(),
        ),
        ("memory", "CPU", "no text", "broken"),
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_document_costs_its_own_job_alone(chunkers: Chunkers, name: str) -> None:
    file, make, outcomes = HOSTILE[name]
    told = await outcome(chunkers, file, make())
    assert any(one in told for one in outcomes), told[:300]
    assert await outcome(chunkers, "a.txt", b"Good.") == "Good."


async def test_nothing_outside_of_a_document_is_read(chunkers: Chunkers, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret plan")
    callers: list[object] = []
    server = await asyncio.start_server(lambda *told: callers.append(told), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        for place in (secret.as_uri(), f"http://127.0.0.1:{port}/x"):
            entity = entities(f'<!ENTITY e SYSTEM "{place}">')
            assert "secret plan" not in await outcome(chunkers, "a.docx", entity)
            page = f'<object data="{place}"></object><iframe src="{place}"></iframe><p>Text.'
            assert await outcome(chunkers, "a.html", page.encode()) == "Text."
    assert not callers


def samples() -> dict[str, bytes]:
    word, show = docx.Document(), pptx.Presentation()
    word.add_heading("Fees", 1)
    word.add_table(2, 2).cell(0, 0).text = "Boat"
    slide = show.slides.add_slide(show.slide_layouts[1])
    slide.shapes.title.text = "Fees"
    out = io.BytesIO(), io.BytesIO()
    word.save(out[0])
    show.save(out[1])
    return {
        "a.pdf": pdf(["Fees\nTwo coins.", "Tides"], [("Fees", 0), ("Tides", 1)]),
        "a.docx": out[0].getvalue(),
        "a.pptx": out[1].getvalue(),
        "a.html": b"<h1>Fees</h1><table><tr><td>a<td>b</table><ul><li>x<p>y</ul><pre>z</pre>" * 20,
        "a.csv": b'Boat;Price\n"Ada; x";2\nBo;"3\n4"\n' * 20,
        "a.json": b'[{"a": {"b": [1, "x\\n"]}}, {"c": null}]',
        "a.jsonl": b'{"a": 1}\n{"b": "\\u00e9"}\n' * 20,
        "a.md": "# Grüße\n\n- a\n  - b\n\n| a |\n|---|\n| b |\n\n```\nx\n```\n".encode() * 10,
        "a.py": "x = 'Grüße'\n".encode("utf-16") * 20,
    }


def broken(content: bytes, chance: random.Random) -> bytes:
    """Cut short, or with some bytes of it changed, lost or doubled."""
    if chance.random() < 0.3:
        return content[: chance.randrange(len(content))]
    found = bytearray(content)
    for _ in range(chance.choice((1, 3, 30))):
        at = chance.randrange(len(found))
        to = at + chance.choice((1, 1, 4, 100))
        found[at:to] = chance.choice(
            (
                bytes(chance.randrange(256) for _ in range(to - at)),
                b"",
                found[at:to] * 2,
                b"\xff" * 4,
            )
        )
        if not found:
            return b"x"
    return bytes(found)


@pytest.mark.parametrize("name", samples())
async def test_a_broken_document_ends_in_words_or_as_text(chunkers: Chunkers, name: str) -> None:
    content, chance = samples()[name], random.Random(f"broken {name}")
    assert "the file" not in await outcome(chunkers, name, content), "whole it is read"
    kept = {child.pid for child in psutil.Process().children()}
    for _ in range(60):
        await outcome(chunkers, name, broken(content, chance))
    assert await outcome(chunkers, "a.txt", b"Good.") == "Good."
    lost = kept - {child.pid for child in psutil.Process().children()}
    assert len(lost) <= 2, "broken ones seldom end a process"
