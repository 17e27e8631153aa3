"""A model's checkpoint is replaced under load: no request fails, and each answer is of one alone.

The new one has other weights and another vocabulary, so that a prompt tokenized for one and run on
the other, or KV of both, would give a third text.
"""

import asyncio
import json
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from services.common.config import ModelSpec
from tests.support.checkpoint import write_checkpoint
from tests.support.cluster import Cluster, Process
from tests.support.streams import Stream, complete
from tests.support.waiting import until

SHORT = {"model": "tiny", "prompt": "the water " * 20, "max_tokens": 12, "temperature": 0}
LONG = {**SHORT, "max_tokens": 120, "ignore_eos": True}
_SPECIAL, _SIZE = 8, 320


def with_other_ids(folder: Path) -> Path:
    """The same tokens, numbered from behind."""
    path = folder / "tokenizer.json"
    told = json.loads(path.read_text())
    vocabulary = told["model"]["vocab"]
    for token, id in vocabulary.items():
        if id >= _SPECIAL:
            vocabulary[token] = _SIZE - 1 - (id - _SPECIAL)
    path.write_text(json.dumps(told))
    return folder


@dataclass
class Load:
    """Clients that ask again and again until `over`, and what they were told."""

    cluster: Cluster
    over: asyncio.Event = field(default_factory=asyncio.Event)
    answers: dict[str, Counter[str]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    async def run(self, kind: str, body: dict[str, Any]) -> None:
        answers = self.answers.setdefault(kind, Counter())
        async with self.cluster.api() as api:
            while not self.over.is_set():
                try:
                    answers[await self._ask(api, kind, body)] += 1
                except (AssertionError, httpx.HTTPError) as error:
                    self.failed.append(f"{kind}: {error}")

    async def _ask(self, api: httpx.AsyncClient, kind: str, body: dict[str, Any]) -> str:
        return await (Stream(api, body).finished() if kind == "long" else complete(api, body))


async def asked(cluster: Cluster) -> dict[str, str]:
    async with cluster.api() as api:
        return {"short": await complete(api, SHORT), "long": await complete(api, LONG)}


async def test_a_checkpoint_is_replaced_under_load(tmp_path: Path) -> None:
    first = write_checkpoint(tmp_path / "first", window=1024)
    second = with_other_ids(write_checkpoint(tmp_path / "second", window=1024, seed=21))
    models = [ModelSpec(name="tiny", path=str(first))]
    own = {"PENSTOCK_ROUTER__SPLIT": "always"}
    async with Cluster(tmp_path, models, environment=own) as cluster:
        await cluster.start(workers=["prefill", "decode"], routers=2, tokenizers=2)
        old = await asked(cluster)
        load = Load(cluster)
        clients = [
            asyncio.create_task(load.run(kind, body))
            for kind, body in (("short", SHORT), ("long", LONG))
            for _ in range(3)
        ]
        await until(lambda: has(load, old), 60, "they are answered")

        spec = json.dumps([{"name": "tiny", "path": str(second)}])
        olds = cluster.of("worker")
        news = [
            cluster.spawn("worker", WORKER__ROLE=role, MODELS=spec)
            for role in ("decode", "prefill")
        ]
        await cluster.up(*news)
        await until(lambda: len(load.answers["short"]) > 1, 60, "new requests are for the new one")
        new = await asked(cluster)
        assert all(new[kind] != old[kind] for kind in new)
        for process in olds:
            process.signal(signal.SIGTERM)
        await until(lambda: all(ended(process) for process in olds), 60, "the old ones drained")
        await until(lambda: has(load, new), 60)
        assert await asked(cluster) == new
        load.over.set()
        await asyncio.gather(*clients)
    assert not load.failed
    for kind, answers in load.answers.items():
        assert set(answers) == {old[kind], new[kind]}, f"{kind}: of one checkpoint or the other"


def has(load: Load, expected: dict[str, str]) -> bool:
    return all(load.answers.get(kind, Counter())[text] >= 3 for kind, text in expected.items())


def ended(process: Process) -> bool:
    return process.popen.poll() is not None
