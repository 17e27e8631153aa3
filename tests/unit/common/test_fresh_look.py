"""Who asks sees what was true when it asked, and many who ask share one look."""

import asyncio
import time

import pytest

from services.common.fresh_look import FreshLook
from tests.support.waiting import until


class Looks:
    def __init__(self) -> None:
        self.began: list[float] = []
        self.ended = 0
        self.gate = asyncio.Event()

    async def __call__(self) -> None:
        self.began.append(time.monotonic())
        await self.gate.wait()
        self.ended += 1


async def test_who_comes_during_a_look_waits_for_the_next_with_all_others() -> None:
    looks = Looks()
    fresh = FreshLook(looks, 0.0)
    first = asyncio.create_task(fresh())
    await until(lambda: len(looks.began) == 1)
    others = [asyncio.create_task(fresh()) for _ in range(50)]
    await asyncio.sleep(0)
    looks.gate.set()
    await asyncio.gather(first, *others)
    assert len(looks.began) == looks.ended == 2
    await fresh()
    assert looks.ended == 3


async def test_looks_are_apart_and_those_that_wait_share_the_next() -> None:
    looks = Looks()
    looks.gate.set()
    fresh = FreshLook(looks, 0.2)
    for _ in range(3):
        await asyncio.gather(*(fresh() for _ in range(10)))
    assert len(looks.began) == 3
    assert all(b - a >= 0.2 for a, b in zip(looks.began, looks.began[1:], strict=False))


async def test_who_gives_up_waiting_ends_nobody_elses_look() -> None:
    looks = Looks()
    fresh = FreshLook(looks, 0.0)
    tasks = [asyncio.create_task(fresh()) for _ in range(2)]
    await until(lambda: len(looks.began) == 1)
    tasks[0].cancel()
    looks.gate.set()
    await tasks[1]
    assert looks.ended == 1


async def test_a_look_that_fails_fails_for_those_that_wait_and_the_next_is_another() -> None:
    told = [OSError("away")]

    async def look() -> None:
        if told:
            raise told.pop()

    fresh = FreshLook(look, 0.0)
    with pytest.raises(OSError, match="away"):
        await fresh()
    await fresh()


async def test_a_stop_ends_what_is_under_way() -> None:
    looks = Looks()
    fresh = FreshLook(looks, 0.0)
    await fresh.stop()
    waits = [asyncio.create_task(fresh())]
    await until(lambda: len(looks.began) == 1)
    waits.append(asyncio.create_task(fresh()))
    await asyncio.sleep(0)
    await fresh.stop()
    await asyncio.wait(waits, timeout=5)
    assert all(wait.cancelled() for wait in waits)
