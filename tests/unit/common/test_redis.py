"""The Redis client."""

import asyncio

from services.common.redis import connect


async def test_a_cancel_is_never_swallowed(redis_url):
    client = connect(redis_url)
    await client.ping()
    for turn in range(160):
        task = asyncio.create_task(client.hvals("nothing"))
        for _ in range(turn % 8):
            await asyncio.sleep(0)
        reached = task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() == reached, f"cancelled at loop turn {turn % 8}"
    assert await client.ping()
    await client.aclose()
