"""How fast documents are indexed: text, by the MB, and what of the time is whose.

The made set's documents, several at a time, through the service's own call.
"""

import argparse
import asyncio
from typing import Any

from bench.retrieval.made import made
from bench.retrieval.served import served


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--documents", type=int, default=120, help="of the made set")


def run(given: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    found = asyncio.run(_run(given))
    return found, _table(found)


async def _run(given: argparse.Namespace) -> list[dict[str, Any]]:
    documents = made().documents[: given.documents]
    megabytes = sum(len(one.text.encode()) for one in documents) / 1e6
    async with served() as service:
        await service.index("warm", documents[:2])
        before = service.cpu_s()
        chunks, seconds = await service.index("text", documents)
        cpu_s = service.cpu_s() - before
    told = {"kind": "text", "megabytes": megabytes, "chunks": chunks, "seconds": seconds}
    return [told | {"cpu_s": cpu_s}]


def _table(found: list[dict[str, Any]]) -> list[str]:
    rows = [
        "| documents | MB | chunks | MB/s | chunks/s | CPU, s a MB |",
        "| --- " + "| ---: " * 5 + "|",
    ]
    for one in found:
        size, seconds = one["megabytes"], one["seconds"]
        rows.append(
            f"| {one['kind']} | {size:.2f} | {one['chunks']} | {size / seconds:.3f} "
            f"| {one['chunks'] / seconds:.1f} | {one['cpu_s'] / size:.1f} |"
        )
    return rows
