"""A tenant's share of files: a count and bytes, however many uploads come at once."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.common.config import GatewaySettings
from services.common.errors import PenstockError
from services.common.redis import connect
from services.gateway.files import Files


@pytest.fixture
async def files(redis_url: str, namespace: str) -> AsyncIterator[Files]:
    redis = connect(redis_url)
    limits = GatewaySettings(max_files=3, max_file_bytes_per_tenant=100)
    yield Files(redis, namespace, limits, max_chars=120)
    await redis.aclose()


async def uploads(files: Files, number: int, size: int, tenant: str = "acme") -> list[str]:
    """At the same time; returns why each was refused, or its id."""

    async def upload() -> str:
        try:
            return (await files.create(tenant, "a.txt", b"x" * size)).id
        except PenstockError as error:
            return error.reason

    return await asyncio.gather(*(upload() for _ in range(number)))


async def test_uploads_at_once_do_not_pass_the_count_together(files):
    outcomes = await uploads(files, 8, size=1)
    assert outcomes.count("too_many_files") == 5
    assert len(await files.all("acme")) == 3


async def test_uploads_at_once_do_not_pass_the_bytes_together(files):
    outcomes = await uploads(files, 8, size=40)
    assert outcomes.count("too_many_bytes_of_files") == 6
    assert "too_many_bytes_of_files" not in await uploads(files, 1, size=100, tenant="other")


async def test_deleting_gives_the_bytes_back_once(files):
    first, second = await uploads(files, 2, size=50)
    await asyncio.gather(*(files.delete("acme", first) for _ in range(3)))
    assert await uploads(files, 1, size=51) == ["too_many_bytes_of_files"]
    (third,) = await uploads(files, 1, size=50)
    assert await files.content("acme", third) == "x" * 50
    assert {file.id for file in await files.all("acme")} == {second, third}
