"""Turns of suspects at a worker: one at a time, each for so many tokens."""

import asyncio

import pytest

from services.worker.turns import Turns


@pytest.mark.parametrize("portions", [[3], [1, 1, 1], [2, 2], [5, 1]])
async def test_a_turn_ends_with_its_last_token_however_they_come(portions: list[int]) -> None:
    turns, order = Turns(), list[str]()

    async def second() -> None:
        async with turns.take(3):
            order.append("second")

    async with turns.take(3) as gave:
        waiting = asyncio.create_task(second())
        await asyncio.sleep(0)
        async with turns.take(0):
            order.append("no suspect waits for none")
        for count in portions:
            assert len(order) == 1
            before, _ = waiting.done(), gave(count)
            assert not before
        await asyncio.wait_for(waiting, 5)
    async with asyncio.timeout(5), turns.take(1):  # once: it is not given back a second time
        assert turns._lock.locked()


async def test_a_turn_ends_with_its_request() -> None:
    turns = Turns()

    async def fail() -> None:
        async with asyncio.timeout(5), turns.take(3) as gave:
            gave(1)
            raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await fail()
    assert not turns._lock.locked()
