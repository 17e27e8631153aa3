"""Uploads in parts by OpenAI's own client, whose answers are held to its types."""

import hashlib
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from services.common.embedded_redis import EmbeddedRedis
from tests.support.gateway_rig import Rig, gateway_rig

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "The harbour opens at six. Boats pay two coins a night.\n" * 40
ABOUT: Any = {"filename": "a.md", "purpose": "assistants", "mime_type": "text/markdown"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(redis_server: EmbeddedRedis) -> AsyncIterator[Rig]:
    async with gateway_rig(redis_server.url, f"test-{uuid.uuid4().hex[:8]}") as rig:
        yield rig


@pytest_asyncio.fixture(loop_scope="module")
async def client(rig: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    key, _ = await rig.keys.create(f"tenant-{uuid.uuid4().hex[:8]}")
    async with openai.AsyncOpenAI(
        base_url=f"{rig.url}/v1", api_key=key, max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


async def test_a_file_in_parts_is_a_file(client: openai.AsyncOpenAI) -> None:
    content = TEXT.encode()
    hour: Any = {"anchor": "created_at", "seconds": 3600}
    begun = await client.uploads.create(bytes=len(content), expires_after=hour, **ABOUT)
    assert (begun.status, begun.file, begun.bytes) == ("pending", None, len(content))
    assert begun.expires_at == begun.created_at + 3600
    second = await client.uploads.parts.create(begun.id, data=content[1000:])
    first = await client.uploads.parts.create(begun.id, data=content[:1000])
    assert (first.object, first.upload_id) == ("upload.part", begun.id)
    order = [first.id, second.id]
    md5 = hashlib.md5(content).hexdigest()
    done = await client.uploads.complete(begun.id, part_ids=order, md5=md5)
    assert done.status == "completed"
    assert done.file is not None
    assert (await client.files.content(done.file.id)).content == content
    listed = (await client.files.list()).data
    assert [(one.id, one.bytes) for one in listed] == [(done.file.id, len(content))]
    store = await client.vector_stores.create(name="s")
    attached = await client.vector_stores.files.create_and_poll(
        done.file.id, vector_store_id=store.id
    )
    assert attached.status == "completed"


async def test_the_clients_own_way_in_chunks(client: openai.AsyncOpenAI, tmp_path: Path) -> None:
    path = tmp_path / "b.md"
    path.write_text(TEXT)
    done = await client.uploads.upload_file_chunked(
        file=path, mime_type="text/markdown", purpose="user_data", part_size=700
    )
    assert done.file is not None
    assert (done.file.filename, done.file.bytes) == ("b.md", len(TEXT))
    assert (await client.files.content(done.file.id)).text == TEXT


async def test_one_that_is_cancelled_takes_nothing_more(client: openai.AsyncOpenAI) -> None:
    begun = await client.uploads.create(bytes=9, **ABOUT)
    await client.uploads.parts.create(begun.id, data=b"abc")
    assert (await client.uploads.cancel(begun.id)).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="was cancelled") as refused:
        await client.uploads.parts.create(begun.id, data=b"abc")
    assert (refused.value.code, refused.value.param) == ("upload_cancelled", "upload_id")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"filename": None}, "filename"),
        ({"filename": ""}, "filename"),
        ({"filename": "a\n[2] b.md"}, "filename"),
        ({"purpose": "vision"}, "purpose"),
        ({"bytes": 0}, "bytes"),
        ({"bytes": 2**40}, "bytes"),
        ({"mime_type": None}, "mime_type"),
        ({"expires_after": {"anchor": "created_at", "seconds": 1}}, "expires_after.seconds"),
        ({"odd": 1}, "odd"),
    ],
)
async def test_what_is_wrong_is_named(
    client: openai.AsyncOpenAI, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.post("/uploads", cast_to=object, body={**ABOUT, "bytes": 9, **body})
    assert refused.value.param == param


async def test_what_is_wrong_with_a_part_is_named(client: openai.AsyncOpenAI, rig: Rig) -> None:
    begun = await client.uploads.create(bytes=9, **ABOUT)
    http = await rig.http(client.api_key)
    at = f"/v1/uploads/{begun.id}"
    for form, param in (
        ({"files": {"data": ("a", b"x" * 10)}}, "data"),
        ({"files": {"data": ("a", b"")}}, "data"),
        ({"files": {"file": ("a", b"x")}}, "file"),
        ({"files": {"data": ("a", b"x")}, "data": {"odd": "1"}}, "odd"),
    ):
        answer = await http.post(f"{at}/parts", **form)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), form
    for body, param in (
        ({}, "part_ids"),
        ({"part_ids": []}, "part_ids"),
        ({"part_ids": ["part_x"]}, "part_ids[0]"),
        ({"part_ids": ["part_x"], "md5": "x"}, "md5"),
    ):
        answer = await http.post(f"{at}/complete", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) in (
            (400, param),
            (404, param),
        )
    with pytest.raises(openai.NotFoundError):
        await client.uploads.cancel("upload_" + "0" * 30)
