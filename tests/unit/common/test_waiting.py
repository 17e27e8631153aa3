"""services.common.waiting."""

import asyncio
from typing import Any

from services.common.waiting import first_done


async def test_the_first_of_several_is_enough_and_no_other_is_touched() -> None:
    one, two = (asyncio.get_running_loop().create_future() for _ in range(2))
    waiting = asyncio.create_task(first_done(one, two))
    await asyncio.sleep(0)
    assert not waiting.done()
    two.set_exception(RuntimeError())
    async with asyncio.timeout(5):
        await waiting  # raises nothing of theirs
    assert isinstance(two.exception(), RuntimeError)
    assert not one.done()
    one.set_result(None)


async def test_what_is_done_is_not_waited_for() -> None:
    pending: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    done.cancel()
    waited = first_done(pending, done)
    try:
        waited.send(None)
    except StopIteration:
        return
    raise AssertionError("it waited")


async def test_who_is_cancelled_cancels_nothing_and_leaves_nothing() -> None:
    pending: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(first_done(pending))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert not pending.cancelled()
    assert not pending._callbacks
