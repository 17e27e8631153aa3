"""Keep-alive: what a stream says at once, and that it begins once."""

import asyncio

from services.gateway.api.rest.keep_alive import KeepAlive


async def test_an_opening_is_said_at_once_and_once() -> None:
    said: list[str] = []
    opened = asyncio.Event()

    async def say() -> None:
        said.append("alive")

    async def opening() -> None:
        said.append("opening")
        opened.set()

    keeping = KeepAlive(3600, say)
    for _ in range(2):
        keeping.begin(opening)
    await asyncio.wait_for(opened.wait(), 10)
    assert said == ["opening"]
    keeping.close()
