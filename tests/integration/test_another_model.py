"""Stores through a change of the embedding model: a gateway, processes of retrieval with the real
model and then another, and kills meanwhile."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from protos import gateway_stores_pb2 as pb
from protos.gateway_pb2 import PublicSearchStoreRequest
from protos.gateway_pb2_grpc import InferenceStub
from protos.gateway_stores_pb2_grpc import VectorStoresStub
from services.common.children import dying_with_parent
from services.common.config import JobsSettings
from services.gateway.metering.ledger import Entry, Ledger
from tests.support import minilm
from tests.support.another_gateway import another_gateway
from tests.support.gateway_rig import Rig, gateway_rig
from tests.support.waiting import until

BUILT_IN = "all-MiniLM-L6-v2"
START_S = 60.0
FILES = 4
MODEL_S = 120.0  # until all files have been embedded, on a busy machine


@pytest.fixture
async def rig(redis_url: str, namespace: str) -> AsyncIterator[Rig]:
    own: Any = {"jobs": JobsSettings(lease_s=2.0), "retrieval_timeout_s": 20.0}
    async with gateway_rig(redis_url, namespace, **own) as rig:
        await rig.retrieval_host.stop(0)
        yield rig


class Retrieval:
    """One process of it, and its successors, by one folder."""

    def __init__(self, rig: Rig, folder: Path) -> None:
        self._rig = rig
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, model: str = "") -> None:
        """Returns when the gateway knows it."""
        settings, known = self._rig.settings, self._rig.gateway.retrieval
        told = {
            "REDIS_URL": settings.redis_dsn,
            "PENSTOCK_NAMESPACE": settings.namespace,
            "PENSTOCK_BLOBS_URL": settings.blobs_url,
            "PENSTOCK_LEASE_S": str(settings.lease_s),
            "PENSTOCK_LOG_LEVEL": settings.log_level,
            "PENSTOCK_DATA_DIR": str(self._folder / "data"),
            "PENSTOCK_RETRIEVAL__EMBEDDING_MODEL": model,
            "PENSTOCK_RETRIEVAL__CHUNK_TOKENS": "24",
            "PENSTOCK_RETRIEVAL__CHUNK_OVERLAP_TOKENS": "4",
        }
        self._process = await asyncio.create_subprocess_exec(
            *(*dying_with_parent(), sys.executable, "-m", "services.retrieval"),
            env={**os.environ, **told},
        )
        await until(lambda: len(known._channels) == 1, START_S, "retrieval is listed")

    async def end(self, *, kill: bool = False) -> None:
        """Returns when the gateway knows of none."""
        if self._process is None:
            return
        if self._process.returncode is None:
            (self._process.kill if kill else self._process.terminate)()
        await self._process.wait()
        known = self._rig.gateway.retrieval
        await until(lambda: not known._channels, 20, "retrieval is listed no more")


@asynccontextmanager
async def retrieval_in(rig: Rig, folder: Path) -> AsyncIterator[Retrieval]:
    retrieval = Retrieval(rig, folder)
    try:
        yield retrieval
    finally:
        await retrieval.end(kill=True)


def text_of(number: int) -> str:
    """Some forty chunks, among them one of a word that no other file has."""
    boats = "".join(f"Boat {n} of fleet {number} sails at dawn. " for n in range(100))
    return f"{boats}The keeper's word is quill{number}."


@dataclass
class Told:
    """Of a store."""

    model: str
    status: str  # empty: nothing of any model but the present one's was there
    reason: str
    due: int
    done: int


class Rest:
    """A store, over REST."""

    def __init__(self, rig: Rig, client: openai.AsyncOpenAI, store: str) -> None:
        self.rig = rig
        self.client = client
        self.id = store

    async def found(self, word: str) -> tuple[list[str], str]:
        """The files, best first, and what the search warns of."""
        page = await self.client.vector_stores.search(self.id, query=word, max_num_results=3)
        files = list(dict.fromkeys(one.filename for one in page.data))
        extra: dict[str, Any] = page.model_extra or {}
        return files, (extra.get("penstock") or {}).get("warning") or ""

    async def told(self) -> Told:
        whole = (await self.client.vector_stores.retrieve(self.id)).model_dump()
        assert whole["file_counts"]["completed"] == FILES, "found by searches all the time"
        how = whole["reindexing"]
        if how is None:
            return Told(whole["embedding_model"], "", "", 0, 0)
        counts = how["file_counts"]
        assert counts["total"] == FILES
        assert counts["failed"] == 0
        rest = how["status"], how["reason"] or "", counts["in_progress"], counts["completed"]
        return Told(whole["embedding_model"], *rest)

    async def ask(self, what: str) -> None:
        """`begin` or `cancel`."""
        path = f"/vector_stores/{self.id}/reindexing" + ("/cancel" if what == "cancel" else "")
        await self.client.post(path, cast_to=dict)


class Grpc(Rest):
    def __init__(self, rest: Rest, channel: grpc.aio.Channel) -> None:
        super().__init__(rest.rig, rest.client, rest.id)
        self._stores, self._inference = VectorStoresStub(channel), InferenceStub(channel)
        self._own = {"metadata": (("authorization", f"Bearer {self.rig.key}"),)}

    async def found(self, word: str) -> tuple[list[str], str]:
        request = PublicSearchStoreRequest(vector_store_id=self.id, query=word, max_num_results=3)
        reply = await self._inference.SearchStore(request, **self._own)
        titles = [one.title.partition(" › ")[0] for one in reply.passages]
        return list(dict.fromkeys(titles)), reply.warning

    async def told(self) -> Told:
        request = pb.GetVectorStoreRequest(vector_store_id=self.id)
        told = await self._stores.GetVectorStore(request, **self._own)
        how = told.reindexing
        counts = how.file_counts
        return Told(
            told.embedding_model, how.status, how.reason, counts.in_progress, counts.completed
        )

    async def ask(self, what: str) -> None:
        own: dict[str, Any] = {"vector_store_id": self.id}
        if what == "cancel":
            await self._stores.CancelReindexing(pb.CancelReindexingRequest(**own), **self._own)
        else:
            await self._stores.ReindexVectorStore(pb.ReindexVectorStoreRequest(**own), **self._own)


async def filled(rig: Rig) -> Rest:
    client = await rig.openai()
    store = Rest(rig, client, (await client.vector_stores.create(name="fleets")).id)
    for number in range(FILES):
        content = (f"{number}.md", text_of(number).encode())
        file = await client.files.create(file=content, purpose="assistants")
        await client.vector_stores.files.create(store.id, file_id=file.id)

    async def are_in() -> bool:
        counts = (await client.vector_stores.retrieve(store.id)).file_counts
        return counts.completed == FILES

    await until(are_in, MODEL_S, "all are indexed")
    return store


async def all_are_found(store: Rest) -> str:
    """Whatever has embedded them; tells what the last search warned of."""
    warning = ""
    for number in range(FILES):
        files, warning = await store.found(f"quill{number}")
        assert f"{number}.md" in files
    return warning


async def until_done(store: Rest, files: int) -> Told:
    told: list[Told] = []

    async def are() -> bool:
        told[:] = [await store.told()]
        return told[0].done >= files

    await until(are, MODEL_S, f"{files} are indexed anew")
    return told[0]


async def charged(rig: Rig) -> dict[str, list[Entry]]:
    """By route."""
    found: dict[str, list[Entry]] = {}
    async for entry in Ledger(rig.redis, rig.settings.namespace).entries():
        found.setdefault(entry.route, []).append(entry)
    return found


async def test_a_store_is_found_all_the_time_and_indexed_anew_once_through_kills(
    rig: Rig, tmp_path: Path
) -> None:
    other = str(minilm.with_other_vectors(tmp_path / "another"))
    async with retrieval_in(rig, tmp_path) as retrieval:
        await retrieval.start()
        store = await filled(rig)
        assert await store.told() == Told(BUILT_IN, "", "", 0, 0)
        assert await all_are_found(store) == ""
        await retrieval.end()
        await retrieval.start(other)
        assert await store.told() == Told("another", "pending", "", FILES, 0)
        rig.gateway.jobs._stopping = True  # another one begins it
        async with another_gateway(rig) as gateway:
            files, warning = await store.found("quill3")
            assert files[0] == "3.md"
            assert "by their words alone" in warning
            before = await until_done(store, 1)
            await retrieval.end(kill=True)
            assert before.due, "it was killed in the middle"
            stood = await store.told()
            assert (stood.model, stood.status) == ("another", "in_progress")
            await until_it_says_why(store)
            await retrieval.start(other)
            await until_done(store, stood.done + 1)
            await all_are_found(store)
            await gateway.kill()
        assert (await store.told()).due, "it was killed in the middle"
        rig.gateway.jobs._stopping = False
        await until_done(store, FILES)
        assert await store.told() == Told("another", "completed", "", 0, FILES)
        assert await all_are_found(store) == ""
        entries = await charged(rig)
    first = sum(entry.prompt for entry in entries["index"])
    anew = [entry for entry in entries["reindex"] if entry.prompt]
    assert len({entry.id for entry in anew}) == len(anew), "each once"
    # Of the file that the gateway was killed over what is whole is not charged by who finds it so.
    assert first * (FILES - 1) / FILES - FILES <= sum(entry.prompt for entry in anew) <= first
    assert {(entry.user, entry.tier) for entry in entries["reindex"]} == {(store.id, "low")}


async def until_it_says_why(store: Rest) -> None:
    """It goes on, of which nothing comes."""

    async def does() -> bool:
        told = await store.told()
        assert told.status == "in_progress"
        return told.reason == "no retrieval is available"

    await until(does, 30, "it says what it waits for")


async def test_over_grpc_it_is_begun_ended_and_followed_alike(rig: Rig, tmp_path: Path) -> None:
    other = str(minilm.with_other_vectors(tmp_path / "another"))
    async with retrieval_in(rig, tmp_path) as retrieval:
        await retrieval.start()
        store = Grpc(await filled(rig), await rig.channel())
        await retrieval.end()
        await retrieval.start(other)
        assert await store.told() == Told("another", "pending", "", FILES, 0)
        assert "by their words alone" in (await store.found("quill2"))[1]
        await until_done(store, 1)
        await store.ask("cancel")
        await nothing_runs(rig)
        ended = await store.told()
        assert (ended.status, ended.due + ended.done) == ("cancelled", FILES)
        assert ended.due, "before it was through"
        await all_are_found(store)
        assert await store.told() == ended, "searches do not begin it again"
        await store.ask("begin")
        await until_done(store, FILES)
        assert await all_are_found(store) == ""
        entries = await charged(rig)
        assert len(entries["reindex"]) == FILES
        sums = [sum(one.prompt for one in entries[route]) for route in ("index", "reindex")]
        assert sums[0] == sums[1]


async def nothing_runs(rig: Rig) -> None:
    async def are_none() -> bool:
        return await rig.gateway.jobs.queues.counts("reindex") == (0, 0)

    await until(are_none, MODEL_S, "the file under way is through")
