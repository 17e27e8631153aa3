"""A Qdrant server, as its client tells of it: what is asked, and what its failures become."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import pytest
from pydantic import SecretStr
from qdrant_client import models
from qdrant_client.http.exceptions import UnexpectedResponse

from services.common.config import RetrievalSettings, Settings
from services.common.errors import PenstockError
from services.retrieval import qdrant as module
from services.retrieval.qdrant import Qdrant, StoreUnusableError
from tests.support.inside import check
from tests.support.waiting import until


def answered(status: int) -> UnexpectedResponse:
    return UnexpectedResponse(status, "reason", b"10.0.0.7 says no", httpx.Headers())


class Server:
    """Stands for the client and for the server behind it; notes what is asked."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.collections: dict[str, dict[str, Any]] = {}
        self.indexes: dict[str, Any] = {}
        self.asked = 0  # whether a collection is there
        self.another_was_first: dict[str, Any] | None = None
        self.create_fails = 0
        self.closed = False

    def client(self, **options: Any) -> "Server":
        self.made.append(options)
        return self

    def collection_exists(self, name: str) -> bool:
        self.asked += 1
        return name in self.collections

    def create_collection(self, name: str, **options: Any) -> None:
        if self.another_was_first is not None:
            self.collections[name] = {"metadata": self.another_was_first}
            raise answered(409)
        if self.create_fails:
            raise answered(self.create_fails)
        self.collections[name] = options

    def create_payload_index(self, name: str, field: str, kind: Any) -> None:
        assert name in self.collections
        self.indexes[field] = kind

    def get_collection(self, name: str) -> Any:
        return SimpleNamespace(config=SimpleNamespace(metadata=self.collections[name]["metadata"]))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    monkeypatch.setattr(module, "QdrantClient", made.client)
    return made


def make(folder: Path, fingerprint: str = "f1") -> Qdrant:
    settings = Settings(
        data_dir=folder,
        namespace="acme",
        qdrant_url="http://qdrant:6333",
        qdrant_api_key=SecretStr("word"),
        retrieval=RetrievalSettings(timeout_s=20),
    )
    return Qdrant(settings, f"model-{fingerprint}", fingerprint, 8)


async def refusal(qdrant: Qdrant, work: Any) -> PenstockError:
    with pytest.raises(PenstockError) as refused:
        await qdrant.run("search", "t", work)
    check(refused.value.message)
    assert refused.value.stage == "retrieval"
    return refused.value


async def test_the_collection_is_made_once_with_an_index_for_each_tenant(
    server: Server, tmp_path: Path
) -> None:
    qdrant = make(tmp_path)
    assert qdrant.kind == "server"
    await qdrant.open()
    (options,) = server.made
    assert (options["url"], options["api_key"]) == ("http://qdrant:6333", "word")
    assert 0 < options["timeout"] <= 20
    made = server.collections["acme-chunks"]
    assert (made["vectors_config"].size, made["vectors_config"].distance) == (
        8,
        models.Distance.COSINE,
    )
    assert made["metadata"] == {"embedding_model": "model-f1", "fingerprint": "f1"}
    assert server.indexes["tenant"].is_tenant
    assert server.indexes.keys() == {"tenant", "collection", "source_id", "revision"}
    assert server.indexes["revision"] == models.PayloadSchemaType.INTEGER
    assert await qdrant.run("search", "t", lambda client: client) is server
    assert (len(server.made), server.asked) == (1, 1), "it is looked for once"
    assert not (tmp_path / "qdrant").exists()
    await qdrant.close()
    assert server.closed


async def test_two_replicas_that_make_it_at_once_share_it(server: Server, tmp_path: Path) -> None:
    server.another_was_first = {"embedding_model": "model-f1", "fingerprint": "f1"}
    qdrant = make(tmp_path)
    await qdrant.open()
    assert "tenant" in server.indexes, "the other one may have ended before it made them"
    await qdrant.close()


@pytest.mark.parametrize("metadata", [{"embedding_model": "a", "fingerprint": "f2"}, {}, None])
async def test_another_model_s_or_an_unknown_one_s_collection_is_left_alone(
    server: Server, tmp_path: Path, metadata: dict[str, str] | None
) -> None:
    server.collections["acme-chunks"] = {"metadata": metadata}
    qdrant = make(tmp_path)
    with pytest.raises(StoreUnusableError, match="runs model-f1"):
        await qdrant.open()
    told = await refusal(qdrant, lambda client: client)
    assert (told.code, told.reason) == (
        grpc.StatusCode.UNAVAILABLE,
        "embedding_model_changed",
    )
    await qdrant.close()


async def test_a_collection_that_is_gone_is_made_again_at_the_next_call(
    server: Server, tmp_path: Path
) -> None:
    qdrant = make(tmp_path)
    await qdrant.open()
    server.collections.clear()

    def search(_: Any) -> None:
        if not server.collections:
            raise answered(404)

    error = await refusal(qdrant, search)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "store_failed")
    assert "404" in error.message
    await qdrant.run("search", "t", search)
    assert "acme-chunks" in server.collections
    assert len(server.made) == 1
    await qdrant.close()


async def test_a_server_that_refuses_to_make_it_is_asked_again(
    server: Server, tmp_path: Path
) -> None:
    server.create_fails = 500
    qdrant = make(tmp_path)
    await qdrant.open()
    assert (await refusal(qdrant, lambda client: client)).reason == "store_failed"
    server.create_fails = 0
    await qdrant.run("search", "t", lambda client: client)
    assert server.indexes
    await qdrant.close()


async def test_writes_hold_half_of_the_threads_and_searches_have_the_rest(
    server: Server, tmp_path: Path
) -> None:
    qdrant = make(tmp_path)
    await qdrant.open()
    gate, writing = threading.Event(), list[int]()

    def write(_: Any) -> None:
        writing.append(1)
        gate.wait(20)

    writes = [asyncio.create_task(qdrant.write("write", "t", write)) for _ in range(12)]
    try:
        await until(lambda: len(writing) == 4)
        await asyncio.wait_for(qdrant.run("search", "t", lambda client: None), 10)
        assert len(writing) == 4
    finally:
        gate.set()
    await asyncio.wait_for(asyncio.gather(*writes), 20)  # each gives its place back
    await qdrant.close()


async def test_a_write_that_finds_no_room_keeps_no_place(server: Server, tmp_path: Path) -> None:
    qdrant = make(tmp_path)
    await qdrant.open()
    qdrant._waiting.total = 0
    for _ in range(20):  # more than there are places
        with pytest.raises(PenstockError) as full:
            await asyncio.wait_for(qdrant.write("write", "t", lambda client: None), 10)
        assert (full.value.code, full.value.reason) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "queue_full",
        )
        assert full.value.retry_after_s > 0
    qdrant._waiting.total = 8
    await asyncio.wait_for(qdrant.write("write", "t", lambda client: None), 10)
    await qdrant.close()
