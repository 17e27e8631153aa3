"""How long a search takes, and what a vector costs, by how many there are.

Passages and vectors are mixtures of the made set's own: as far apart as real ones, and as many as
are asked for without hours of embedding. They go straight into the store; searches go the whole
way, one after the other. The wall's times want a quiet machine, processor time holds on any.

A store of its own in `--folder` stays, and grows where it was left: a million can be written beside
other work, and searched when the machine is quiet.
"""

import argparse
import asyncio
import sys
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from bench.retrieval.made import made
from bench.retrieval.quality import RANKINGS
from bench.retrieval.served import TENANT, Served, served
from protos.common_pb2 import AttributeValue
from protos.retrieval_pb2 import Filter
from services.retrieval.documents.chunks import Chunk
from services.retrieval.token_vectors import packed

_COLLECTION = "many"
_OTHER = "other"  # collections' searches must not slow down
_REAL = 512  # passages that are mixed
_PER_DOCUMENT = 512
_SHOWN = 10
_SEED = 7
_PARTS = 10  # of which a filtered search looks at one
_MIXED = 0.45  # how much of a second vector is in each

_ONE_PART = Filter.Comparison(key="part", operator=Filter.EQ, values=[AttributeValue(number=3)])

# Every search is one tenant's, in one collection.
WAYS: dict[str, dict[str, Any]] = RANKINGS | {"filtered": {"filter": Filter(comparison=_ONE_PART)}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--vectors", type=int, nargs="+", default=[10_000, 100_000], help="a million takes an hour")
    add("--searches", type=int, default=300, help="of each way of ranking, at each size")
    add("--rankings", nargs="+", choices=WAYS, default=list(WAYS), help="default: all")
    add("--without-tokens", action="store_true", help="no token vectors are stored")
    add("--folder", type=Path, help="of the store, which stays (default: one that goes)")


def run(given: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    found = asyncio.run(_run(given))
    return found, _table(found)


async def _run(given: argparse.Namespace) -> list[dict[str, Any]]:
    asked = made()
    questions = [one.text for one in asked.questions[: given.searches]]
    found: list[dict[str, Any]] = []
    async with served(given.folder) as service:
        texts = [part for one in asked.documents for part in one.text.split("\n\n")]
        passages = _Mixed(service, texts[:_REAL], with_tokens=not given.without_tokens)
        await passages.read()
        for size in sorted(given.vectors):
            spent = await passages.grow(size)
            told = {
                "vectors": size,
                "written_cpu_s": spent,
                "memory_bytes_per_vector": service.store_memory() / size,
                "disk_bytes_per_vector": _on_disk(service) / size,
            }
            for ranking in given.rankings:
                times = await _searched(service, questions, ranking)
                found.append(told | {"ranking": ranking} | times)
                _say(f"{size} vectors, {ranking}: {times}")
    return found


async def _searched(service: Served, questions: list[str], ranking: str) -> dict[str, Any]:
    options = WAYS[ranking]
    await service.search(_COLLECTION, "warm up", _SHOWN, **options)
    before, stages = service.cpu_s(), []
    for text in questions:
        stages.append((await service.search(_COLLECTION, text, _SHOWN, **options)).stages_s)
    spent = (service.cpu_s() - before) / len(questions)
    told: dict[str, Any] = {"cpu_ms": spent * 1e3}
    for name in sorted({name for one in stages for name in one}):
        times = [one.get(name, 0.0) * 1e3 for one in stages]
        told[f"{name}_p50_ms"], told[f"{name}_p99_ms"] = np.percentile(times, [50, 99]).tolist()
    rest = [(one["search"] - one["embed"]) * 1e3 for one in stages]
    told["but_embedding_p50_ms"], told["but_embedding_p99_ms"] = np.percentile(
        rest, [50, 99]
    ).tolist()
    return told


class _Mixed:
    """Passages made of a few real ones, as many as are wanted."""

    def __init__(self, service: Served, texts: list[str], *, with_tokens: bool) -> None:
        self._service = service
        self._texts = texts
        self._with_tokens = with_tokens
        self._vectors = np.empty((0, 0), np.float32)
        self._tokens: list[np.ndarray] = []

    async def read(self) -> None:
        read = self._service.parts.model.reader
        ids = [read.text(text).ids for text in self._texts]
        made = await self._service.parts.embedder.read(TENANT, ids, lambda one: one)
        self._vectors = np.stack([one.vector for one in made])
        self._tokens = [one.tokens for one in made]

    async def grow(self, size: int) -> float:
        """To so many; returns the processor seconds that it took."""
        before = self._service.cpu_s()
        for start in range(0, size, _PER_DOCUMENT):
            await self._write(start, min(_PER_DOCUMENT, size - start))
            if start % (20 * _PER_DOCUMENT) == 0:
                _say(f"{start} vectors")
        return self._service.cpu_s() - before

    async def _write(self, start: int, count: int) -> None:
        """A document, of which nothing but its place follows from those before: what is stored is
        not drawn anew."""
        draw, numbers = Random(_SEED + start), np.random.default_rng(_SEED + start)
        collection = _OTHER if draw.random() < 0.1 else _COLLECTION
        part = {"part": AttributeValue(number=start // _PER_DOCUMENT % _PARTS)}
        store, document = self._service.parts.store, (TENANT, collection, f"d{start}")
        if await store.whole(*document) == count:
            return
        draft = await store.draft(*document, attributes=part)
        pairs = [draw.sample(range(len(self._texts)), 2) for _ in range(count)]
        chunks = [self._chunk(a, b, draw.randrange(10**6)) for a, b in pairs]
        vectors = self._mixed(pairs, numbers)
        tokens = [self._packed(*pair) for pair in pairs] if self._with_tokens else None
        await store.put(draft, range(count), chunks, vectors, count, tokens)
        await store.publish(draft, count)

    def _chunk(self, one: int, other: int, number: int) -> Chunk:
        text = f"{self._texts[one]} {self._texts[other]} {number}"
        return Chunk("Notes", text, 0, len(text), 32)

    def _packed(self, one: int, other: int) -> str:
        return packed(np.concatenate([self._tokens[one], self._tokens[other]]))

    def _mixed(self, pairs: list[list[int]], numbers: np.random.Generator) -> np.ndarray:
        first, second = (self._vectors[[pair[n] for pair in pairs]] for n in (0, 1))
        noise = numbers.standard_normal(first.shape, np.float32) / first.shape[1] ** 0.5
        mixed = first + _MIXED * second + _MIXED * noise
        unit: np.ndarray = mixed / np.linalg.norm(mixed, axis=1, keepdims=True)
        return unit


def _on_disk(service: Served) -> int:
    return sum(file.stat().st_blocks * 512 for file in service.folder.rglob("*") if file.is_file())


def _table(found: list[dict[str, Any]]) -> list[str]:
    rows = [
        "| vectors | ranking | search p50, ms | p99 | but embedding p50 | p99 | CPU, ms | memory, "
        "KiB a vector | disk |",
        "| ---: | --- " + "| ---: " * 7 + "|",
    ]
    for one in found:
        times = (
            *(
                one[f"{name}_{which}_ms"]
                for name in ("search", "but_embedding")
                for which in ("p50", "p99")
            ),
            one["cpu_ms"],
        )
        bytes_ = one["memory_bytes_per_vector"] / 1024, one["disk_bytes_per_vector"] / 1024
        figures = " | ".join(f"{its:.1f}" for its in (*times, *bytes_))
        rows.append(f"| {one['vectors']:,} | {one['ranking']} | {figures} |")
    return rows


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
