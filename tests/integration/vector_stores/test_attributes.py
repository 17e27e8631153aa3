"""Attributes of files in vector stores, and searches by them."""

from typing import Any

import pytest

from tests.support.gateway_rig import MODEL, Rig
from tests.support.ports import QUESTION, Port, refusal
from tests.support.waiting import until


async def test_files_are_found_by_their_attributes(rig: Rig) -> None:
    port = await Port.of(rig)
    await port.add("old.md", attributes={"year": 1999, "town": "Kiel", "open": True})
    await port.add("new.md", attributes={"year": 2024.5, "town": "Bremen", "open": False})
    await port.add("none.md")
    every = ["new.md", "none.md", "old.md"]

    def one(type: str, key: str, value: Any) -> dict[str, Any]:
        return {"type": type, "key": key, "value": value}

    is_old, is_new = one("lt", "year", 2000), one("eq", "town", "Bremen")
    either = {"type": "or", "filters": [is_old, is_new]}
    for filters, found in (
        (one("eq", "town", "Kiel"), ["old.md"]),
        (one("ne", "town", "Kiel"), ["new.md", "none.md"]),
        (one("eq", "open", True), ["old.md"]),
        (one("gt", "year", 1999), ["new.md"]),
        (one("gte", "year", 1999), ["new.md", "old.md"]),
        (one("lte", "year", 2024.5), ["new.md", "old.md"]),
        (is_old, ["old.md"]),
        (one("in", "town", ["Kiel", "Bremen"]), ["new.md", "old.md"]),
        (one("nin", "town", ["Kiel", "Bremen"]), ["none.md"]),
        ({"type": "and", "filters": [is_old, is_new]}, []),
        (either, ["new.md", "old.md"]),
        (
            {"type": "and", "filters": [{"type": "or", "filters": [is_old, is_new]}, is_new]},
            ["new.md"],
        ),
        (None, every),
    ):
        assert await port.found(filters=filters) == found, filters
    (told,) = (await port.stores.search(port.id, query=QUESTION, filters=is_old)).data
    assert told.attributes == {"year": 1999.0, "town": "Kiel", "open": True}


async def test_attributes_are_changed_where_searches_look(rig: Rig) -> None:
    port = await Port.of(rig)
    file = await port.add("a.md", attributes={"year": 1, "town": "Kiel"})
    is_two = {"type": "eq", "key": "year", "value": 2}
    assert await port.found(filters=is_two) == []
    changed = await port.stores.files.update(file, vector_store_id=port.id, attributes={"year": 2})
    assert (changed.attributes, changed.status) == ({"year": 2.0}, "completed")
    assert await port.found(filters=is_two) == ["a.md"]
    assert await port.found(filters={**is_two, "key": "town", "value": "Kiel"}) == []
    await port.stores.files.update(file, vector_store_id=port.id, attributes=None)
    assert await port.found(filters=is_two) == []


async def test_attributes_that_change_while_a_file_is_indexed_are_found(rig: Rig) -> None:
    port = await Port.of(rig)
    rig.retrieval.hold_index.clear()
    file = await port.file("a.md")
    await port.stores.files.create(port.id, file_id=file, attributes={"n": 1})
    await until(lambda: rig.retrieval.servicer.calls == 1, 10)
    await port.stores.files.update(file, vector_store_id=port.id, attributes={"n": 2})
    rig.retrieval.hold_index.set()
    done = await port.stores.files.poll(file, vector_store_id=port.id)
    assert (done.status, done.attributes) == ("completed", {"n": 2.0})
    assert await port.found(filters={"type": "eq", "key": "n", "value": 2}) == ["a.md"]


@pytest.mark.parametrize(
    ("attributes", "param"),
    [
        ({str(n): n for n in range(17)}, "attributes"),
        ({"k": "x" * 513}, "attributes.k"),
        ({"k" * 65: 1}, "attributes." + "k" * 64),
        ({"": 1}, "attributes."),
        ({'a"b': 1}, 'attributes.a"b'),
        ({"k": [1]}, "attributes.k"),
        ({"k": None}, "attributes.k"),
        ({"k": 2**53 + 2}, "attributes.k"),
        ("x", "attributes"),
    ],
)
async def test_bad_attributes_are_named(rig: Rig, attributes: Any, param: str) -> None:
    port = await Port.of(rig)
    file = await port.add("a.md")
    ways = (
        ("files", {"file_id": file}),
        (f"files/{file}", {}),
        ("file_batches", {"file_ids": [file]}),
    )
    http = await rig.http()
    for path, body in ways:
        whole = f"/v1/vector_stores/{port.id}/{path}"
        answer = await http.post(whole, json={**body, "attributes": attributes})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), path
    batch = {"files": [{"file_id": file, "attributes": attributes}]}
    answer = await http.post(f"/v1/vector_stores/{port.id}/file_batches", json=batch)
    assert answer.json()["error"]["param"] == f"files[0].{param}"


DEEP: dict[str, Any] = {"type": "eq", "key": "k", "value": 1}
for _ in range(8):
    DEEP = {"type": "and", "filters": [DEEP]}


@pytest.mark.parametrize(
    ("filters", "param"),
    [
        ({"type": "like", "key": "k", "value": 1}, "filters.type"),
        ({"type": "eq", "value": 1}, "filters.key"),
        ({"type": "eq", "key": "k"}, "filters.value"),
        ({"type": "eq", "key": "k", "value": [1]}, "filters.value"),
        ({"type": "in", "key": "k", "value": 1}, "filters.value"),
        ({"type": "in", "key": "k", "value": []}, "filters.value"),
        ({"type": "in", "key": "k", "value": [1] * 101}, "filters.value"),
        ({"type": "gt", "key": "k", "value": "a"}, "filters.value"),
        ({"type": "gt", "key": "k", "value": True}, "filters.value"),
        ({"type": "and", "key": "k", "filters": [DEEP]}, "filters"),
        ({"type": "and", "filters": []}, "filters.filters"),
        ({"type": "or", "filters": [{"type": "eq", "key": "k"}]}, "filters.filters[0].value"),
        ({"type": "eq", "key": "k", "value": 1, "filters": []}, "filters.filters"),
        ({"type": "eq", "key": "k", "value": 1, "odd": 1}, "filters.odd"),
        ({"type": "and", "filters": [{"type": "eq", "key": "k", "value": 1}] * 100}, "filters"),
        ({"type": "and", "filters": [DEEP]}, "filters"),
        ("x", "filters"),
    ],
)
async def test_bad_filters_are_named(rig: Rig, filters: Any, param: str) -> None:
    port = await Port.of(rig)
    search = port.stores.search(port.id, query="x", filters=filters)
    assert (await refusal(search))[:2] == (400, param)
    tool = {"type": "file_search", "vector_store_ids": [port.id], "filters": filters}
    asked: Any = {"model": MODEL, "input": QUESTION, "tools": [tool]}
    assert (await refusal(port.client.responses.create(**asked)))[:2] == (400, f"tools[0].{param}")
    assert rig.retrieval.servicer.searches == []


async def test_several_queries_find_each_passage_once(rig: Rig) -> None:
    port = await Port.of(rig)
    await port.add("a.md")
    other = await port.file("b.md", "The bridge closes.")
    await port.stores.files.create_and_poll(other, vector_store_id=port.id)
    page = await port.stores.search(port.id, query=["harbour", "the opens.", "bridge quickly"])
    assert [(one.filename, one.score) for one in page.data] == [("a.md", 1.0), ("b.md", 0.5)]
    assert await port.found(["harbour", "bridge"], max_num_results=1) in (["a.md"], ["b.md"])
    assert (await refusal(port.stores.search(port.id, query=["x"] * 9)))[1] == "query"
