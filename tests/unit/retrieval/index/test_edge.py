"""The embedded store's process: whatever ends it, what it acknowledged is there."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

from services.retrieval.index import edge, edge_process, shard, shards, words
from services.retrieval.index.edge import EdgePoints
from services.retrieval.index.points import (
    Every,
    Is,
    Point,
    Question,
    Sparse,
    StoreAwayError,
    StoreFailedError,
    StoreUnusableError,
)
from services.retrieval.index.scopes import scope_of
from tests.support.shards import DIMENSION, Here, layout, memory_folder

OURS = Every((Is("tenant", ("t",)),))
ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_folder() as made:
        yield made


@pytest.fixture
def points(folder: Path) -> Iterator[EdgePoints]:
    made = EdgePoints(layout(folder))
    yield made
    made.close()


def point(number: int) -> Point:
    vector = np.eye(DIMENSION, dtype=np.float32)[number % DIMENSION]
    return Point(f"{number:032x}", vector, Sparse([number], [1.0]), {"tenant": "t", "n": number})


def pid(points: EdgePoints) -> int:
    assert points._process is not None
    return points._process.pid


def test_it_answers_after_its_process_was_killed_and_remembers(points: EdgePoints) -> None:
    points.put([point(1), point(2)])
    points.delete([point(1).id])
    os.kill(pid(points), signal.SIGKILL)
    with pytest.raises(StoreAwayError):
        points.count(OURS)
    assert points.payloads(OURS, 9, ("n",)) == [{"n": 2}]


_WRITER = """
import sys
from pathlib import Path
from types import SimpleNamespace
from services.retrieval.index.edge import EdgePoints
from tests.support.shards import layout
from tests.unit.retrieval.index.test_edge import point
points = EdgePoints(layout(Path(sys.argv[1])))
for batch in range(10**6):
    points.put([point(batch * 8 + n) for n in range(8)])
    if batch % 3 == 2:
        points.delete([point(batch * 8).id])
    print(batch, flush=True)
"""


def test_what_was_acknowledged_outlives_a_service_that_is_killed(folder: Path) -> None:
    """It and the store's process, at any moment."""
    for batches in (3, 30):
        own = folder / str(batches)  # the first writer may have come further than the second
        own.mkdir()
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(own)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        assert writer.stdout is not None
        acknowledged = [int(writer.stdout.readline()) for _ in range(batches)]
        os.killpg(writer.pid, signal.SIGKILL)
        acknowledged += [int(line) for line in writer.stdout]
        writer.wait()
        points = EdgePoints(layout(own))
        stored = {payload["n"] for payload in points.payloads(OURS, 10**6, ("n",))}
        points.close()
        last = acknowledged[-1]
        written = set(range((last + 1) * 8))
        deleted = {batch * 8 for batch in range(2, last + 1, 3)}
        under_way = set(range((last + 1) * 8, (last + 2) * 8)) | {(last + 1) * 8}
        assert written - deleted <= stored | under_way
        assert stored <= (written - deleted) | under_way


def test_a_process_that_stands_still_is_ended(
    points: EdgePoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    points.put([point(1)])
    monkeypatch.setattr(edge, "_STANDS_STILL_S", 0.1)
    os.kill(pid(points), signal.SIGSTOP)
    with pytest.raises(StoreAwayError):
        points.count(OURS)
    monkeypatch.setattr(edge, "_STANDS_STILL_S", 60)
    assert points.count(OURS) == 1


def test_a_message_that_a_process_does_not_read_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is more than the pipe holds: sending it would wait, and no deadline reached it."""
    monkeypatch.setattr(edge, "_STANDS_STILL_S", 0.2)
    points = EdgePoints(layout(folder))
    points.open()
    os.kill(pid(points), signal.SIGSTOP)
    with pytest.raises(StoreAwayError):
        points.put([replace(point(1), payload={"text": "x" * 2**22})])
    monkeypatch.setattr(edge, "_STANDS_STILL_S", 60)
    assert points.count(OURS) == 0
    points.close()


def test_what_the_library_refuses_fails_that_call_alone(points: EdgePoints) -> None:
    wrong = Point(point(1).id, np.ones(3, np.float32), Sparse([], []), {})
    with pytest.raises(StoreFailedError, match="put"):
        points.put([wrong])
    before = pid(points)
    points.put([point(1)])
    assert points.count(OURS) == 1
    assert pid(points) == before


def test_one_process_holds_a_folder(
    folder: Path, points: EdgePoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    points.put([point(1)])
    monkeypatch.setattr(shards, "_LOCK_S", 0)
    second = Here(layout(folder))
    with pytest.raises(StoreUnusableError, match="in use by another process") as raised:
        second.open()
    assert raised.value.reason == "store_locked"
    third = EdgePoints(layout(folder))
    with pytest.raises(StoreUnusableError, match="PENSTOCK_DATA_DIR"):
        third.open()
    points.close()
    assert third.count(OURS) == 1
    third.close()


@pytest.mark.parametrize("dimension", [DIMENSION, 16])
def test_what_another_model_embedded_is_found_by_words_until_it_is_deleted(
    folder: Path, dimension: int
) -> None:
    first = Here(layout(folder))
    first.open()
    first.put([point(1), point(2), point(3)])
    first.close()
    second = Here(layout(folder, "f2", dimension))
    second.open()
    vector = np.ones(dimension, np.float32)
    second.put([Point(f"{9:032x}", vector, Sparse([9], [1.0]), {"tenant": "t", "n": 9})])
    asked = Question(OURS, OURS, 5, vector, Sparse([2, 9], [1.0, 1.0]))
    found = second.search(asked)
    assert [hit.payload["n"] for hit in found.hits] == [9]
    assert [hit.sparse > 0 for hit in found.hits] == [True]
    assert [hit.payload["n"] for hit in found.earlier] == [2]
    assert second.count(OURS) == 1, "the present model's"
    assert len(second.ids(OURS, 10)) == 4
    assert len(second.ids(OURS, 3)) == 3
    second.delete([point(2).id])
    assert second.search(asked).earlier == []
    second.delete([point(1).id, f"{9:032x}"])
    assert second.ids(OURS, 10) == [str(UUID(point(3).id))]
    second.close()


def test_an_earlier_model_s_shard_is_deleted_once_it_is_empty(folder: Path) -> None:
    first = Here(layout(folder))
    first.open()
    first.put([point(1)])
    first.close()
    second = Here(layout(folder, "f2"))
    second.open()
    assert layout(folder).folder.exists()
    second.delete([point(1).id])
    second.close()
    second.open()
    assert not layout(folder).folder.exists()
    second.close()


def test_a_kill_in_the_middle_of_that_keeps_no_store_from_its_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Here(layout(folder))
    first.open()
    first.close()

    def killed(folder: Path) -> None:
        shutil.rmtree(folder / "shard")
        raise KeyboardInterrupt

    second = Here(layout(folder, "f2"))
    with monkeypatch.context() as patched:
        patched.setattr(shards, "shutil", SimpleNamespace(rmtree=killed))
        with pytest.raises(KeyboardInterrupt):
            second.open()
    second._of_model("").close()
    os.close(second._lock)
    second.open()
    second.close()


def test_the_former_model_s_points_are_whole_again_when_it_comes_back(folder: Path) -> None:
    for fingerprint, number in (("f1", 1), ("f2", 2)):
        points = Here(layout(folder, fingerprint))
        points.open()
        points.put([point(number)])
        points.close()
    back = Here(layout(folder))
    back.open()
    asked = Question(OURS, OURS, 5, np.ones(DIMENSION, np.float32), Sparse([2], [1.0]))
    found = back.search(asked)
    assert [hit.payload["n"] for hit in found.hits] == [1]
    assert [hit.payload["n"] for hit in found.earlier] == [2]
    back.close()


def break_(folder: Path) -> None:
    """As a disk does that loses what was written last."""
    for file in (folder / "shard").rglob("*.json"):
        file.write_bytes(b"")


def test_an_earlier_model_s_shard_that_cannot_be_read_stops_itself_alone(folder: Path) -> None:
    first = Here(layout(folder))
    first.open()
    first.put([point(1)])
    first.close()
    break_(layout(folder).folder)
    second = Here(layout(folder, "f2"))
    for _ in range(2):
        second.open()
        second.put([point(2)])
        second.delete([point(1).id])
        asked = Question(OURS, OURS, 5, np.ones(DIMENSION, np.float32), Sparse([1], [1.0]))
        found = second.search(asked)
        assert [hit.payload["n"] for hit in found.hits] == [2]
        assert found.incomplete
        second.close()
    (put_aside,) = layout(folder).root.glob("*.unreadable")
    shutil.rmtree(put_aside)
    second.open()
    assert not second.search(asked).incomplete
    second.close()


def test_an_earlier_model_s_shard_that_fails_at_a_search_leaves_it_the_rest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for fingerprint, number in (("f1", 1), ("f2", 2)):
        points = Here(layout(folder, fingerprint))
        points.open()
        points.put([point(number)])
        if fingerprint == "f1":
            points.close()
    (broken,) = points._earlier.values()

    def fails(question: Question) -> None:
        raise RuntimeError("a page is lost")

    monkeypatch.setattr(broken, "search", fails)
    found = points.search(Question(OURS, OURS, 5, np.ones(DIMENSION, np.float32), None))
    assert ([hit.payload["n"] for hit in found.hits], found.incomplete) == ([2], True)
    points.close()


def test_one_s_own_shard_that_cannot_be_read_is_said_in_words(folder: Path) -> None:
    points = EdgePoints(layout(folder))
    points.put([point(1)])
    points.close()
    break_(layout(folder).folder)
    with pytest.raises(StoreUnusableError, match="cannot be read") as raised:
        points.count(OURS)
    assert raised.value.reason == "store_unreadable"


def test_a_full_disk_refuses_what_is_new_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = Here(layout(folder))
    points.open()
    points.put([point(1), point(2)])
    with monkeypatch.context() as patched:
        patched.setattr(shard, "_RESERVE", 2**60)
        with pytest.raises(OSError, match="disk is full"):
            points.put([point(3)])
        points.delete([point(1).id])
        points.flush()
        points.vacuum()
        points.close()
        points.open()
        found = points.search(Question(OURS, OURS, 5, np.ones(DIMENSION, np.float32), None))
        assert [hit.payload["n"] for hit in found.hits] == [2]
    points.put([point(3)])
    assert points.count(OURS) == 2
    points.close()


def test_a_flush_that_fails_ends_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = list[object]()
    questions = [("count", (OURS,))] * 2

    class Pipe:
        def poll(self, timeout_s: float) -> bool:
            return False

        def recv(self) -> object:
            if not questions:
                raise EOFError
            return questions.pop()

        def send(self, answer: object) -> None:
            answered.append(answer)

    def fails() -> None:
        raise OSError("no space left")

    monkeypatch.setattr(edge_process, "_CHANGES", ("count",))
    store = SimpleNamespace(flush=fails, vacuum=fails, count=lambda where: 4)
    with pytest.raises(EOFError):
        edge_process._serve(cast(Any, Pipe()), cast(Any, store))
    assert answered == [("done", 4)] * 2


def test_of_many_those_are_found_that_an_exact_search_finds(folder: Path) -> None:
    """By their short vectors, of which a store that was made without them gets some."""
    size, asked_for = 64, 10
    draw = np.random.default_rng(5)
    vectors = draw.standard_normal((2000, size), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    wide = layout(folder, dimension=size)
    points = Here(wide)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shard, "_SHORT", None)
        points.open()
        made = (replace(point(n), dense=one) for n, one in enumerate(vectors))
        points.put([*made])
        points.close()

    def short() -> list[Path]:
        return [*(wide.folder / "shard").rglob("*quant*")]

    assert not short()
    points.open()
    assert short()
    alike = 0
    for question in vectors[:50] + 0.05 * draw.standard_normal((50, size), dtype=np.float32):
        question /= np.linalg.norm(question)
        found = points.search(Question(OURS, OURS, asked_for, question, None)).hits
        cosines = vectors @ question
        nearest = np.argsort(-cosines)[:asked_for]
        ids = [hit.payload["n"] for hit in found]
        alike += len({*ids} & {*nearest.tolist()})
        assert [hit.dense for hit in found] == pytest.approx(cosines[ids].tolist(), abs=1e-4)
    assert alike >= 0.98 * 50 * asked_for
    points.close()


def test_points_of_versions_that_knew_no_scopes_are_found_and_drafts_are_not(folder: Path) -> None:
    points = Here(layout(folder))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shard, "SCOPE", "none")  # such a shard has no index of them either
        patched.setattr(shard, "KEYWORDS", ("collection", "source_id", "digest"))
        points.open()
        for number, (tenant, collection) in enumerate((("t", "c"), ("t", "d"), ("u", "c"))):
            one = replace(point(number), payload={"tenant": tenant, "collection": collection})
            points.put([one])
        points.put([replace(point(3), payload={"tenant": "t", "collection": "c", "scope": ""})])
        points.close()
    other = Here(layout(folder, "f2"))  # also of an earlier model
    for opened in (points, other, points):
        opened.open()
        for number, (tenant, collection) in enumerate((("t", "c"), ("t", "d"), ("u", "c"))):
            scope = Is("scope", (scope_of(tenant, collection),))
            assert opened.ids(scope, 9) == [str(UUID(point(number).id))]
        indexed = [each._shard.info().payload_schema for each in opened._all()]
        assert all({"scope", "marks"} <= {*schema} for schema in indexed)
        opened.close()


def earlier_store(folder: Path, fingerprint: str) -> None:
    """As versions before this one left it."""
    client = QdrantClient(path=str(folder / "qdrant"))
    client.create_collection(
        "test-chunks",
        vectors_config=models.VectorParams(size=DIMENSION, distance=models.Distance.COSINE),
        metadata={"embedding_model": f"model-{fingerprint}", "fingerprint": fingerprint},
    )
    payload = {"tenant": "t", "collection": "c", "source_id": "s", "revision": 5, "title": "Doc"}
    client.upsert(
        "test-chunks",
        [
            models.PointStruct(
                id=f"{n:032x}",
                vector=np.eye(DIMENSION)[n % DIMENSION].tolist(),
                payload=payload | {"position": n, "text": "a lantern" if n == 7 else f"text {n}"},
            )
            for n in range(300)
        ],
    )
    client.close()


def test_what_an_earlier_version_stored_is_taken_over_once(folder: Path) -> None:
    earlier_store(folder, "f1")
    points = Here(layout(folder))
    points.open()
    assert points.moved == 300
    question = Question(OURS, OURS, 3, np.eye(DIMENSION, dtype=np.float32)[1], None)
    assert {hit.payload["position"] % DIMENSION for hit in points.search(question).hits} == {1}
    points.close()
    assert not (folder / "qdrant").exists()
    again = Here(layout(folder))
    again.open()
    assert (again.moved, again.count(OURS)) == (0, 300)
    again.close()


def test_of_another_model_an_earlier_version_s_points_are_found_by_words(folder: Path) -> None:
    earlier_store(folder, "f2")
    points = Here(layout(folder))
    points.open()
    assert points.moved == 300
    asked = Question(OURS, OURS, 3, np.ones(DIMENSION, np.float32), words.of_question("lantern"))
    found = points.search(asked)
    assert (found.hits, found.earlier[0].payload["position"]) == ([], 7)
    points.close()
    theirs = Here(layout(folder, "f2"))
    theirs.open()
    assert (theirs.moved, theirs.count(OURS)) == (0, 300)
    theirs.close()


@pytest.mark.parametrize("at_start", [False, True])
def test_what_is_deleted_leaves_the_disk(folder: Path, at_start: bool) -> None:
    def holds(text: str) -> bool:
        files = (folder / "index").glob("test/f1/shard/segments/**/*")
        return any(text.encode() in path.read_bytes() for path in files if path.is_file())

    shards = Here(layout(folder))
    shards.open()
    vector = np.ones(DIMENSION, np.float32)
    ids = [f"{n:032x}" for n in range(1500)]
    told = [{"tenant": "t", "text": f"secret number {n:04d}"} for n in range(1500)]
    each = zip(ids, told, strict=True)
    shards.put([Point(name, vector, Sparse([1], [1.0]), payload) for name, payload in each])
    shards.flush()
    assert holds("secret number 0007")
    shards.delete(ids[:1000])
    shards.flush()
    if at_start:
        shards.close()
        shards = Here(layout(folder))
        shards.open()
    else:
        shards.vacuum()
    assert not holds("secret number 0007")
    assert holds("secret number 1007")
    assert shards.count(OURS) == 500
    shards.close()
