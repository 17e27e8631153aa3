"""Whose call it is goes with every part of its work: waits, vectors and chunks are a tenant's."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from protos import retrieval_pb2 as pb
from protos.common_pb2 import AttributeValue, Caller, Passage
from services.common.config import RetrievalSettings
from services.common.config.retrieval import ServedEmbedder
from services.common.errors import PenstockError, invalid, unavailable
from services.common.policy import NO_POLICY
from services.common.telemetry.telemetry import Telemetry
from services.retrieval import pipeline
from services.retrieval.cache.searches import Searches
from services.retrieval.documents.chunkers import CutDocument, Loaded
from services.retrieval.documents.chunks import Chunk
from services.retrieval.embedding_model import Read
from services.retrieval.index.draft import Draft
from services.retrieval.index.points import Found, Hit
from services.retrieval.pipeline import indexing
from services.retrieval.served_model import ServedModel
from services.retrieval.text_reader import Tokens
from services.retrieval.token_vectors import unpacked
from tests.support.blob_folder import memory_blobs, pieces

ME = Caller(tenant="acme")


class Parts:
    """Stands for all that a call works with, and notes for whom each piece of work is."""

    settings = RetrievalSettings()
    telemetry = Telemetry("retrieval", "r-1")

    def __init__(self) -> None:
        self.tenants: list[tuple[str, str]] = []
        self.embedded: list[list[list[int]]] = []
        self.stored: list[tuple[Any, ...]] = []
        self.found: list[Passage] = []
        self.of_earlier_models: list[Passage] = []  # of collection "a"
        self.unreadable = False  # some of those
        self.document = CutDocument([], [], 0)
        self.stored_before: frozenset[int] = frozenset()
        self.discarded: list[Draft] = []
        self.chunks_there = 0  # by the present model, whole
        self.low = False  # of what was embedded last
        reader = SimpleNamespace(
            text=self._read,
            query=self._read,
            ends=lambda text: text[:500],
            max_tokens=9,
            special_tokens=2,
            hopeless=lambda text: len(text) > 900,
        )
        self.model = SimpleNamespace(reader=reader, name="small", fingerprint="f", made_by="f")
        self.questions = self._threads("questions")
        self.texts = self._threads("texts")
        self.embedder = SimpleNamespace(embed=self._embed, read=self._reads)
        self.chunkers = SimpleNamespace(load=self._load, cut=self._cut)
        self.blobs = memory_blobs()
        self.told: list[Any] = []
        self.cut: list[tuple[str, list[pb.Section]]] = []
        self.calls = SimpleNamespace(kind="embedded")
        self.policy = SimpleNamespace(current=NO_POLICY)
        self.prototypes = SimpleNamespace(of=self._prototypes)
        self.store = SimpleNamespace(
            search=self._store("search"),
            draft=self._store("draft"),
            put=self._put,
            publish=self._publish,
            discard=self.discarded.append,
            whole=self._whole,
            remove=self._store("remove"),
        )
        revisions: Any = SimpleNamespace(seen=self._no_revisions)
        self.searches = Searches(self.settings, revisions)

    def of_model(self, name: str) -> "Parts":
        return self

    async def _prototypes(self, _: object) -> list[object]:
        return []

    async def _no_revisions(self, tenant: str, *_: object) -> None:
        """None is known: no search is told again."""

    def _read(self, text: str) -> Tokens:
        return Tokens([len(text)] * min(len(text), 9), max(0, len(text) - 9))

    def _threads(self, name: str) -> Any:
        async def run(tenant: str, work: Callable[[], Any]) -> Any:
            self.tenants.append((name, tenant))
            return work()

        return SimpleNamespace(run=run)

    async def _embed(self, tenant: str, texts: list[list[int]]) -> np.ndarray:
        self.tenants.append(("embedder", tenant))
        self.embedded.append(texts)
        return np.array([[text[0], 0.5] for text in texts], np.float32)

    async def _reads(
        self, tenant: str, texts: list[list[int]], take: Callable[[Read], Any], *, low: bool = False
    ) -> list[Any]:
        self.low = low
        tokens = np.ones((3, 2), np.float32)
        return [take(Read(vector, tokens)) for vector in await self._embed(tenant, texts)]

    async def _load(self, tenant: str, filename: str, size: int, content: Any) -> Loaded:
        self.tenants.append(("chunkers", tenant))
        text = b"".join([piece async for piece in content])
        assert len(text) == size
        return Loaded([pb.Section(headings=["H"], text=text.decode(), page=3, row=4)], "is odd")

    async def _cut(
        self, tenant: str, title: str, sections: list[pb.Section], *limits: int
    ) -> CutDocument:
        self.tenants.append(("chunkers", tenant))
        self.cut.append((title, sections))
        return self.document

    def _store(self, name: str) -> Any:
        async def call(tenant: str, *given: Any) -> Any:
            self.tenants.append((f"store {name}", tenant))
            self.stored.append(given)
            draft = Draft("acme", "c", "s", "d", 7, {}, self.stored_before, False)
            return {"search": self._hits(*given[3:4]), "remove": 7, "draft": draft}.get(name)

        return call

    def _hits(self, limit: int = 99) -> Found:
        each = enumerate(self.found[:limit])
        earlier = [Hit(_payload(one, 99), 7.0, 0.0, 7.0) for one in self.of_earlier_models]
        found = [Hit(_payload(one, n), one.score, one.score, 0.0) for n, one in each]
        return Found(found, earlier, self.unreadable)

    async def _whole(self, tenant: str, *_: str) -> int:
        self.tenants.append(("store whole", tenant))
        return self.chunks_there

    async def _put(self, draft: Draft, *given: Any) -> None:
        self.tenants.append(("store put", draft.tenant))
        self.stored.append((draft, *given))

    async def _publish(self, draft: Draft, *given: Any) -> None:
        self.stored.append((draft, *given))

    async def index(self, text: bytes = b"x", ask: Any = None, **more: Any) -> pb.IndexReply:
        key = self.blobs.key("acme", "s")
        await self.blobs.put(key, pieces(text))
        asked = {"collection": "c", "source_id": "s", "title": "T", "blob": key, "revision": 7}
        await self.run("index", pb.IndexRequest(caller=ME, **asked | more), ask=ask)
        return self.told[-1].reply

    async def read(self, text: bytes, **more: Any) -> str:
        key = self.blobs.key("acme", "s")
        await self.blobs.put(key, pieces(text))
        await self.run("read", pb.ReadRequest(caller=ME, **{"blob": key, "title": "T", **more}))
        said = ""
        for piece in self.told:
            assert piece.at == len(said)
            said += piece.text
        return said

    async def _tell(self, news: Any) -> None:
        self.told.append(news)

    async def run(self, name: str, request: Any, **more: Any) -> Any:
        work = partial(getattr(pipeline, name), **more)
        if name == "search":
            work = partial(work, within_s=5.0)
        if name in ("index", "read"):
            work = partial(work, tell=self._tell)
        with self.telemetry.span(name) as span:
            return await work(self, request, span)


def _payload(passage: Passage, number: int) -> dict[str, Any]:
    return {
        "title": passage.title,
        "text": passage.text,
        "collection": "a",
        "source_id": f"s{number}",
        "revision": 1,
        "position": 0,
        "start": 0,
        "end": len(passage.text),
    }


def told(reply: pb.SearchReply) -> list[tuple[str, str, float]]:
    return [(passage.title, passage.text, passage.score) for passage in reply.passages]


@pytest.fixture
def parts() -> Parts:
    return Parts()


async def test_embeddings_wait_in_their_tenant_s_turn_and_come_in_order(parts: Parts) -> None:
    reply = await parts.run("embed", pb.EmbedRequest(caller=ME, texts=["ab", "abc"]))
    assert parts.tenants == [("texts", "acme"), ("embedder", "acme")]
    assert [list(vector.values) for vector in reply.vectors] == [[2, 0.5], [3, 0.5]]
    assert (reply.model, reply.tokens) == ("small", 5)
    fits, long = "x" * 9, "x" * 10
    assert (await parts.run("embed", pb.EmbedRequest(caller=ME, texts=[fits]))).tokens == 9
    parts.embedded.clear()
    with pytest.raises(PenstockError) as refused:
        await parts.run("embed", pb.EmbedRequest(caller=ME, texts=[fits, long]))
    error = refused.value
    assert (error.code, error.param) == (grpc.StatusCode.INVALID_ARGUMENT, "texts[1]")
    assert error.reason == "context_length_exceeded"
    assert not parts.embedded, "never in part"


async def test_a_search_is_its_tenant_s_from_the_question_to_the_store(parts: Parts) -> None:
    best, worse = Passage(text="found", score=0.9), Passage(text="less", score=0.2)
    parts.found = [best, worse]
    request = pb.SearchRequest(
        caller=ME,
        collections=["a", "b"],
        query="abc",
        limit=5,
        score_threshold=0.25,
        ranking=pb.Ranking(ranker=pb.Ranking.NONE),
    )
    reply = await parts.run("search", request)
    assert parts.tenants == [("questions", "acme"), ("embedder", "acme"), ("store search", "acme")]
    ((collections, vector, text, limit, only, weights, closely),) = parts.stored
    assert (list(collections), list(vector), text, limit) == (["a", "b"], [3, 0.5], "abc", 24)
    assert only is None
    assert (weights, closely) == ((1.0, 0.0, 0.0), 0)
    assert told(reply) == [("", "found", 0.9)]
    parts.found = []
    assert not (await parts.run("search", request)).passages
    request.ClearField("ranking")
    await parts.run("search", request)
    assert parts.stored[-1][-2:] == ((1.0, 0.3, 1.0), 24), "the tokens of so many, to be ranked by"


async def test_where_copies_fill_a_search_it_looks_further(parts: Parts) -> None:
    request = pb.SearchRequest(caller=ME, collections=["a"], query="abc", limit=3)

    async def found() -> list[str]:
        parts.stored.clear()
        return [one.text for one in (await parts.run("search", request)).passages]

    copies = [Passage(text="Copy.", score=0.9)] * 60
    parts.found = [*copies, *(Passage(text=f"own {n}", score=0.1) for n in range(9))]
    assert await found() == ["Copy.", "own 0", "own 1"]
    assert [asked[3] for asked in parts.stored] == [24, 192]
    parts.found = copies
    assert await found() == ["Copy."]
    assert [asked[3] for asked in parts.stored] == [24, 192], "until no more come"
    parts.found = copies[:23]
    assert await found() == ["Copy."]
    assert len(parts.stored) == 1, "all there is"
    parts.found = [Passage(text=f"own {n}", score=0.1) for n in range(30)]
    request.limit = 50
    assert len(await found()) == 30
    assert len(parts.stored) == 1, "nor is more looked for where more are asked for than there are"


async def test_of_a_long_question_no_more_is_looked_up_than_is_read(parts: Parts) -> None:
    """Its words held up all other searches: a second for some megabytes, hours for the marks that a
    cached search's key puts in order."""
    hostile = "a" + "\u0301" * 30_000 + "\u0316" * 30_000
    began = time.process_time()
    await parts.run(
        "search", pb.SearchRequest(caller=ME, collections=["a"], query=hostile, limit=3)
    )
    assert parts.stored[-1][2] == hostile[:500]
    assert time.process_time() - began < 2.0


async def test_what_an_earlier_model_embedded_is_found_by_words_and_said_so(parts: Parts) -> None:
    parts.found = [Passage(text=f"near {n}", score=0.9 - n / 10) for n in range(3)]
    request = pb.SearchRequest(caller=ME, collections=["a", "b"], query="abc", limit=3)
    reply = await parts.run("search", request)
    assert (list(reply.by_words), reply.incomplete) == ([], False)
    parts.of_earlier_models, parts.unreadable = [Passage(text="by words")], True
    reply = await parts.run("search", request)
    assert [one.text for one in reply.passages] == ["near 0", "by words", "near 1"]
    assert (list(reply.by_words), reply.incomplete) == (["a"], True)


@pytest.mark.parametrize("length", [0, 1, 65_536, 65_537, 200_000])
async def test_what_a_document_says_is_told_in_pieces_to_its_owner(
    parts: Parts, length: int
) -> None:
    text = ("grün " * length)[:length]
    assert await parts.read(text.encode()) == text
    assert len(parts.told) == max(1, -(-length // 65_536))
    assert (parts.embedded, parts.stored) == ([], [])
    for blob in (parts.blobs.key("rival", "s"), parts.blobs.key("acme", "other")):
        with pytest.raises(PenstockError, match="gone"):
            await parts.read(b"x", blob=blob)
    with pytest.raises(PenstockError) as whose:
        await parts.run("read", pb.ReadRequest(blob="x"))
    assert whose.value.param == "caller.tenant"


async def test_a_document_is_embedded_and_stored_as_its_tenant_s(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexing, "_STORED_AT_ONCE", 2)
    chunks = [Chunk("T", "x" * n, 0, n, n) for n in range(1, 6)]
    parts.document = CutDocument(chunks, [[n] * n for n in range(1, 6)], 1)
    parts.stored_before = frozenset({1, 2, 3})
    reply = await parts.index(attributes={"color": AttributeValue(text="red")})
    assert {tenant for _, tenant in parts.tenants} == {"acme"}
    assert [len(texts) for texts in parts.embedded] == [1, 1], "what is stored is not embedded"
    draft, *puts, publish = parts.stored
    assert (draft[0], draft[1], draft[3]) == ("c", "s", 7)
    assert draft[4]["color"].text == "red"
    assert [(at, stored, of) for _, at, stored, _, of, _ in puts] == [
        ([0], chunks[:1], 5),
        ([4], chunks[4:], 5),
    ]
    assert [vector for put in puts for vector in put[3][:, 0].tolist()] == [1, 5]
    assert all(unpacked(tokens, 2) is not None for put in puts for tokens in put[5])
    assert publish[1] == 5
    assert [news.progress.done for news in parts.told[:-1]] == [0, 2, 4]
    assert (reply.chunks, reply.tokens, reply.note) == (5, 15, "is odd")


async def test_what_the_present_model_has_whole_is_not_read_again(parts: Parts) -> None:
    parts.document = CutDocument([Chunk("T", "x", 0, 1, 1)], [[1]], 0)
    parts.chunks_there = 5
    reply = await parts.index(reindexing=True)
    assert (reply.chunks, reply.tokens, reply.embedder) == (5, 0, "f")
    assert (parts.tenants, parts.stored) == ([("store whole", "acme")], [])
    parts.chunks_there = 0
    reply = await parts.index(reindexing=True)
    assert (reply.tokens, reply.embedder, parts.low) == (1, "f", True)
    parts.chunks_there = 5
    assert (await parts.index()).tokens == 1, "who attaches a file has it indexed"
    assert not parts.low


@pytest.mark.parametrize(("reindexing", "served"), [(True, False), (False, True), (False, False)])
async def test_what_was_too_slow_stays_where_it_is_gone_on_with(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, reindexing: bool, served: bool
) -> None:
    if served:
        model: Any = SimpleNamespace(fingerprint="f", reader=parts.model.reader)
        parts.model = ServedModel("axes", ServedEmbedder(dimension=3), model)
    parts.document = CutDocument([Chunk("T", "x", 0, 1, 1)], [[1]], 0)

    async def slow(*_: object, **more: object) -> Any:
        raise TimeoutError

    monkeypatch.setattr(parts.embedder, "read", slow)
    with pytest.raises(TimeoutError):
        await parts.index(ask=slow if served else None, reindexing=reindexing)
    assert len(parts.discarded) == (not (reindexing or served))


async def test_a_digest_is_of_all_that_chunks_are_made_from(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts.model.reader.max_tokens = 100

    async def digest(**more: Any) -> str:
        parts.stored.clear()
        await parts.index(**more)
        return str(parts.stored[0][2])

    first = await digest()
    assert await digest() == first
    cut = pb.Chunking(max_tokens=20, overlap_tokens=10)
    others = [await digest(title="U"), await digest(text=b"y"), await digest(chunking=cut)]
    parts.model.made_by = "other"
    others.append(await digest())
    monkeypatch.setattr(indexing.token_vectors, "VERSION", 0)
    others.append(await digest())
    assert len({first, *others}) == 6


async def test_of_what_is_refused_for_its_meaning_nothing_is_ever_found(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a document that turns to it late: searches find what is stored of a draft."""
    monkeypatch.setattr(indexing, "_STORED_AT_ONCE", 2)
    chunks = [Chunk("T", "x" * n, 0, n, n) for n in range(1, 6)]
    parts.document = CutDocument(chunks, [[n] * n for n in range(1, 6)], 0)
    rule = SimpleNamespace(name="secrets", where=("uploads",), action="refuse")
    like_it = SimpleNamespace(rule=rule, at_least=5, scores=lambda vectors: vectors[:, 0])

    async def prototypes(_: object) -> list[object]:
        return [like_it]

    parts.prototypes.of = prototypes
    with pytest.raises(PenstockError, match="secrets"):
        await parts.index()
    assert [one for one in parts.tenants if one[0] == "store put"] == []
    like_it.at_least = 6
    await parts.index()
    puts = [given[1] for given in parts.stored if len(given) == 6 and isinstance(given[1], list)]
    assert puts == [[0, 1], [2, 3], [4]]


async def test_what_was_stored_of_a_file_that_cannot_be_read_any_more_is_taken_back(
    parts: Parts,
) -> None:
    async def refuse(*_: object) -> None:
        raise invalid("no", "file")

    parts.chunkers.load = refuse
    with pytest.raises(PenstockError):
        await parts.index()
    assert len(parts.discarded) == 1


async def test_what_fails_is_taken_back_and_what_is_broken_off_is_not(parts: Parts) -> None:
    parts.document = CutDocument([Chunk("T", "x", 0, 1, 1)], [[1]], 0)
    away = unavailable("it is slow", stage="retrieval", reason="store_slow")
    full = PenstockError(grpc.StatusCode.RESOURCE_EXHAUSTED, "too much waits", stage="retrieval")
    cut_off = asyncio.CancelledError()
    for error, taken_back in ((invalid("no", "file"), 1), (cut_off, 0), (away, 0), (full, 0)):

        async def fail(*_: object, error: BaseException = error, **more: object) -> None:
            raise error

        parts.discarded.clear()
        parts.embedder.read = fail
        with pytest.raises(type(error)):
            await parts.index()
        assert len(parts.discarded) == taken_back


async def test_what_is_removed_is_the_tenant_s_own(parts: Parts) -> None:
    request = pb.RemoveRequest(caller=ME, collection="c", source_id="s", revision=8)
    assert (await parts.run("remove", request)).chunks == 7
    assert (parts.tenants, parts.stored) == ([("store remove", "acme")], [("c", "s", 8)])


@pytest.mark.parametrize("name", ["embed", "search", "index", "remove"])
async def test_no_work_is_done_for_nobody(parts: Parts, name: str) -> None:
    request = getattr(pb, f"{name.capitalize()}Request")()
    with pytest.raises(PenstockError) as refused:
        await parts.run(name, request)
    assert refused.value.param == "caller.tenant"
    assert not parts.tenants
