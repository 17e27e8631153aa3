"""Files in vector stores: how they are cut, what is told of them, and batches of them."""

from typing import Any

import openai
import pytest

from services.common.errors import invalid
from tests.support.gateway_rig import Rig
from tests.support.ports import Port, refusal
from tests.support.waiting import until


async def test_how_a_file_is_cut(rig: Rig) -> None:
    port = await Port.of(rig)
    file = await port.file("a.md")
    rig.gateway.retrieval.max_chunk_tokens = lambda model="": 254

    def static(size: int, overlap: int) -> dict[str, Any]:
        told = {"max_chunk_size_tokens": size, "chunk_overlap_tokens": overlap}
        return {"chunking_strategy": {"type": "static", "static": told}}

    at = "chunking_strategy.static."
    for size, overlap, param in (
        (99, 0, "max_chunk_size_tokens"),
        (4097, 0, "max_chunk_size_tokens"),
        (800, 400, "max_chunk_size_tokens"),
        (255, 0, "max_chunk_size_tokens"),
        (200, 101, "chunk_overlap_tokens"),
        (200, -1, "chunk_overlap_tokens"),
    ):
        create = port.stores.files.create(port.id, file_id=file, **static(size, overlap))
        assert (await refusal(create))[:2] == (400, at + param)
    with pytest.raises(openai.BadRequestError, match="at most 254: the embedding model"):
        await port.stores.create(file_ids=[file], **static(800, 400))
    told = await port.stores.files.create_and_poll(
        file, vector_store_id=port.id, **static(254, 127)
    )
    assert told.chunking_strategy.type == "static"
    assert told.chunking_strategy.static.max_chunk_size_tokens == 254
    auto: Any = {"type": "auto"}
    again = await port.stores.files.create(port.id, file_id=file, chunking_strategy=auto)
    assert again.chunking_strategy.type == "other"


async def test_how_no_file_is_cut_is_not_taken_silently(rig: Rig) -> None:
    """It would be forgotten: files that are attached later are cut as their calls say."""
    size = {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 0}
    static: Any = {"type": "static", "static": size}
    port = await Port.of(rig)
    for more in ({}, {"file_ids": []}):
        with pytest.raises(openai.BadRequestError, match="goes with 'file_ids'") as refused:
            await port.stores.create(name="a", chunking_strategy=static, **more)
        assert refused.value.param == "chunking_strategy"
    made = await port.stores.create(name="a", chunking_strategy={"type": "auto"})
    assert made.file_counts.total == 0


async def test_what_a_file_in_a_store_says(rig: Rig) -> None:
    port = await Port.of(rig)
    file = await port.add("a.md")
    page = await port.stores.files.content(file, vector_store_id=port.id)
    assert [(part.type, part.text) for part in page.data] == [("text", "The harbour opens.")]
    other = await port.file("b.md")
    content = port.stores.files.content(other, vector_store_id=port.id)
    assert (await refusal(content))[0] == 404, "it is not in this store"
    asked = rig.retrieval.servicer.calls
    await port.client.files.content(file)
    assert rig.retrieval.servicer.calls == asked, "its bytes are the gateway's own to tell"
    rig.retrieval.failure = invalid(
        "a scanned PDF", "file", reason="invalid_file", stage="retrieval"
    )
    content = port.stores.files.content(file, vector_store_id=port.id)
    assert await refusal(content) == (400, "file_id", "invalid_file")


async def test_a_batch_of_files(rig: Rig) -> None:
    port = await Port.of(rig)
    files = [await port.file(f"{n}.md") for n in range(3)]
    done = await port.stores.file_batches.create_and_poll(
        port.id, file_ids=[*files, files[0]], attributes={"of": "all"}
    )
    assert (done.status, done.object) == ("completed", "vector_store.files_batch")
    assert (done.file_counts.completed, done.file_counts.total) == (3, 3)
    listed = port.stores.file_batches.list_files(done.id, vector_store_id=port.id)
    told = [(one.id, one.attributes) async for one in listed]
    assert told == [(file, {"of": "all"}) for file in reversed(files)]
    each: Any = [{"file_id": files[0], "attributes": {"n": 0}}, {"file_id": files[1]}]
    again = await port.stores.file_batches.create_and_poll(port.id, files=each)
    assert (again.file_counts.completed, again.file_counts.total) == (2, 2)
    listed = port.stores.file_batches.list_files(done.id, vector_store_id=port.id)
    assert [one.id async for one in listed] == files[2:], "the others are there by another"
    told_again = await port.stores.file_batches.retrieve(done.id, vector_store_id=port.id)
    assert told_again.file_counts.completed == 3, "what became of them"
    assert (await port.stores.retrieve(port.id)).file_counts.total == 3


async def test_a_batch_that_is_cancelled_keeps_what_has_arrived(rig: Rig) -> None:
    port = await Port.of(rig)
    first = await port.add("first.md")
    rig.retrieval.hold_index.clear()
    files = [await port.file(f"{n}.md") for n in range(4)]
    batch = await port.stores.file_batches.create(port.id, file_ids=files)
    assert (batch.status, batch.file_counts.in_progress) == ("in_progress", 4)
    await until(lambda: rig.retrieval.servicer.calls == 3, 10)
    told = await port.stores.file_batches.cancel(batch.id, vector_store_id=port.id)
    assert (told.status, told.file_counts.cancelled) == ("cancelled", 4)
    rig.retrieval.hold_index.set()
    documents = rig.retrieval.servicer.documents

    async def over() -> bool:
        waiting = await rig.gateway.jobs.queues.counts("index")
        return waiting == (0, 0) and [file for _, _, file in documents] == [first]

    await until(over, 10, "what was on its way is found nowhere")
    cancelled = port.stores.files.list(port.id, filter="cancelled")
    assert {one.id async for one in cancelled} == set(files)
    await port.stores.file_batches.cancel(batch.id, vector_store_id=port.id)


async def test_bad_batches_are_named(rig: Rig) -> None:
    port = await Port.of(rig)
    file, gone = await port.file("a.md"), "file-" + "0" * 30
    http, path = await rig.http(), f"/v1/vector_stores/{port.id}/file_batches"
    for body, status, param in (
        ({}, 400, "file_ids"),
        ({"file_ids": []}, 400, "file_ids"),
        ({"file_ids": [file] * 2001}, 400, "file_ids"),
        ({"file_ids": [file, gone]}, 404, "file_ids[1]"),
        ({"files": [{"file_id": file}, {"file_id": gone}]}, 404, "files[1].file_id"),
        ({"files": [{"file_id": file}] * 2}, 400, "files[1].file_id"),
        ({"files": [{"file_id": file}], "file_ids": [file]}, 400, "files"),
        ({"files": [{"file_id": file}], "attributes": {"a": 1}}, 400, "attributes"),
        ({"files": [{"file_id": file, "odd": 1}]}, 400, "files[0].odd"),
    ):
        answer = await http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), body
    assert (await port.stores.retrieve(port.id)).file_counts.total == 0
    missing = port.stores.file_batches.retrieve("vsfb_" + "0" * 30, vector_store_id=port.id)
    assert (await refusal(missing))[0] == 404
