"""A Qdrant server, as its client tells of it: what is asked, and what its failures become."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from qdrant_client import models
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from services.retrieval.index import server as module
from services.retrieval.index.points import (
    Every,
    Is,
    Point,
    Question,
    Sparse,
    StoreAwayError,
    StoreFailedError,
    Weights,
    Within,
)
from services.retrieval.index.server import ServerPoints
from tests.support.shards import layout

NAME = "test-chunks-f1"
OURS = Every((Is("tenant", ("t",)), Is("collection", ("c", "d"))))


def answered(status: int) -> UnexpectedResponse:
    return UnexpectedResponse(status, "reason", b"10.0.0.7 says no", httpx.Headers())


def scored(name: str, score: float, vector: list[float] | None = None) -> Any:
    return SimpleNamespace(id=name, score=score, vector=vector and {"dense": vector})


class Server:
    """Stands for the client and for the server behind it; notes what is asked."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.collections: dict[str, dict[str, Any]] = {}
        self.indexes: dict[str, Any] = {}
        self.asked = 0  # whether a collection is there
        self.unscoped: list[dict[str, Any]] = []  # payloads of points of earlier versions
        self.another_was_first: dict[str, Any] | None = None
        self.create_fails = 0
        self.quantized: Any = "as it was made"
        self.failure: Exception | None = None  # of every call about points
        self.answer: Any = None
        self.records: dict[str, dict[str, Any]] = {}  # payloads
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
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

    def get_collections(self) -> Any:
        return SimpleNamespace(collections=[SimpleNamespace(name=n) for n in self.collections])

    def get_collection(self, name: str) -> Any:
        return SimpleNamespace(config=SimpleNamespace(quantization_config=self.quantized))

    def scroll(self, name: str, where: Any, **named: Any) -> Any:
        if any(isinstance(one, models.IsEmptyCondition) for one in where.must):
            return [SimpleNamespace(id="", payload=one) for one in self.unscoped[:1]], None
        return self._noted("scroll", (name, where), named)

    def retrieve(self, name: str, ids: list[str], **named: Any) -> list[Any]:
        self._noted("retrieve", (name, ids), named)
        held = {one: self.records[one] for one in ids if one in self.records}
        return [SimpleNamespace(id=one, payload=payload) for one, payload in held.items()]

    def queries(self) -> list[Any]:
        return [call for call in self.calls if call[0] == "query_batch_points"]

    def __getattr__(self, method: str) -> Any:
        return lambda *given, **named: self._noted(method, given, named)

    def _noted(self, method: str, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self.failure is not None:
            raise self.failure
        self.calls.append((method, given, named))
        if self.unscoped and method == "set_payload":
            self.unscoped.pop(0)
        return self.answer

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    monkeypatch.setattr(module, "QdrantClient", made.client)
    return made


@pytest.fixture
def points(server: Server, tmp_path: Path) -> Iterator[ServerPoints]:
    made = ServerPoints([layout(tmp_path)], "http://qdrant:6333", "word", None, 20)
    yield made
    made.close()


def test_the_collection_is_made_once_with_an_index_for_each_tenant(
    server: Server, points: ServerPoints
) -> None:
    points.open()
    points.open()
    (options,) = server.made
    assert (options["url"], options["api_key"]) == ("http://qdrant:6333", "word")
    assert 0 < options["timeout"] <= 20
    assert list(server.collections) == [NAME]
    made = server.collections[NAME]
    dense = made["vectors_config"]["dense"]
    assert (dense.size, dense.distance) == (8, models.Distance.COSINE)
    assert made["sparse_vectors_config"]["sparse"].modifier == models.Modifier.IDF
    assert made["metadata"] == {"embedding_model": "model-f1"}
    assert server.indexes["tenant"].is_tenant
    keywords = {"scope", "tenant", "collection", "source_id", "digest", "marks"}
    assert server.indexes.keys() == {*keywords, "revision"}
    assert made["quantization_config"].turbo.bits == models.TurboQuantBitSize.BITS4
    assert server.indexes["revision"] == models.PayloadSchemaType.INTEGER
    assert server.asked == 1, "it is looked for once"
    points.close()
    assert server.closed


def test_two_replicas_that_make_it_at_once_share_it(server: Server, points: ServerPoints) -> None:
    server.another_was_first = {"embedding_model": "model-f1"}
    points.open()
    assert "tenant" in server.indexes, "the other one may have ended before it made them"


def test_another_model_s_collection_is_asked_by_words_alone(
    server: Server, points: ServerPoints
) -> None:
    """But none of another namespace, whose name may begin as ours does."""
    theirs = ("other-chunks-f2", "test-chunks-b-chunks-f2", "test-chunks", "my-test-chunks-f2")
    server.collections |= {name: {} for name in ("test-chunks-f2", *theirs)}
    server.answer = [SimpleNamespace(points=[scored("1", 1.0), scored("2", 2.0)])]
    server.records = {"2": {"n": 2}}
    question = Question(OURS, OURS, 1, None, Sparse([3], [1.0]))
    found = points.search(question)
    assert [(hit.payload, hit.score) for hit in found.earlier] == [({"n": 2}, 2.0)]
    asked = {given[0]: [one.using for one in given[1]] for _, given, _ in server.queries()}
    assert asked == {NAME: ["sparse"], "test-chunks-f2": ["sparse"]}
    server.calls.clear()
    points.search(Question(OURS, OURS, 1, np.ones(8, np.float32)))
    assert [given[0] for _, given, _ in server.queries()] == [NAME], "it knows no such vectors"
    server.calls.clear()
    alone = Weights(text=0.0)
    found = points.search(
        Question(OURS, OURS, 1, np.ones(8, np.float32), Sparse([3], [1.0]), alone)
    )
    asked = {given[0]: [one.using for one in given[1]] for _, given, _ in server.queries()}
    assert asked == {NAME: ["dense"], "test-chunks-f2": ["sparse"]}


def test_what_is_deleted_or_changed_is_so_of_all_models(
    server: Server, points: ServerPoints
) -> None:
    server.collections["test-chunks-f2"] = {}
    server.answer = SimpleNamespace(count=1)
    points.open()
    server.answer = ([SimpleNamespace(id="1")], None)
    assert points.ids(OURS, 2) == ["1", "1"]
    points.delete(["1"])
    points.change(OURS, {"a": 1})
    points.put([Point("1", np.ones(8, np.float32), Sparse([3], [1.5]), {})])
    asked = [(method, given[0]) for method, given, _ in server.calls[2:]]
    both = [
        (method, name) for method in ("delete", "set_payload") for name in (NAME, "test-chunks-f2")
    ]
    assert asked == [*both, ("upsert", NAME)]


def test_what_a_replica_with_another_model_stored_since_is_deleted_too(
    server: Server, points: ServerPoints
) -> None:
    points.open()
    server.collections["test-chunks-f2"] = {}
    server.answer = ([SimpleNamespace(id="1")], None)
    points.ids(OURS, 2)
    points.delete(["1"])
    deleted = [given[0] for method, given, _ in server.calls if method == "delete"]
    assert deleted == [NAME, "test-chunks-f2"]


def test_a_collection_whose_maker_ended_before_it_had_indexes_gets_them(
    server: Server, points: ServerPoints
) -> None:
    server.collections[NAME] = {}
    points.open()
    assert server.indexes["tenant"].is_tenant


def test_no_collection_is_deleted_for_a_replica_may_be_about_to_write_to_it(
    server: Server, points: ServerPoints
) -> None:
    server.collections["test-chunks-f2"] = {}
    server.answer = SimpleNamespace(count=0)
    points.open()
    assert not server.calls


def test_a_collection_that_was_made_without_short_vectors_gets_them(
    server: Server, points: ServerPoints
) -> None:
    server.collections[NAME], server.quantized = {}, None
    points.open()
    ((method, given, named),) = server.calls
    assert (method, given) == ("update_collection", (NAME,))
    assert named["quantization_config"].turbo.bits == models.TurboQuantBitSize.BITS4


def test_points_of_replicas_of_an_earlier_version_get_their_scope_now_and_then(
    server: Server, points: ServerPoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    points.open()
    server.answer = SimpleNamespace(count=0)
    whose = {"tenant": "t", "source_id": "d1"}
    server.unscoped = [{**whose, "collection": name} for name in ("c", "d")]
    points.count(OURS)
    assert [method for method, *_ in server.calls] == ["count"]
    server.calls.clear()
    server.collections["test-chunks-f2"] = {}  # of a replica that came since
    monkeypatch.setattr(points, "_look_again", 0.0)
    points.count(OURS)
    *scoped, _ = server.calls
    told = [(method, given[0], given[1]["scope"]) for method, given, _ in scoped]
    assert told == [("set_payload", NAME, f'["t", "{name}"]') for name in ("c", "d")]
    missing, *document, no_revision = scoped[0][1][2].must
    assert (missing.is_empty.key, no_revision.is_empty.key) == ("scope", "revision")
    assert [one.match.value for one in document] == ["t", "c", "d1"]
    assert points._earlier == ["test-chunks-f2"]


def test_a_collection_that_is_gone_is_made_again_at_the_next_call(
    server: Server, points: ServerPoints
) -> None:
    points.open()
    server.collections.clear()
    server.failure = answered(404)
    with pytest.raises(StoreFailedError, match="404"):
        points.delete(["1"])
    assert not server.collections
    server.failure = None
    points.delete(["1"])
    assert NAME in server.collections
    assert len(server.made) == 1


def test_a_server_that_refuses_to_make_it_is_asked_again(
    server: Server, points: ServerPoints
) -> None:
    server.create_fails = 500
    with pytest.raises(StoreFailedError):
        points.open()
    server.create_fails = 0
    points.open()
    assert server.indexes


@pytest.mark.parametrize(
    "failure", [ResponseHandlingException(OSError("10.0.0.7")), httpx.ReadTimeout("slow")]
)
def test_a_server_that_does_not_answer_is_away(
    server: Server, points: ServerPoints, failure: Exception
) -> None:
    points.open()
    server.failure = failure
    with pytest.raises(StoreAwayError) as raised:
        points.delete(["1"])
    assert "10.0.0.7" not in str(raised.value)


def test_a_question_is_asked_both_ways_at_once(server: Server, points: ServerPoints) -> None:
    others = [scored("8", 5.0, [0.1] * 8), scored("9", 4.0, [0.0] * 8), scored("7", 1.0, [1.0] * 8)]
    server.answer = [SimpleNamespace(points=[scored("7", 0.5)]), SimpleNamespace(points=others)]
    server.records = {"7": {"text": "x"}, "8": {"text": "y"}}
    corpus = Is("tenant", ("t",))
    question = Question(OURS, corpus, 9, np.ones(8, np.float32), Sparse([3], [1.0]))
    found = points.search(question)
    assert [(hit.payload["text"], hit.dense, hit.sparse) for hit in found.hits] == [
        ("y", pytest.approx(0.8), 5.0),
        ("x", 0.5, 1.0),
    ], "one was deleted meanwhile"
    ((method, (name, (dense, sparse)), _), (_, (_, ids), read)) = server.calls
    assert (method, name, ids) == ("query_batch_points", NAME, ["8", "7", "9"])
    assert not dense.with_payload
    assert not sparse.with_payload
    assert read["with_payload"].exclude == ["tokens"]
    server.calls.clear()
    assert points.search(replace(question, closely=1)) == found
    (_, *reads) = [(given[1], named.get("with_payload")) for _, given, named in server.calls]
    (best, all_of_it), (rest, without) = reads
    assert (best, all_of_it, rest) == (["8"], True, ["7", "9"]), "tokens of the best alone"
    assert without.exclude == ["tokens"]
    server.calls.clear()
    points.search(replace(question, closely=3))
    assert [given[1] for _, given, _ in server.calls[1:]] == [["8", "7", "9"]]
    assert (dense.using, sparse.using, dense.limit, sparse.limit) == ("dense", "sparse", 9, 9)
    tenant, collections = dense.filter.must
    assert (tenant.key, tenant.match.value) == ("tenant", "t")
    assert [(one.key, one.match.value) for one in collections.should] == [
        ("collection", "c"),
        ("collection", "d"),
    ]
    looked = dense.params.quantization
    assert (looked.rescore, looked.oversampling) == (True, 2.0)
    assert sparse.filter == dense.filter
    assert sparse.params.idf.corpus.must == [tenant]


def test_of_a_question_without_words_the_meaning_alone_is_asked(
    server: Server, points: ServerPoints
) -> None:
    server.answer = [SimpleNamespace(points=[])]
    question = Question(OURS, OURS, 9, np.ones(8, np.float32), Sparse([], []))
    assert points.search(question) == ([], [], False)
    ((_, (_, asked), _),) = server.calls
    assert [one.using for one in asked] == ["dense"]


def test_points_are_written_changed_and_read_by_their_conditions(
    server: Server, points: ServerPoints
) -> None:
    points.put([Point("1", np.ones(8, np.float32), Sparse([3], [1.5]), {"tenant": "t"})])
    points.change(OURS, {"revision": 7})
    points.delete(["1", "2"])
    record = SimpleNamespace(id="1", payload={"revision": 7})
    server.answer = ([record], None)
    assert points.ids(Within("revision", lt=5), 3) == ["1"]
    assert points.payloads(OURS, 3, ("revision",)) == [{"revision": 7}]
    server.answer = SimpleNamespace(count=4)
    assert points.count(OURS) == 4
    put, change, delete, ids, payloads, count = server.calls
    ((written,),) = put[1][1:]
    assert written.vector["sparse"] == models.SparseVector(indices=[3], values=[1.5])
    assert (written.id, written.payload) == ("1", {"tenant": "t"})
    assert change[1][1] == {"revision": 7}
    assert delete[1][1].points == ["1", "2"]
    assert all(named["wait"] for _, _, named in (put, change, delete))
    (bound,) = ids[1][1].must
    assert (bound.key, bound.range.lt, bound.range.gte) == ("revision", 5, None)
    assert payloads[2]["with_payload"] == ["revision"]
    assert count[2]["exact"]


def test_several_models_have_a_collection_each(server: Server, tmp_path: Path) -> None:
    first, second = layout(tmp_path), layout(tmp_path, "f2", 16)
    points = ServerPoints([first, second], "http://qdrant:6333", "word", None, 20)
    points.open()
    assert list(server.collections) == [NAME, second.collection]
    sizes = [made["vectors_config"]["dense"].size for made in server.collections.values()]
    assert sizes == [8, 16]
    asked: list[tuple[str, list[str]]] = []

    def answer(name: str, requests: list[Any]) -> list[Any]:
        asked.append((name, [one.using for one in requests]))
        return [SimpleNamespace(points=[])] * len(requests)

    server.query_batch_points = answer  # type: ignore[attr-defined]
    points.search(Question(OURS, OURS, 9, np.ones(16, np.float32), Sparse([3], [1.0])), "f2")
    assert asked == [(second.collection, ["dense", "sparse"]), (NAME, ["sparse"])]
    server.calls.clear()
    points.put([], "f2")
    points.put([])
    assert [given[0] for _, given, _ in server.calls] == [second.collection, NAME]
    points.close()
