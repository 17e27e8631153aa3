"""How fast documents are indexed: text by the MB, PDF by the page, and what processors spend on it.

The made set's documents, several at a time, through the service's own call; as PDF the same texts
fill files of 50 pages each.
"""

import argparse
import asyncio
from typing import Any

from bench.retrieval.made import made
from bench.retrieval.pdf import pdfs
from bench.retrieval.served import File, file_of, served


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--documents", type=int, default=120, help="of the made set, as text")
    add("--pages", type=int, default=200, help="of PDF")


def run(given: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    found = asyncio.run(_run(given))
    return found, _table(found)


async def _run(given: argparse.Namespace) -> list[dict[str, Any]]:
    texts = [file_of(one) for one in made().documents[: given.documents]]
    pages = [File(f"pdf-{n}", f"Pages {n}", one) for n, one in enumerate(pdfs(given.pages))]
    found = []
    async with served() as service:
        for kind, files in {"text": texts, "PDF": pages}.items():
            await service.index(f"{kind}, warm", files[:1])
            before = service.cpu_s()
            chunks, seconds = await service.index(kind, files)
            found.append(
                {
                    "kind": kind,
                    "pages": given.pages if kind == "PDF" else None,
                    "megabytes": sum(len(one.content) for one in files) / 1e6,
                    "chunks": chunks,
                    "seconds": seconds,
                    "cpu_s": service.cpu_s() - before,
                }
            )
    return found


def _table(found: list[dict[str, Any]]) -> list[str]:
    rows = [
        "| documents | MB | pages | chunks | MB/s | pages/s | chunks/s | CPU, s | a chunk, ms |",
        "| --- " + "| ---: " * 8 + "|",
    ]
    for one in found:
        size, seconds, pages = one["megabytes"], one["seconds"], one["pages"]
        rows.append(
            f"| {one['kind']} | {size:.2f} | {pages or ''} | {one['chunks']} "
            f"| {size / seconds:.3f} | {f'{pages / seconds:.1f}' if pages else ''} "
            f"| {one['chunks'] / seconds:.1f} "
            f"| {one['cpu_s']:.0f} | {1e3 * one['cpu_s'] / one['chunks']:.0f} |"
        )
    return rows
