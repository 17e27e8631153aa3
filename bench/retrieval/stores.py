"""Vector stores of a running platform, over its public API."""

import asyncio
from collections.abc import Iterable
from typing import Any, NamedTuple

import aiohttp

_LOOK_S = 0.2


class Upload(NamedTuple):
    filename: str
    content: str | bytes


async def filled(http: aiohttp.ClientSession, uploads: Iterable[Upload]) -> str:
    """The id of a new store, whose files are indexed. Raises RuntimeError where one is not."""
    ids = []
    for one in uploads:
        form = aiohttp.FormData({"purpose": "assistants"}, quote_fields=False)
        form.add_field("file", one.content, filename=one.filename)
        ids.append((await post(http, "files", data=form))["id"])
    store = (await post(http, "vector_stores", json={"name": "bench", "file_ids": ids}))["id"]
    while True:
        async with http.get(f"vector_stores/{store}") as answer:
            counts = (await answer.json())["file_counts"]
        if counts["failed"]:
            raise RuntimeError(f"files were not indexed: {counts}")
        if counts["completed"] == len(ids):
            return str(store)
        await asyncio.sleep(_LOOK_S)


async def post(http: aiohttp.ClientSession, path: str, **sent: Any) -> Any:
    async with http.post(path, **sent) as answer:
        told = await answer.json()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {told}")
        return told
