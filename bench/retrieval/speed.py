"""How long a search takes, and what a vector costs, by how many there are.

Passages and vectors are mixtures of the made set's own: as far apart as real ones, and as many as
are asked for without hours of embedding. They go straight into the store; searches go the whole
way, one after the other. The wall's times want a quiet machine, processor time holds on any.
"""

import argparse
import asyncio
import sys
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


def run(given: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    found = asyncio.run(_run(given))
    return found, _table(found)


async def _run(given: argparse.Namespace) -> list[dict[str, Any]]:
    asked = made()
    questions = [one.text for one in asked.questions[: given.searches]]
    found: list[dict[str, Any]] = []
    async with served() as service:
        texts = [part for one in asked.documents for part in one.text.split("\n\n")]
        passages = _Mixed(service, texts[:_REAL])
        await passages.read()
        empty = service.memory()
        for size in sorted(given.vectors):
            spent = await passages.grow(size)
            told = {
                "vectors": size,
                "written_cpu_s": spent,
                "memory_bytes_per_vector": (service.memory() - empty) / size,
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

    def __init__(self, service: Served, texts: list[str]) -> None:
        self._service = service
        self._texts = texts
        self._draw = Random(_SEED)
        self._numbers = np.random.default_rng(_SEED)
        self._vectors = np.empty((0, 0), np.float32)
        self._tokens: list[np.ndarray] = []
        self._stored = 0

    async def read(self) -> None:
        read = self._service.parts.model.reader
        ids = [read.text(text).ids for text in self._texts]
        made = await self._service.parts.embedder.read(TENANT, ids, lambda one: one)
        self._vectors = np.stack([one.vector for one in made])
        self._tokens = [one.tokens for one in made]

    async def grow(self, size: int) -> float:
        """To so many; returns the processor seconds that it took."""
        before = self._service.cpu_s()
        while self._stored < size:
            count = min(_PER_DOCUMENT, size - self._stored)
            collection = _OTHER if self._draw.random() < 0.1 else _COLLECTION
            pairs = [self._draw.sample(range(len(self._texts)), 2) for _ in range(count)]
            chunks = [self._chunk(*pair) for pair in pairs]
            store, vectors = self._service.parts.store, self._mixed(pairs)
            part = {"part": AttributeValue(number=self._stored // _PER_DOCUMENT % _PARTS)}
            draft = await store.draft(TENANT, collection, f"d{self._stored}", attributes=part)
            tokens = [self._packed(*pair) for pair in pairs]
            await store.put(draft, range(count), chunks, vectors, count, tokens)
            await store.publish(draft, count)
            self._stored += count
            if self._stored % (20 * _PER_DOCUMENT) == 0:
                _say(f"{self._stored} vectors")
        return self._service.cpu_s() - before

    def _chunk(self, one: int, other: int) -> Chunk:
        text = f"{self._texts[one]} {self._texts[other]} {self._draw.randrange(10**6)}"
        return Chunk("Notes", text, 0, len(text), 32)

    def _packed(self, one: int, other: int) -> str:
        return packed(np.concatenate([self._tokens[one], self._tokens[other]]))

    def _mixed(self, pairs: list[list[int]]) -> np.ndarray:
        first, second = (self._vectors[[pair[n] for pair in pairs]] for n in (0, 1))
        noise = self._numbers.standard_normal(first.shape, np.float32) / first.shape[1] ** 0.5
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
