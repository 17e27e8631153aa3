"""How long a user waits until his PDFs are indexed, and what that costs each process.

Starts `penstock up` with a data directory and one worker of its own, uploads the files, makes a
store of them, and waits until the last one's job is done. On a busy machine the processor time
holds, where the wall's does not.
"""

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.platform import MOST, ROOT, client_of, cpu_s, platform_up
from bench.result_file import checkpoint_folder
from bench.retrieval.pdf import pdfs
from bench.retrieval.stores import Upload, filled
from services.cli.running import Running


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=checkpoint_folder, default=ROOT / "models" / "demo")
    add("--pages", type=int, default=1000)


def run(given: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    uploads = [Upload(f"{n}.pdf", content) for n, content in enumerate(pdfs(given.pages))]
    with (
        tempfile.TemporaryDirectory() as folder,
        platform_up(given.model, Path(folder), "ngram") as running,
    ):
        seconds, spent = asyncio.run(_indexed(running, uploads))
    found = {
        "pages": given.pages,
        "files": len(uploads),
        "megabytes": sum(len(one.content) for one in uploads) / 1e6,
        "seconds": seconds,
        "cpu_s": dict(spent),
    }
    return found, _table(found)


async def _indexed(running: Running, uploads: list[Upload]) -> tuple[float, Counter[str]]:
    """Seconds from the first byte on, and processor seconds by process."""
    async with client_of(running) as (http, _):
        await filled(http, [Upload("first.pdf", *pdfs(1))])  # what a first file alone costs
        before, began = _by_process(running), time.perf_counter()
        await filled(http, uploads)
        seconds, spent = time.perf_counter() - began, _by_process(running)
    spent.subtract(before)
    return seconds, spent


def _by_process(running: Running) -> Counter[str]:
    return Counter({name: spent for (_, name), spent in cpu_s(running).items()})


def _table(found: dict[str, Any]) -> list[str]:
    spent = Counter(found["cpu_s"])
    return [
        f"{found['pages']} pages of PDF in {found['files']} files, {found['megabytes']:.1f} MB: "
        f"{found['seconds']:.0f} s, {spent.total():.0f} s of processor time",
        "",
        "| process | CPU, s |",
        "| --- | ---: |",
        *(f"| {name} | {seconds:.1f} |" for name, seconds in spent.most_common(MOST)),
    ]
