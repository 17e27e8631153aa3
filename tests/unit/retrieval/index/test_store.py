"""Documents in the embedded store: tenants apart, no gap while replacing, drafts gone on with."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import numpy as np
import pytest

from protos.common_pb2 import AttributeValue, Range
from protos.retrieval_pb2 import Filter
from services.common.errors import PenstockError
from services.retrieval.documents.chunks import Chunk, Span
from services.retrieval.index import draft as draft_module
from services.retrieval.index import shard, shards
from services.retrieval.index import store as store_module
from services.retrieval.index.attributes import condition, told
from services.retrieval.index.attributes import stored as attributes_stored
from services.retrieval.index.calls import Calls
from services.retrieval.index.layout import Layout
from services.retrieval.index.points import Points, Weights
from services.retrieval.index.store import Store
from services.retrieval.search.passages import passages_of
from tests.support.shards import DIMENSION, Here, layout, memory_folder, stored

BY_WORDS = Weights(embedding=1.0, text=2.0)


async def opened(at: Layout) -> Calls:
    calls = Calls(Here(at), 20)
    await calls.open()
    return calls


@pytest.fixture
async def calls() -> AsyncIterator[Calls]:
    with memory_folder() as folder:
        calls = await opened(layout(folder))
        yield calls
        await calls.close()


class Told:
    """Stands for Revisions: what is written to is under way while it is."""

    def __init__(self) -> None:
        self.open: Counter[tuple[str, str]] = Counter()
        self.removals = 0

    @asynccontextmanager
    async def writing(
        self, tenant: str, collection: str, *, removes: bool = False
    ) -> AsyncIterator[None]:
        self.open[tenant, collection] += 1
        self.removals += removes
        yield
        self.open[tenant, collection] -= 1


@pytest.fixture
def revisions() -> Told:
    return Told()


@pytest.fixture
def store(calls: Calls, revisions: Told) -> Store:
    return Store(calls, cast(Any, revisions))


def axis(n: int) -> np.ndarray:
    return np.eye(DIMENSION, dtype=np.float32)[n]


def document(*words: str) -> tuple[list[Chunk], np.ndarray]:
    """One chunk a word; chunk n points along axis n."""
    chunks = [Chunk("Doc", word, 0, len(word), 1) for word in words]
    return chunks, np.stack([axis(n) for n in range(len(words))])


def without_marks(attributes: Mapping[str, AttributeValue]) -> dict[str, Any]:
    return {"attributes": attributes_stored(attributes)["attributes"]}


async def texts(store: Store, tenant: str, *collections: str, limit: int = 50) -> set[str]:
    ones = np.ones(DIMENSION, np.float32)
    found = await store.search(tenant, collections, ones, "", limit)
    return {hit.payload["text"] for hit in found.hits}


async def test_the_nearest_and_those_of_the_same_words_are_found_each_best_first(
    store: Store,
) -> None:
    await stored(store, "t", "c", "doc", *document("north east", "east", "south"))
    question = axis(1) * 0.9 + axis(2) * 0.3
    found = await store.search("t", ["c"], question, "North, or the east?", 2)
    keys = ("text", "title", "source_id", "position")
    assert [tuple(hit.payload[key] for key in keys) for hit in found.hits[:2]] == [
        ("east", "Doc", "doc", 1),
        ("south", "Doc", "doc", 2),
    ]
    assert [hit.dense for hit in found.hits] == pytest.approx([0.9487, 0.3162, 0], abs=1e-3)
    by_words = await store.search("t", ["c"], question, "North, or the east?", 2, None, BY_WORDS)
    assert [hit.payload["text"] for hit in by_words.hits[:2]] == ["north east", "east"]
    assert [hit.dense for hit in by_words.hits[:2]] == pytest.approx([0, 0.9487], abs=1e-3)


async def test_the_best_chunks_tokens_come_back_with_them_where_they_have_some(
    store: Store,
) -> None:
    chunks, vectors = document("a", "b", "c")
    draft = await store.draft("t", "c", "new", "d")
    await store.put(draft, [0, 1, 2], chunks, vectors, 3, ["AQEB", "AQIC", "AQID"])
    await store.publish(draft, 3)
    await stored(store, "t", "c", "old", *document("old"))
    question = axis(0) * 0.8 + axis(1) * 0.6
    hits = (await store.search("t", ["c"], question, "", 9, closely=3)).hits
    told = {hit.payload["text"]: hit.payload.get("tokens") for hit in hits}
    assert told == {"a": "AQEB", "old": "", "b": "AQIC", "c": None}
    assert "tokens" not in (await store.search("t", ["c"], question, "", 9)).hits[0].payload


async def test_what_words_alone_find_has_its_cosine_and_the_best_of_both_are_told(
    store: Store,
) -> None:
    """Of the nearest, and of those that have the words."""
    near = [Chunk("Doc", f"near {n}", 0, 6, 1) for n in range(4)]
    leaning = [axis(0) + axis(1) * 0.1 * n for n in range(4)]
    far = [Chunk("Doc", word, 0, len(word), 1) for word in ("harbour", "quay", "harbour quay")]
    turned = [axis(0) * 0.2 + axis(n + 2) for n in range(3)]
    vectors = np.stack([one / np.linalg.norm(one) for one in (*leaning, *turned)])
    await stored(store, "t", "c", "doc", [*near, *far], vectors)
    hits = (
        await store.search("t", ["c"], axis(0), "harbour quay", 3, None, Weights(1.0, 1.2))
    ).hits
    best, deeper = hits[:4], hits[4:]
    assert [hit.payload["text"] for hit in best] == ["harbour quay", "near 0", "near 1", "near 2"]
    assert [hit.dense for hit in best] == pytest.approx([0.196, 1, 0.995, 0.981], abs=1e-3)
    assert [hit.sparse > 0 for hit in best] == [True, False, False, False]
    assert [hit.score for hit in best] == pytest.approx([0.634, 0.455, 0.452, 0.446], abs=1e-3)
    assert {hit.payload["text"] for hit in deeper} == {"harbour", "quay"}


async def test_of_many_the_best_come_back(store: Store) -> None:
    leaning = [axis(0) + axis(1) * 0.01 * n for n in range(60)]
    chunks = [Chunk("Doc", f"{n}", 0, 2, 1) for n in range(60)]
    vectors = np.stack([one / np.linalg.norm(one) for one in leaning])
    await stored(store, "t", "c", "doc", chunks, vectors)
    hits = (await store.search("t", ["c"], axis(0), "", 50)).hits
    assert [hit.payload["text"] for hit in hits] == [f"{n}" for n in range(30)]


async def test_pages_and_rows_come_back_with_a_passage(store: Store) -> None:
    chunks = [
        Chunk("Doc", "west", 0, 4, 1, pages=Span(3, 4)),
        Chunk("Doc › Table", "| a |\nnorth", 4, 9, 1, lead=6, rows=Span(7, 7)),
    ]
    await stored(store, "t", "c", "doc", chunks, np.stack([axis(0), axis(1)]))
    hits = (await store.search("t", ["c"], axis(0), "", 2)).hits
    first, second = passages_of(hits, 0, 2).passages
    assert (first.pages, first.HasField("rows")) == (Range(first=3, last=4), False)
    assert (second.rows, second.HasField("pages")) == (Range(first=7, last=7), False)
    assert [hit.payload["lead"] for hit in hits] == [0, 6]


async def test_a_document_that_is_indexed_anew_leaves_the_earlier_model_and_no_other(
    revisions: Told,
) -> None:
    """There is one of it at any time; its revision may be the one that it had there."""
    with memory_folder() as folder:
        former = await opened(layout(folder))
        before = Store(former, cast(Any, revisions))
        for source in ("one", "two", "three"):
            draft = await before.draft("t", "c", source, "f1", revision=7)
            await before.put(draft, range(2), *document(f"{source} quay", "and more"), 2)
            await before.publish(draft, 2)
        await former.close()
        calls = await opened(layout(folder, "f2", 16))
        store, question = Store(calls, cast(Any, revisions)), np.ones(16, np.float32)

        async def found() -> tuple[set[str], set[str]]:
            hits = await store.search("t", ["c"], question, "quay", 9)
            near = {hit.payload["text"] for hit in hits.hits}
            return near, {hit.payload["text"] for hit in hits.earlier}

        assert await found() == (set(), {"one quay", "two quay", "three quay"})
        draft = await store.draft("t", "c", "one", "f2", revision=7)
        assert (draft.stored, draft.complete) == (frozenset(), False)
        chunks = [Chunk("Doc", "one quay", 0, 8, 2)]
        await store.put(draft, [0], chunks, np.eye(16, dtype=np.float32)[:1], 1)
        assert not await store.whole("t", "c", "one"), "the earlier model has it, too"
        await store.publish(draft, 1)
        assert await store.whole("t", "c", "one") == 1
        for other in (("t", "c", "two"), ("t", "d", "one"), ("u", "c", "one")):
            assert not await store.whole(*other)
        assert await found() == ({"one quay"}, {"two quay", "three quay"})
        assert await store.remove("t", "c", "two") == 2
        assert await found() == ({"one quay"}, {"three quay"})
        assert await store.remove("t", "c") == 3
        assert await found() == (set(), set())
        await calls.close()


async def test_a_writer_that_is_late_leaves_what_another_model_embedded_since(
    revisions: Told,
) -> None:
    """As replicas of two models do, while one takes the other's place."""
    with memory_folder() as folder:
        other = await opened(layout(folder))
        theirs = Store(other, cast(Any, revisions))
        draft = await theirs.draft("t", "c", "doc", "f1", revision=8)
        await theirs.put(draft, [0], *document("newer quay"), 1)
        await theirs.publish(draft, 1)
        await other.close()
        calls = await opened(layout(folder, "f2"))
        store = Store(calls, cast(Any, revisions))
        late = await store.draft("t", "c", "doc", "f2", revision=7)
        assert late.complete
        await store.publish(late, 0)
        found = await store.search("t", ["c"], axis(0), "quay", 9)
        assert [hit.payload["text"] for hit in found.earlier] == ["newer quay"]
        await calls.close()


async def test_what_a_version_before_scopes_and_short_vectors_stored_is_found_and_replaced(
    revisions: Told,
) -> None:
    with memory_folder() as folder:
        at = layout(folder)
        with pytest.MonkeyPatch.context() as earlier:
            earlier.setattr(shard, "_SHORT", None)
            earlier.setattr(shard, "SCOPE", "none")
            earlier.setattr(draft_module, "SCOPE", "none")
            earlier.setattr(store_module, "SCOPE", "none")
            earlier.setattr(store_module, "stored_attributes", without_marks)
            earlier.setattr(shard, "KEYWORDS", ("collection", "source_id", "digest"))
            earlier.setattr(shards, "publish_unscoped", lambda shard: None)
            before = await opened(at)
            for tenant, source in (("t", "one"), ("t", "two"), ("u", "one")):
                theirs = Store(before, cast(Any, revisions))
                text, color = (
                    document(f"{tenant}'s {source}"),
                    {"color": AttributeValue(text=source)},
                )
                await stored(theirs, tenant, "c", source, *text, attributes=color)
            await before.close()
        calls = await opened(at)
        store = Store(calls, cast(Any, revisions))
        assert await texts(store, "t", "c") == {"t's one", "t's two"}
        assert await texts(store, "u", "c") == {"u's one"}
        two = condition(
            Filter(comparison=Filter.Comparison(key="color", values=[AttributeValue(text="two")]))
        )
        ones = np.ones(DIMENSION, np.float32)
        (found,) = (await store.search("t", ["c"], ones, "", 9, two)).hits
        assert found.payload["text"] == "t's two"
        await stored(store, "t", "c", "one", *document("new"))
        assert await store.remove("t", "c", "two") == 1
        assert await texts(store, "t", "c") == {"new"}
        await calls.close()


async def test_tenants_are_apart_even_under_equal_names(store: Store) -> None:
    await stored(store, "ours", "c", "doc", *document("our text"))
    await stored(store, "theirs", "c", "doc", *document("their text"))
    assert await texts(store, "ours", "c") == {"our text"}
    assert await texts(store, "theirs", "c") == {"their text"}
    assert await texts(store, "nobody", "c") == set()
    assert await store.remove("nobody", "c") == 0
    assert await store.remove("ours", "c") == 1
    assert await texts(store, "theirs", "c") == {"their text"}


async def test_a_source_is_removed_from_the_named_collection_alone(store: Store) -> None:
    """A file may be in several vector stores, under one id."""
    for collection in ("a", "b"):
        for source in ("one", "two"):
            await stored(store, "t", collection, source, *document(f"{source} in {collection}"))
    assert await store.remove("t", "a", "one") == 1
    assert await texts(store, "t", "a", "b") == {"two in a", "one in b", "two in b"}
    assert await store.remove("t", "b") == 2
    assert await texts(store, "t", "a", "b") == {"two in a"}


async def test_only_the_named_collections_are_searched(store: Store) -> None:
    for name in ("a", "b", "c"):
        await stored(store, "t", name, "doc", *document(f"text of {name}"))
    assert await texts(store, "t", "a", "c", "unknown") == {"text of a", "text of c"}


async def test_replacing_leaves_nothing_of_the_earlier_text(store: Store) -> None:
    await stored(store, "t", "c", "doc", *document("old one", "old two", "old three"))
    await stored(store, "t", "c", "other", *document("untouched"))
    await stored(store, "t", "c", "doc", *document("new one", "new two"))
    assert await texts(store, "t", "c") == {"new one", "new two", "untouched"}


async def test_a_long_document_goes_whole(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_POINTS_PER_READ", 3)
    monkeypatch.setattr(store_module, "_POINTS_PER_WRITE", 2)
    await stored(store, "t", "c", "doc", *document(*"abcdefgh"))
    assert await texts(store, "t", "c") == set("abcdefgh")
    await stored(store, "t", "c", "doc", *document("new"))
    assert await texts(store, "t", "c") == {"new"}
    await stored(store, "t", "c", "doc", *document(*"abcdefgh"))
    assert await store.remove("t", "c") == 8
    assert await texts(store, "t", "c") == set()


async def test_a_clock_that_goes_backwards_does_not_lose_the_newer_text(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stored(store, "t", "c", "doc", *document("first"))
    monkeypatch.setattr(store_module.time, "time_ns", lambda: 1_000_000)
    await stored(store, "t", "c", "doc", *document("second"))
    assert await texts(store, "t", "c") == {"second"}


async def test_a_search_during_replacing_always_finds_the_document(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_POINTS_PER_WRITE", 1)
    await stored(store, "t", "c", "doc", *document(*(f"old {n}" for n in range(8))))
    replacing = asyncio.create_task(
        stored(store, "t", "c", "doc", *document(*(f"new {n}" for n in range(8))))
    )
    old, new = ({f"{age} {n}" for n in range(8)} for age in ("old", "new"))
    looks = 0
    while not replacing.done():
        seen = await texts(store, "t", "c")
        assert old <= seen or new <= seen
        looks += 1
    await replacing
    assert looks > 2
    assert await texts(store, "t", "c") == new


@pytest.mark.parametrize("held_before", ["_put", "_delete"])
async def test_of_two_writers_at_once_the_newer_version_remains(
    store: Store, monkeypatch: pytest.MonkeyPatch, held_before: str
) -> None:
    """The older one is held up in the middle, while the newer one comes and goes."""
    reached, go_on = asyncio.Event(), asyncio.Event()
    step = getattr(store, held_before)

    async def held(*args: object) -> None:
        monkeypatch.setattr(store, held_before, step)
        reached.set()
        await go_on.wait()
        await step(*args)

    monkeypatch.setattr(store, held_before, held)
    older = asyncio.create_task(stored(store, "t", "c", "doc", *document("old 0", "old 1")))
    await asyncio.wait_for(reached.wait(), 10)
    await stored(store, "t", "c", "doc", *document("new 0"))
    assert "new 0" in await texts(store, "t", "c")
    go_on.set()
    await older
    assert await texts(store, "t", "c") == {"new 0"}


async def test_a_search_waits_behind_one_batch_of_all_that_is_written_and_removed(
    calls: Calls, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_POINTS_PER_WRITE", 1)
    await stored(store, "t", "c", "gone", *document(*"abcdefgh"))
    executed: list[str] = []

    async def logged(
        operation: str, tenant: str, work: Callable[[Points], Any], ended: Any = lambda: None
    ) -> Any:
        def log_and_work(points: Points) -> Any:
            executed.append(operation)
            return work(points)

        return await as_ever(operation, tenant, log_and_work, ended)

    as_ever = calls.read
    monkeypatch.setattr(calls, "read", logged)
    work = [stored(store, "t", "c", f"doc {n}", *document(*"abcdefgh")) for n in range(3)]
    tasks = [asyncio.create_task(one) for one in (*work, store.remove("t", "c", "gone"))]
    for _ in range(8):
        before = len(executed)
        await texts(store, "t", "c")
        behind = executed[before : executed.index("search", before)]
        assert sum(operation in ("write", "delete") for operation in behind) <= 1
    assert not all(task.done() for task in tasks), "they were still at it"
    await asyncio.gather(*tasks)
    assert executed.count("write") == 24
    assert executed.count("delete") == 8
    assert await texts(store, "t", "c") == set("abcdefgh")
    assert await store.remove("t", "c") == 24


async def test_a_draft_is_found_by_no_search_until_it_is_published(store: Store) -> None:
    async def found() -> tuple[set[str], set[str]]:
        hits = await store.search("t", ["c"], np.ones(DIMENSION, np.float32), "new old", 9)
        by_words = {hit.payload["text"] for hit in hits.hits if hit.sparse}
        return {hit.payload["text"] for hit in hits.hits}, by_words

    await stored(store, "t", "c", "doc", *document("old", "old too"))
    old = {"old", "old too"}
    draft = await store.draft("t", "c", "doc", "digest")
    await store.put(draft, [0], *document("new"), of=1)
    assert await found() == (old, old)
    again = await store.draft("t", "c", "doc", "digest")
    assert again.complete
    assert await found() == (old, old), "nor when it is gone on with"
    await store.publish(again, 1)
    assert await found() == ({"new"}, {"new"})
    given_up = await store.draft("t", "c", "doc", "other")
    await store.put(given_up, [0], *document("newer"), of=2)
    store.discard(given_up)
    await store.finish()
    assert await found() == ({"new"}, {"new"})
    assert await store.remove("t", "c") == 1, "what was given up is gone"


async def test_another_text_of_the_same_revision_takes_the_place_of_the_first(
    store: Store,
) -> None:
    """Such as that of a job that is done again under another policy; it may be shorter."""
    for digest, words in (("long", "abc"), ("short", "xy")):
        draft = await store.draft("t", "c", "doc", digest, 7)
        chunks, vectors = document(*words)
        await store.put(draft, range(len(words)), chunks, vectors, len(words))
        if digest == "short":
            assert await texts(store, "t", "c") == set("abc"), "until it is whole"
        await store.publish(draft, len(words))
        assert await texts(store, "t", "c") == set(words)


async def test_names_of_tenant_and_collection_do_not_run_together(store: Store) -> None:
    for tenant, collection in (("a", "b c"), ("a b", "c"), ('a", "b', "c")):
        text = f"{tenant}'s {collection}"
        await stored(store, tenant, collection, "doc", *document(text))
        assert await texts(store, tenant, collection) == {text}


async def test_what_is_stored_of_a_digest_is_not_put_again(store: Store) -> None:
    """After a kill in the middle, under the same revision or a later one."""
    await stored(store, "t", "c", "doc", *document("old"))
    chunks, vectors = document("a", "b", "c")
    killed = await store.draft("t", "c", "doc", "digest")
    assert (killed.stored, killed.complete) == (set(), False)
    await store.put(killed, [0, 1], chunks[:2], vectors[:2], of=3)
    again = await store.draft("t", "c", "doc", "digest")
    assert again.revision > killed.revision
    assert (again.stored, again.complete) == ({0, 1}, False)
    await store.put(again, [2], chunks[2:], vectors[2:], of=3)
    await store.publish(again, 3)
    assert await texts(store, "t", "c") == {"a", "b", "c"}
    whole = await store.draft("t", "c", "doc", "digest")
    assert (whole.stored, whole.complete) == ({0, 1, 2}, True)
    await store.publish(whole, 3)
    assert await texts(store, "t", "c") == {"a", "b", "c"}
    assert (await store.draft("t", "c", "doc", "other")).stored == set()
    assert (await store.draft("t", "c", "other doc", "digest")).stored == set()
    assert (await store.draft("rival", "c", "doc", "digest")).stored == set()


async def test_a_document_is_whole_only_with_each_of_its_chunks_and_no_other_revision(
    store: Store,
) -> None:
    chunks, vectors = document("one", "two", "three")
    draft = await store.draft("t", "c", "s", "d", revision=3)
    await store.put(draft, [0, 2], [chunks[0], chunks[2]], vectors[[0, 2]], 3)
    assert not await store.whole("t", "c", "s")
    await store.put(draft, [1], chunks[1:2], vectors[1:2], 3)
    assert not await store.whole("t", "c", "s"), "no search finds it yet"
    await store.publish(draft, 3)
    assert await store.whole("t", "c", "s") == 3
    newer = await store.draft("t", "c", "s", "e", revision=4)
    await store.put(newer, [0], chunks[:1], vectors[:1], 1)
    assert not await store.whole("t", "c", "s"), "a draft of it is under way"
    await store.publish(newer, 1)
    assert await store.whole("t", "c", "s") == 1


async def test_the_callers_revision_says_which_of_two_is_the_newer(store: Store) -> None:
    async def write(revision: int, text: str) -> bool:
        draft = await store.draft("t", "c", "doc", text, revision)
        if not draft.complete:
            await store.put(draft, [0], *document(text), of=1)
            await store.publish(draft, 1)
        return not draft.complete

    assert await write(5, "fifth")
    assert not await write(4, "fourth")
    assert await texts(store, "t", "c") == {"fifth"}
    assert await write(6, "sixth")
    assert await store.remove("t", "c", "doc", revision=5) == 0
    assert await texts(store, "t", "c") == {"sixth"}
    assert await store.remove("t", "c", "doc", revision=6) == 1


async def test_a_draft_that_lost_chunks_is_not_published(store: Store) -> None:
    await stored(store, "t", "c", "doc", *document("old"))
    draft = await store.draft("t", "c", "doc", "digest")
    await store.put(draft, [0], *document("a"), of=2)
    with pytest.raises(PenstockError) as raised:
        await store.publish(draft, 2)
    assert raised.value.reason == "document_changed"
    assert "old" in await texts(store, "t", "c")


async def test_a_document_heals_that_two_writers_at_once_wrote_in_part_twice(store: Store) -> None:
    chunks, vectors = document("a", "b")
    one = await store.draft("t", "c", "doc", "digest", 4)
    await store.put(one, [0], chunks[:1], vectors[:1], of=2)
    other = await store.draft("t", "c", "doc", "digest", 5)
    await store.put(other, [0, 1], chunks, vectors, of=2)
    with pytest.raises(PenstockError, match="changed by another"):
        await store.publish(other, 2)
    again = await store.draft("t", "c", "doc", "digest", 6)
    assert (again.stored, again.complete) == (set(), False)
    await store.put(again, [0, 1], chunks, vectors, of=2)
    await store.publish(again, 2)
    found = await store.search("t", ["c"], axis(0), "", 9)
    assert sorted(hit.payload["text"] for hit in found.hits) == ["a", "b"]


async def test_a_late_draft_takes_no_chunks_of_a_newer_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is published between its two looks at the document, with other attributes."""
    whole, overtaken = document("a", "b"), store._overtaken
    color, new = ({"color": AttributeValue(text=text)} for text in ("old", "new"))

    async def published_then(draft: Any) -> bool:
        was = await overtaken(draft)
        monkeypatch.undo()
        newer = await store.draft("t", "c", "doc", "digest", 5, new)
        await store.put(newer, range(2), *whole, of=2)
        await store.publish(newer, 2)
        return was

    monkeypatch.setattr(store, "_overtaken", published_then)
    late = await store.draft("t", "c", "doc", "digest", 4, color)
    assert late.stored == set()
    await store.put(late, range(2), *whole, of=2)
    await store.publish(late, 2)
    found = (await store.search("t", ["c"], axis(0), "", 9, closely=2)).hits
    assert [hit.payload["revision"] for hit in found] == [5, 5]
    assert [told(hit.payload) for hit in found] == [new, new]


async def test_a_draft_is_overtaken_by_what_is_published_alone(store: Store) -> None:
    await stored(store, "t", "c", "doc", *document("old"), revision=3)
    newer = await store.draft("t", "c", "doc", "newer", 5)
    await store.put(newer, [0], *document("in part"), of=2)
    late = await store.draft("t", "c", "doc", "late", 4)
    assert not late.complete, "the newer one may never be published"
    await store.put(late, [0], *document("late"), of=1)
    await store.publish(late, 1)
    assert await texts(store, "t", "c") == {"late"}
    await store.put(newer, [1], *document("and the rest"), of=2)
    await store.publish(newer, 2)
    assert await texts(store, "t", "c") == {"in part", "and the rest"}
    later_still = await store.draft("t", "c", "doc", "late", 4)
    assert (later_still.complete, later_still.stored) == (True, frozenset())
    await store.publish(later_still, 0)
    assert await texts(store, "t", "c") == {"in part", "and the rest"}


async def test_searches_that_are_told_again_hear_of_every_write(
    store: Store, calls: Calls, revisions: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, write = [], calls.write

    async def noted(operation: str, tenant: str, work: Any) -> Any:
        written.append((operation, revisions.open["t", "c"] > 0))
        return await write(operation, tenant, work)

    monkeypatch.setattr(calls, "write", noted)
    await stored(store, "t", "c", "doc", *document("a", "b"))
    assert revisions.removals == 1
    await stored(store, "t", "c", "doc", *document("c"))
    draft = await store.draft("t", "c", "doc")
    await store.put(draft, [0], *document("d"), of=2)
    store.discard(draft)
    await store.finish()
    assert await store.remove("t", "c", "doc") == 1
    assert {operation for operation, _ in written} == {"write", "change", "delete"}
    assert all(told for operation, told in written if operation != "write"), (
        "drafts no search finds"
    )
    assert revisions.removals == 4
    assert not +revisions.open


async def test_attributes_are_replaced_whole_and_those_of_their_tenant_alone(store: Store) -> None:
    def color(name: str) -> dict[str, AttributeValue]:
        return {"color": AttributeValue(text=name)}

    async def of(tenant: str) -> set[str]:
        found = await store.search(tenant, ["c"], axis(0), "", 9)
        return {one.text for hit in found.hits for one in told(hit.payload).values()}

    for tenant in ("ours", "theirs"):
        await stored(store, tenant, "c", "doc", *document("a", "b"), attributes=color("red"))
    await store.set_attributes("ours", "c", "doc", {"size": AttributeValue(text="small")})
    assert (await of("ours"), await of("theirs")) == ({"small"}, {"red"})
    red = condition(
        Filter(comparison=Filter.Comparison(key="color", values=[AttributeValue(text="red")]))
    )
    assert not (await store.search("ours", ["c"], axis(0), "a", 9, red)).hits
    assert len((await store.search("theirs", ["c"], axis(0), "a", 9, red)).hits) == 2
    drafted = await store.draft("ours", "c", "doc 2", "digest", attributes=color("red"))
    await store.put(drafted, [0], *document("x"), of=1)
    again = await store.draft("ours", "c", "doc 2", "digest", attributes=color("blue"))
    assert again.complete
    await store.publish(again, 1)
    assert await of("ours") == {"small", "blue"}


async def test_a_filter_that_would_hold_the_store_is_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred comparisons of 20,000 chunks took it 19 s, in which nobody's search was made."""
    monkeypatch.setattr(store_module.effort, "MOST", 5.0)
    await stored(store, "acme", "a", "s", *document("six", "nine", "noon"))
    await stored(store, "acme", "b", "s", *document("six"))

    def compared(operator: Any, times: int) -> Any:
        value = [AttributeValue(number=2)]
        one = Filter(comparison=Filter.Comparison(key="n", operator=operator, values=value))
        return condition(Filter(compound=Filter.Compound(any=True, filters=[one] * times)))

    async def search(collection: str, only: Any) -> Any:
        return await store.search("acme", [collection], axis(0), "six", 5, only)

    await search("a", compared(Filter.GT, 1))
    await search("a", compared(Filter.NE, 30))
    await search("b", compared(Filter.LTE, 5))
    for operator, times in ((Filter.GT, 2), (Filter.NIN, 40)):
        with pytest.raises(PenstockError) as refused:
            await search("a", compared(operator, times))
        assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert (refused.value.param, refused.value.reason) == ("filters", "filters_too_costly")
        assert " 3 chunks" in refused.value.message


async def test_two_models_at_a_time_have_their_own_documents(revisions: Told) -> None:
    """Of the other's a search finds the words; a document that one takes over leaves the other."""
    with memory_folder() as folder:
        calls = Calls(Here(layout(folder), layout(folder, "f2", 16)), 20)
        await calls.open()
        small, wide = (Store(calls, cast(Any, revisions), model) for model in ("f1", "f2"))
        await stored(small, "t", "c", "one", *document("north quay"))
        chunks, _ = document("south quay")
        vectors = np.ones((1, 16), np.float32) / 4
        await stored(wide, "t", "c", "two", chunks, vectors)

        async def found(store: Store, size: int) -> tuple[set[str], set[str]]:
            hits = await store.search("t", ["c"], np.ones(size, np.float32), "quay", 9)
            near = {hit.payload["text"] for hit in hits.hits}
            return near, {hit.payload["text"] for hit in hits.earlier}

        assert await found(small, DIMENSION) == ({"north quay"}, {"south quay"})
        assert await found(wide, 16) == ({"south quay"}, {"north quay"})
        assert await small.whole("t", "c", "one") == 1
        assert await wide.whole("t", "c", "one") == 0
        chunks, _ = document("north quay")
        await stored(wide, "t", "c", "one", chunks, vectors)
        assert await found(wide, 16) == ({"south quay", "north quay"}, set())
        assert await found(small, DIMENSION) == (set(), {"south quay", "north quay"})
        assert await small.remove("t", "c") == 2
        assert await found(wide, 16) == (set(), set())
        await calls.close()
