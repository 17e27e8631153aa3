"""Retrieval as its peers see it: over gRPC, through its host, with the real embedding model."""

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from operator import methodcaller
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import common_pb2, retrieval_pb2_grpc
from protos import retrieval_pb2 as pb
from services.common.blobs import Blobs
from services.common.children import dying_with_parent
from services.common.config import PolicySettings, RetrievalSettings, Settings
from services.common.discovery import Directory, Replica
from services.common.errors import PenstockError
from services.common.redis import connect
from services.common.service import Host
from services.common.telemetry.telemetry import Telemetry
from services.common.unary import call, follow
from services.retrieval import embedder
from services.retrieval.index.points import TOKENS, Condition, Every, Is
from services.retrieval.pipeline import indexing
from services.retrieval.search import passages
from services.retrieval.server import RetrievalService
from tests.support import minilm
from tests.support.blob_folder import pieces
from tests.support.documents import pdf
from tests.support.transport import TRANSPORT
from tests.support.waiting import until

GUIDE = """# Harbour guide

## Opening hours
The harbour opens at six in the morning and closes at nine in the evening. On feast days the gate
stays shut until noon.

## Fees
A boat shorter than ten metres pays two coins a night. Longer boats pay four.

## Animals
Dogs are welcome on the quay, but they must be kept on a lead near the nets.
"""


class Client:
    """Calls retrieval as the gateway does, for one tenant."""

    blobs: Blobs  # of the retrieval that was hosted last

    def __init__(self, stub: Any, tenant: str = "acme") -> None:
        self.stub = stub
        self.caller = common_pb2.Caller(request_id="r1", tenant=tenant)
        self.telemetry = Telemetry("gateway", "gateway-1")
        self.record = common_pb2.Record()

    def of(self, tenant: str) -> "Client":
        return Client(self.stub, tenant)

    async def _call(self, method: Any, request: Any) -> Any:
        with self.telemetry.span("request") as span:
            self.span_id = f"{span.span_id:016x}"
            return await call(
                method, request, span=span, timeout_s=60, stage="retrieval", record=self.record
            )

    async def embed(self, *texts: str) -> pb.EmbedReply:
        request = pb.EmbedRequest(caller=self.caller, texts=texts)
        return await self._call(self.stub.Embed, request)  # type: ignore[no-any-return]

    def request(self, query: str, *, limit: int = 3, threshold: float = 0) -> pb.SearchRequest:
        return pb.SearchRequest(
            caller=self.caller,
            collections=["docs"],
            query=query,
            limit=limit,
            score_threshold=threshold,
        )

    async def send(self, request: pb.SearchRequest) -> pb.SearchReply:
        return await self._call(self.stub.Search, request)  # type: ignore[no-any-return]

    async def found(self, query: str) -> pb.SearchReply:
        return await self.send(self.request(query))

    async def search(self, query: str, *, limit: int = 3, threshold: float = 0) -> Any:
        """As the store has them now."""
        request = self.request(query, limit=limit, threshold=threshold)
        request.max_age_s = 0
        return (await self.send(request)).passages

    async def index(
        self, text: str | bytes, source_id: str = "guide", title: str = "guide.md", **more: Any
    ) -> pb.IndexReply:
        key = self.blobs.key(self.caller.tenant, source_id or "none")
        await self.blobs.put(key, pieces(text if isinstance(text, bytes) else text.encode()))
        request = pb.IndexRequest(
            caller=self.caller,
            collection="docs",
            source_id=source_id,
            title=title,
            **{"blob": key, **more},
        )
        self.news: list[pb.IndexNews] = []

        async def hear(news: pb.IndexNews) -> None:
            self.news.append(news)

        with self.telemetry.span("request") as span:
            self.span_id = f"{span.span_id:016x}"
            told: Any = {"span": span, "timeout_s": 60, "stage": "retrieval"}
            await follow(self.stub.Index, request, hear, **told, record=self.record)
        return self.news[-1].reply

    async def judge(self, *texts: tuple[str, str]) -> list[tuple[str, int]]:
        told = [pb.JudgedText(text=text, role=role) for role, text in texts]
        reply = await self._call(self.stub.Judge, pb.JudgeRequest(caller=self.caller, texts=told))
        return [(match.rule, match.text) for match in reply.matches]

    async def remove(self, source_id: str = "") -> int:
        request = pb.RemoveRequest(caller=self.caller, collection="docs", source_id=source_id)
        return (await self._call(self.stub.Remove, request)).chunks  # type: ignore[no-any-return]


@asynccontextmanager
async def hosted(
    redis_url: str, folder: Path, **own: Any
) -> AsyncIterator[tuple[Host, Replica, grpc.aio.Channel]]:
    qdrant_url, policy = own.pop("qdrant_url", ""), own.pop("policy", None)
    settings = Settings(
        redis_url=redis_url,
        data_dir=folder,
        qdrant_url=qdrant_url,
        namespace=f"test-{folder.parent.name}-{folder.name}",
        policy=PolicySettings(file=policy),
        retrieval=RetrievalSettings(chunk_tokens=48, chunk_overlap_tokens=8, **own),
    )
    Client.blobs = Blobs.of(settings)
    host = Host(RetrievalService, settings)
    replica = await host.start()
    try:
        async with TRANSPORT.dial(replica.address, "retrieval") as channel:
            yield host, replica, channel
    finally:
        await host.stop(grace_s=0)


@pytest.fixture
async def client(redis_url: str, tmp_path: Path) -> AsyncIterator[Client]:
    async with hosted(redis_url, tmp_path) as (_, _, channel):
        yield Client(retrieval_pb2_grpc.RetrievalStub(channel))


async def test_a_question_finds_its_passage_with_source_and_heading(client: Client) -> None:
    reply = await client.index(GUIDE)
    assert reply.chunks >= 3
    assert reply.tokens > 80
    best, *rest = await client.search("When does the harbour open?")
    assert best.title == "guide.md › Harbour guide › Opening hours"
    assert "opens at six" in best.text
    assert (best.source_id, best.position) == ("guide", 0)
    assert 1 >= best.score > rest[0].score > rest[-1].score
    assert (await client.search("May I bring my dog?"))[0].title.endswith("Harbour guide › Animals")
    assert len(await client.search("When does the harbour open?", limit=1)) == 1
    assert not await client.search("When does the harbour open?", threshold=0.99)


async def test_tenants_are_apart_and_documents_are_replaced_and_removed(client: Client) -> None:
    other = client.of("rival")
    await client.index(GUIDE)
    assert not await other.search("When does the harbour open?")
    assert await other.remove() == 0
    await client.index("The harbour is closed for good.")
    (only,) = await client.search("When does the harbour open?")
    assert only.text == "The harbour is closed for good."
    assert await client.remove("no such source") == 0
    assert await client.remove("guide") == 1
    assert not await client.search("When does the harbour open?")


async def test_what_was_stored_without_tokens_is_ranked_beside_what_has_them(
    redis_url: str, tmp_path: Path
) -> None:
    """As an earlier version stored it, or broken; and until it is indexed anew."""
    async with hosted(redis_url, tmp_path) as (host, _, channel):
        client = Client(retrieval_pb2_grpc.RetrievalStub(channel))
        calls = host.service.parts.calls  # type: ignore[attr-defined]

        async def late_of(**ranking: Any) -> dict[str, bool]:
            request = client.request(question, limit=9)
            request.max_age_s = 0
            request.ranking.MergeFrom(pb.Ranking(**ranking))
            found = (await client.send(request)).passages
            assert {one.source_id for one in found} == set(sources)
            assert all(0 <= one.score <= 1 for one in found)
            assert found[0].source_id == "guide", "it answers, whatever has tokens"
            return {one.source_id: one.scores.HasField("late") for one in found}

        def of(source: str) -> Condition:
            return Every((Is("tenant", ("acme",)), Is("source_id", (source,))))

        async def kept(source: str) -> Any:
            return await calls.read("x", "acme", lambda p: p.payloads(of(source), 9, [TOKENS]))

        question = "When does the harbour open?"
        texts = {
            "guide": "The harbour opens at six in the morning.",
            "walls": "The harbour walls were built of grey stone.",
            "soup": "Lentil soup wants carrots and an hour.",
        }
        sources = [*texts]
        for source, text in texts.items():
            await client.index(text, source)
        assert await late_of() == dict.fromkeys(sources, True)
        assert await late_of(embedding_weight=1, text_weight=1) == dict.fromkeys(sources, False)
        assert await late_of(embedding_weight=1, late_weight=1) == dict.fromkeys(sources, True)
        assert await late_of(ranker=pb.Ranking.NONE) == dict.fromkeys(sources, False)
        for source, tokens in (("guide", ""), ("walls", "AQEBAQ==")):
            assert all(len(one[TOKENS]) > 100 for one in await kept(source))
            change = methodcaller("change", of(source), {TOKENS: tokens})
            await calls.write("x", "acme", change)
        assert await late_of() == {"guide": False, "walls": False, "soup": True}
        await client.remove("guide")
        assert await kept("guide") == [], "nor are its tokens"
        await client.index(texts["guide"], "guide")
        assert await late_of() == {"guide": True, "walls": False, "soup": True}


async def test_embedding_counts_tokens_and_keeps_order_under_concurrency(client: Client) -> None:
    texts = [f"Boat number {n} sails at dawn." for n in range(40)]
    together = await client.embed(*texts)
    assert (together.model, len(together.vectors)) == ("all-MiniLM-L6-v2", 40)
    assert len(together.vectors[0].values) == 384
    apart = await asyncio.gather(*(client.embed(text) for text in texts))
    assert sum(reply.tokens for reply in apart) == together.tokens
    for vector, reply in zip(together.vectors, apart, strict=True):
        assert vector.values == pytest.approx(reply.vectors[0].values, abs=1e-5)


async def test_the_record_shows_each_step_below_the_callers_span(client: Client) -> None:
    await client.index(GUIDE)
    root = {s.name: s for s in client.record.spans if s.parent_id == client.span_id}
    assert set(root) == {"index"}
    below = [s.name for s in client.record.spans if s.parent_id == root["index"].span_id]
    assert below == ["load", "chunk", "embed and store"]

    client.record.Clear()
    await client.search("harbour " * 400)
    spans = {s.name: s for s in client.record.spans}
    assert set(spans) == {"search", "embed", "store", "rank"}
    assert spans["search"].parent_id == client.span_id
    assert spans["store"].parent_id == spans["search"].span_id
    assert spans["embed"].attributes["tokens_cut"] == "146"
    assert "harbour" not in str(client.record)
    assert all(s.service == "retrieval" and s.duration_ns > 0 for s in client.record.spans)


async def test_pages_and_progress_of_a_pdf_reach_the_caller(client: Client) -> None:
    pages = [f"Page {n} tells of boats and nets.\n" * 9 for n in range(1, 31)]
    pages[17] = "The lighthouse keeper is called Ottilie."
    reply = await client.index(pdf(pages), title="harbour.pdf")
    *progress, _ = [(n.progress.done, n.progress.chunks) for n in client.news]
    assert progress == [(at, reply.chunks) for at in range(0, reply.chunks, 64)]
    best = (await client.search("What is the lighthouse keeper's name?"))[0]
    assert "Ottilie" in best.text
    assert best.pages.first <= 18 <= best.pages.last <= best.pages.first + 2


async def test_chunks_are_as_long_as_the_request_says(client: Client) -> None:
    text = " ".join(f"On day {number} the harbour opens at six." for number in range(100))
    few = await client.index(text, chunking=pb.Chunking(max_tokens=200))
    many = await client.index(text, chunking=pb.Chunking(max_tokens=16, overlap_tokens=8))
    assert few.chunks <= 8
    assert many.chunks >= 50
    (found,) = await client.search("Day 57", limit=1)
    assert len(found.text) < 200, "some chunks of 16 tokens in a row, of a text of 4,000 characters"


async def test_what_was_embedded_before_a_break_is_not_embedded_again(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f"Boat {n} sails at dawn. " for n in range(100))
    async with hosted(redis_url, tmp_path) as (host, _, channel):
        client = Client(retrieval_pb2_grpc.RetrievalStub(channel))
        monkeypatch.setattr(indexing, "_STORED_AT_ONCE", 4)
        parts = host.service.parts  # type: ignore[attr-defined]
        embedded: list[int] = []
        read, held = parts.embedder.read, asyncio.Event()

        async def counted(tenant: str, texts: list[list[int]], take: Any, **lane: bool) -> Any:
            if len(embedded) == 3:
                held.set()
                await asyncio.sleep(60)
            embedded.append(len(texts))
            return await read(tenant, texts, take, **lane)

        parts.embedder.read = counted
        broken = asyncio.create_task(client.index(text))
        await asyncio.wait_for(held.wait(), 30)
        broken.cancel()
        await asyncio.gather(broken, return_exceptions=True)
        del parts.embedder.read
        again: list[int] = []

        async def noted(tenant: str, texts: list[list[int]], take: Any, **lane: bool) -> Any:
            again.append(len(texts))
            return await read(tenant, texts, take, **lane)

        parts.embedder.read = noted
        reply = await client.index(text)
        assert sum(embedded) == 12
        assert sum(again) == reply.chunks - 12
        assert (await client.index(text)).tokens == 0, "nothing to do"
        assert sum(again) == reply.chunks - 12
        assert (await client.index(text + "More.")).tokens > 0


async def test_after_another_model_a_document_is_indexed_anew_once_and_killed_in_the_middle(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexing, "_STORED_AT_ONCE", 4)
    text, data = "".join(f"Boat {n} sails at dawn. " for n in range(100)), tmp_path / "data"
    async with hosted(redis_url, data) as (_, replica, channel):
        client = Client(retrieval_pb2_grpc.RetrievalStub(channel))
        first = await client.index(text)
        theirs = await client.of("rival").index(text)
        assert first.embedder == theirs.embedder == replica.facts["embedder"]
        assert (await client.index(text, reindexing=True)).tokens == 0, "it is this model's"
    own: Any = {"embedding_model": str(minilm.with_other_vectors(tmp_path / "model"))}
    async with hosted(redis_url, data, **own) as (host, replica, channel):
        client = Client(retrieval_pb2_grpc.RetrievalStub(channel))
        assert list((await client.found("Boat 57")).by_words) == ["docs"]
        parts = host.service.parts  # type: ignore[attr-defined]
        read, lanes = parts.embedder.read, list[tuple[int, bool]]()

        async def killed(tenant: str, texts: Any, take: Any, low: bool = False) -> Any:
            if len(lanes) == 3:
                task.cancel()
                await asyncio.sleep(60)
            lanes.append((len(texts), low))
            return await read(tenant, texts, take, low=low)

        parts.embedder.read = killed
        task = asyncio.create_task(client.index(text, reindexing=True))
        await asyncio.gather(task, return_exceptions=True)
        assert lanes == [(4, True)] * 3
        parts.embedder.read = read
        assert (await client.search("Boat 57", limit=1))[0].text, "while it is indexed"
    async with hosted(redis_url, data, **own) as (host, replica, channel):
        client = Client(retrieval_pb2_grpc.RetrievalStub(channel))
        parts, again = host.service.parts, list[int]()  # type: ignore[attr-defined]
        read = parts.embedder.read

        async def noted(tenant: str, texts: Any, take: Any, low: bool = False) -> Any:
            again.append(len(texts))
            return await read(tenant, texts, take, low=low)

        parts.embedder.read = noted
        reply = await client.index(text, reindexing=True)
        assert sum(again) == reply.chunks - 12, "what was stored is not embedded again"
        assert reply.embedder == replica.facts["embedder"] != first.embedder
        assert (await client.index(text, reindexing=True)).tokens == 0
        assert not (await client.found("Boat 57")).by_words
        rival = client.of("rival")
        assert list((await rival.found("Boat 57")).by_words) == ["docs"], "of others nothing is"


async def test_a_search_is_refused_by_the_field_at_fault(client: Client) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"collections": []}, "collections"),
        ({"collections": ["ok", ""]}, "collections[1]"),
        ({"query": " \n"}, "query"),
        ({"limit": 0}, "limit"),
        ({"limit": 51}, "limit"),
        ({"score_threshold": 1.5}, "score_threshold"),
        ({"score_threshold": float("nan")}, "score_threshold"),
        ({"caller": common_pb2.Caller()}, "caller.tenant"),
    ]
    right = {"caller": client.caller, "collections": ["docs"], "query": "Why?", "limit": 1}
    for change, param in wrong:
        with pytest.raises(PenstockError) as raised:
            await client._call(client.stub.Search, pb.SearchRequest(**(right | change)))
        error = raised.value
        assert (error.code, error.param) == (grpc.StatusCode.INVALID_ARGUMENT, param)
        assert error.stage == "retrieval"


async def test_texts_and_documents_are_refused_by_the_field_at_fault(
    redis_url: str, tmp_path: Path
) -> None:
    async def param_of(request: Any) -> str:
        with pytest.raises(PenstockError) as raised:
            await request
        assert raised.value.code == grpc.StatusCode.INVALID_ARGUMENT
        return raised.value.param

    limits = {"max_document_chars": 5000, "max_document_chunks": 10}
    async with hosted(redis_url, tmp_path, **limits) as (_, _, channel):
        client = Client(retrieval_pb2_grpc.RetrievalStub(channel))
        assert await param_of(client.embed()) == "texts"
        assert await param_of(client.embed(*["a"] * 2049)) == "texts"
        assert await param_of(client.embed("fine", "  ")) == "texts[1]"
        assert await param_of(client.embed("fine", "tide " * 300)) == "texts[1]"
        assert await param_of(client.index("")) == "file"
        assert await param_of(client.index("x" * 5001)) == "file"
        assert await param_of(client.index("a word. " * 600)) == "file"  # too many chunks
        for blob in ("nothing", client.of("rival").blobs.key("rival", "guide")):
            assert await param_of(client.index("fine", blob=blob)) == "file"
        for told, param in (((15, 0), "max_tokens"), ((255, 0), "max_tokens"),
                            ((48, 25), "overlap_tokens")):  # fmt: skip
            cut = pb.Chunking(max_tokens=told[0], overlap_tokens=told[1])
            assert await param_of(client.index("fine", chunking=cut)) == f"chunking.{param}"
        assert await param_of(client.index("fine", source_id="")) == "source_id"
        assert await param_of(client.index("fine", title="t" * 513)) == "title"


async def test_a_hostile_document_holds_up_nobody(client: Client) -> None:
    """Its heading took 36 s to match, holding the interpreter; searches failed meanwhile."""
    await client.index(GUIDE)
    hostile = asyncio.create_task(
        client.of("rival").index("# a" + " " * 64_000 + "x\n" + "- a\n" * 1_000)
    )
    for _ in range(3):
        (best,) = await client.search("When does the harbour open?", limit=1)
        assert best.source_id == "guide"
    assert (await hostile).chunks > 20


async def test_searches_go_on_while_all_chunking_stands_still(
    redis_url: str, tmp_path: Path
) -> None:
    async with hosted(redis_url, tmp_path) as (host, _, channel):
        client = Client(retrieval_pb2_grpc.RetrievalStub(channel))
        await client.index(GUIDE)
        chunkers = host.service.parts.chunkers  # type: ignore[attr-defined]
        (process,) = chunkers._idle
        process._process.send_signal(signal.SIGSTOP)
        held = [asyncio.create_task(client.index(GUIDE, f"doc {n}")) for n in range(4)]
        await until(lambda: not chunkers._idle)
        gate = threading.Event()  # nor do they share threads with anything
        threads = [asyncio.create_task(asyncio.to_thread(gate.wait, 60)) for _ in range(64)]
        async with asyncio.timeout(30):
            found = await client.search("When does the harbour open?")
        assert found[0].source_id == "guide"
        gate.set()
        await asyncio.gather(*threads)
        assert (await client.embed("a text")).tokens == 4
        process._process.send_signal(signal.SIGCONT)
        assert {reply.chunks for reply in await asyncio.gather(*held)} == {3}


async def test_a_long_document_does_not_fill_the_models_queue(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the searches beside it were refused."""
    monkeypatch.setattr(indexing, "_STORED_AT_ONCE", 4)
    monkeypatch.setattr(embedder, "MAX_WAITING_TEXTS", 10)
    long = [asyncio.create_task(client.index(GUIDE * 5, f"doc {n}")) for n in range(2)]
    while not all(task.done() for task in long):
        await client.search("When does the harbour open?")
    assert [(await task).chunks for task in long] == [15, 15]


async def test_an_answer_is_small_whatever_the_headings(client: Client) -> None:
    """A long heading stood in the title of each passage: one of 200 KB made answers of 9.6 MB."""
    heading = "harbour " * 1_000
    # Far apart and unlike each other: what follows on another chunk would be joined to it.
    parts = (f"The harbour of port {n} opens at six. " + f"quay{n} " * 100 for n in range(60))
    reply = await client.index(f"# {heading}\n" + "\n\n".join(parts), title="Doc.md")
    assert reply.chunks > 50
    found = await client.search("When does the harbour open?", limit=50)
    assert len(found) > 20
    assert sum(passage.ByteSize() for passage in found) < 100_000
    assert all(p.title.startswith("Doc.md › harbour harbour") for p in found)


async def test_an_answer_ends_where_its_bytes_do(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.index(GUIDE)
    whole = await client.search("When does the harbour open?")
    monkeypatch.setattr(passages, "MAX_PASSAGE_BYTES", sum(p.ByteSize() for p in whole[:2]))
    assert list(await client.search("When does the harbour open?")) == list(whole[:2])
    monkeypatch.setattr(passages, "MAX_PASSAGE_BYTES", 1)
    assert list(await client.search("When does the harbour open?")) == [whole[0]]


async def test_the_host_registers_it_serves_health_and_metrics(
    redis_url: str, tmp_path: Path
) -> None:
    async with hosted(redis_url, tmp_path) as (host, replica, channel):
        client = Client(retrieval_pb2_grpc.RetrievalStub(channel))
        await client.index(GUIDE)
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(
            health_pb2.HealthCheckRequest(service="penstock.v1.Retrieval"), timeout=5
        )
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        host.check()

        redis = connect(redis_url)
        directory = Directory(redis, host.settings.namespace, "retrieval", 3.0)
        await directory.start()
        (found,) = directory.replicas.values()
        await directory.stop()
        await redis.aclose()
        assert found == replica
        assert found.facts["embedding_model"] == "all-MiniLM-L6-v2"
        assert (found.facts["dimension"], found.facts["store"]) == ("384", "embedded")

        async with httpx.AsyncClient() as http:
            text = (await http.get(replica.metrics_url)).text
        assert 'penstock_retrieval_requests_total{code="ok",method="index"}' in text
        assert "penstock_retrieval_embed_batch_texts_count" in text
        assert 'penstock_retrieval_store_seconds_count{operation="write"}' in text


async def test_draining_finishes_what_runs_and_refuses_what_comes(
    redis_url: str, tmp_path: Path
) -> None:
    async with hosted(redis_url, tmp_path) as (host, _, channel):
        client = Client(retrieval_pb2_grpc.RetrievalStub(channel))
        running = asyncio.create_task(client.index(GUIDE * 5))
        async with asyncio.timeout(10):
            while not host.service.servicer._running:  # type: ignore[attr-defined]  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        draining = asyncio.create_task(host.service.drain(30))
        await asyncio.sleep(0)
        with pytest.raises(PenstockError) as raised:
            await client.of("acme").search("Why?")
        assert raised.value.reason == "draining"
        assert (await running).chunks > 10
        await draining


async def test_a_store_that_never_answers_is_unavailable_in_time(
    redis_url: str, tmp_path: Path
) -> None:
    """A server that accepts connections and says nothing: the worst kind of away."""
    open_writers = []

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_writers.append(writer)
        while await reader.read(65536):
            pass

    silent = await asyncio.start_server(swallow, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    try:
        async with hosted(redis_url, tmp_path, qdrant_url=url, timeout_s=3.0) as (_, _, channel):
            client = Client(retrieval_pb2_grpc.RetrievalStub(channel))
            with pytest.raises(PenstockError) as raised:
                async with asyncio.timeout(10):
                    await client.search("When does the harbour open?")
            error = raised.value
            assert (error.code, error.stage) == (grpc.StatusCode.UNAVAILABLE, "retrieval")
            assert error.reason in ("store_slow", "store_away")
            assert error.retry_after_s > 0
            spans = {s.name for s in client.record.spans}
            assert spans == {"search", "embed", "store"}  # the waterfall shows where it hung
            assert (await client.embed("still alive")).tokens == 4
    finally:
        for writer in open_writers:
            writer.close()
        silent.close()


async def test_it_runs_as_a_process_and_ends_on_sigterm(
    redis_url: str, namespace: str, tmp_path: Path
) -> None:
    process = await asyncio.create_subprocess_exec(
        *dying_with_parent("KILL"),
        sys.executable,
        "-m",
        "services.retrieval",
        env=os.environ
        | {
            "REDIS_URL": redis_url,
            "PENSTOCK_NAMESPACE": namespace,
            "PENSTOCK_DATA_DIR": str(tmp_path),
        },
    )
    redis = connect(redis_url)
    directory = Directory(redis, namespace, "retrieval", 3.0)
    try:
        await directory.start()
        async with asyncio.timeout(180):  # importing torch and transformers on busy cores
            while not directory.replicas:
                await directory.changed()
        (replica,) = directory.replicas.values()
        assert replica.pid == process.pid
        settings = Settings(data_dir=tmp_path, namespace=namespace)
        async with TRANSPORT.dial(replica.address, "retrieval") as channel:
            Client.blobs = Blobs.of(settings)
            client = Client(retrieval_pb2_grpc.RetrievalStub(channel))
            await client.index(GUIDE)
            assert (await client.search("What does a long boat pay?"))[0].title.endswith("Fees")
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await directory.stop()
        await redis.aclose()


POLICY = """
rules:
  - {name: card, pii: [card], where: [uploads], action: redact}
  - {name: secret, pattern: top secret, where: [input, uploads]}
  - name: boats
    like:
      examples: [How do I build a boat?, instructions for building a sailing boat]
      at_least: 0.6
    where: [input, uploads]
    roles: [user]
"""


async def test_uploads_are_held_to_the_policy_and_texts_to_its_rules_of_meaning(
    redis_url: str, tmp_path: Path
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    async with hosted(redis_url, tmp_path, policy=policy) as (_, _, channel):
        client = Client(retrieval_pb2_grpc.RetrievalStub(channel))
        await client.index("The harbour's card is 4111 1111 1111 1111, ask at the gate.")
        (found,) = await client.search("Which card does the harbour have?")
        assert "[CARD], ask at the gate" in found.text
        for text, rule in (
            ("This is TOP secr\u200bet.", "secret"),
            ("To build a boat, begin with the instructions for its hull.", "boats"),
        ):
            with pytest.raises(PenstockError) as refused:
                await client.index(text, "other")
            assert refused.value.reason == "content_policy"
            assert repr(rule) in refused.value.message
        assert len(await client.search("harbour", limit=9)) == 1, "nothing of what was refused"
        with pytest.raises(PenstockError) as refused:
            await client.embed("harmless", "top secret")
        assert (refused.value.reason, refused.value.param) == ("content_policy", "texts[1]")
        asked = "Can you tell me how one builds a boat?"
        told = await client.judge(("user", "Good morning!"), ("user", asked), ("system", asked))
        assert told == [("boats", 1)]


async def test_a_search_is_told_again_until_its_store_changes(
    redis_url: str, tmp_path: Path
) -> None:
    """And while the store hangs, as long as nothing was taken out of it."""
    async with hosted(redis_url, tmp_path, timeout_s=2.0) as (host, _, channel):
        client = Client(retrieval_pb2_grpc.RetrievalStub(channel))
        store = host.service.parts.store  # type: ignore[attr-defined]
        search, hangs, asked = store.search, asyncio.Event(), 0

        async def counted(*given: Any) -> Any:
            nonlocal asked
            asked += 1
            if hangs.is_set():
                await asyncio.Event().wait()
            return await search(*given)

        store.search = counted
        await client.index(GUIDE)
        first = await client.found("When does the harbour open?")
        again = await client.found("When does the harbour open?")
        assert list(again.passages) == list(first.passages)
        assert (asked, first.cached, again.cached) == (1, False, True)
        assert not (await client.of("rival").found("When does the harbour open?")).passages
        await client.index("The harbour is closed for good.", "news")
        changed = await client.found("When does the harbour open?")
        assert "news" in [passage.source_id for passage in changed.passages]
        await client.remove("news")
        last = await client.found("When does the harbour open?")
        assert list(last.passages) == list(first.passages)

        hangs.set()
        request = client.request("When does the harbour open?")
        request.max_age_s = 1e-9  # too old already
        stale = await client.send(request)
        assert stale.stale
        assert list(stale.passages) == list(first.passages)
        with pytest.raises(PenstockError) as slow:
            await client.found("Are dogs welcome?")
        assert slow.value.reason == "store_slow"
        await client.remove("guide")
        with pytest.raises(PenstockError):
            await client.send(request)


async def test_documents_of_several_embedding_models_stand_side_by_side(
    redis_url: str, tmp_path: Path
) -> None:
    """Each request says by which; of what another one embedded a search finds the words."""
    own: Any = {"embedders": {"other": str(minilm.with_other_vectors(tmp_path / "model"))}}
    async with hosted(redis_url, tmp_path / "data", **own) as (_, replica, channel):
        client = Client(retrieval_pb2_grpc.RetrievalStub(channel))
        told = json.loads(replica.facts["embedders"])
        assert list(told) == ["all-MiniLM-L6-v2", "other"]
        assert told["all-MiniLM-L6-v2"]["fingerprint"] == replica.facts["embedder"]
        assert told["other"]["max_chunk_tokens"] == 254

        async def found(query: str, embedder: str) -> dict[str, bool]:
            """Sources, and whether by their meaning."""
            request = client.request(query)
            request.embedder, request.max_age_s = embedder, 0
            reply = await client.send(request)
            assert list(reply.by_words) == ["docs"] * any(
                not one.scores.dense for one in reply.passages
            )
            return {one.source_id: one.scores.dense > 0 for one in reply.passages}

        first = await client.index("The harbour opens at six.", "a")
        other = await client.index("The harbour closes at nine.", "b", embedder="other")
        assert first.embedder == replica.facts["embedder"]
        assert other.embedder == told["other"]["fingerprint"] != first.embedder
        assert await found("harbour", "") == {"a": True, "b": False}
        assert await found("harbour", "all-MiniLM-L6-v2") == {"a": True, "b": False}
        assert await found("harbour", "other") == {"a": False, "b": True}
        assert await found("When may ships come in?", "other") == {"b": True}
        again = await client.index("The harbour closes at nine.", "b", reindexing=True)
        assert again.tokens > 0
        assert await found("harbour", "") == {"a": True, "b": True}
        assert await found("harbour", "other") == {"a": False, "b": False}
        assert await client.remove("b") == 1
        assert await found("harbour", "") == {"a": True}
        with pytest.raises(PenstockError) as refused:
            await found("harbour", "none")
        assert refused.value.reason == "other_embedders"
    async with hosted(redis_url, tmp_path / "data") as (_, _, channel):
        client = Client(retrieval_pb2_grpc.RetrievalStub(channel))
        assert [one.source_id for one in (await client.found("harbour")).passages] == ["a"]
