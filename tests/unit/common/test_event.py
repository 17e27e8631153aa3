"""services.common.event: asyncio's event, and as it does."""

import asyncio
import sys

import pytest

from services.common.event import Event


async def test_whoever_waits_goes_on_when_it_is_set() -> None:
    event = Event()
    waiting = [asyncio.create_task(event.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    assert not event.is_set()
    assert not any(one.done() for one in waiting)
    event.set()
    async with asyncio.timeout(5):
        assert await asyncio.gather(*waiting) == [True] * 3
        assert await event.wait()
    event.clear()
    assert not event.is_set()


async def test_who_waited_goes_on_though_it_was_cleared_at_once() -> None:
    """As with asyncio's: what has come is looked at, even if there is nothing more."""
    event = Event()
    waiting = asyncio.create_task(event.wait())
    await asyncio.sleep(0)
    event.set()
    event.clear()
    async with asyncio.timeout(5):
        assert await waiting


@pytest.mark.parametrize("is_set", [False, True])
async def test_who_was_cancelled_is_forgotten(is_set: bool) -> None:
    event = Event()
    gone, stays = (asyncio.create_task(event.wait()) for _ in range(2))
    await asyncio.sleep(0)
    if is_set:  # in the same turn
        event.set()
    gone.cancel()
    await asyncio.wait([gone])
    assert gone.cancelled()
    event.set()
    async with asyncio.timeout(5):
        assert await stays
    assert not event._waiting


def test_it_is_small() -> None:
    assert sys.getsizeof(Event()) < 100
