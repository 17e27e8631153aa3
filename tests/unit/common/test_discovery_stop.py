"""Leaving the registry ends, whatever the Redis client makes of a cancel."""

import asyncio
from typing import Any

import pytest

from services.common.discovery import Directory, Registration, Replica
from services.common.redis import connect

REPLICA = Replica("worker", "worker-1", "127.0.0.1:1", "host", 1)


@pytest.mark.parametrize("kind", ["registration", "directory"])
async def test_stop_ends_when_a_call_swallows_the_cancel(
    redis_url: str, namespace: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As asyncio.wait_for does on Python 3.11 when it succeeds in the same moment."""
    redis = connect(redis_url)
    watched: Any = (
        Registration(redis, namespace, REPLICA, 0.3)
        if kind == "registration"
        else Directory(redis, namespace, "worker", 0.3)
    )
    await watched.start()
    calling, cancelled = asyncio.Event(), asyncio.Event()

    async def swallows(*_: object) -> list[str]:
        calling.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
        return []

    monkeypatch.setattr(watched, "_renew" if kind == "registration" else "_list", swallows)
    async with asyncio.timeout(10):
        await calling.wait()
        await watched.stop()
    assert cancelled.is_set()
    await redis.aclose()
