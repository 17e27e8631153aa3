"""Waiting for a condition, instead of sleeping and hoping."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")
_A_TURN_S = 0.05
_AT_MOST = 6


async def until(
    condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = 10.0, what: str = ""
) -> None:
    """Returns when `condition` holds; fails the test after `timeout_s`. On a busy machine later, up
    to six times as late: what passes while this process has no turn counts little."""
    began = looked = time.monotonic()
    had_s = 0.0
    while True:
        held = condition()
        if isinstance(held, Awaitable):
            held = await held
        if held:
            return
        await asyncio.sleep(0.01)
        now = time.monotonic()
        had_s, looked = had_s + min(now - looked, _A_TURN_S), now
        over = had_s >= timeout_s or now - began >= _AT_MOST * timeout_s
        assert not over, f"not within {timeout_s} s: {what or condition}"


def until_so(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """`until` for a test that has no loop."""
    asyncio.run(until(condition, timeout_s))


async def within(timeout_s: float, awaited: Awaitable[T]) -> T:
    """What it gives; fails the test after `timeout_s`, counted as `until` does."""
    task = asyncio.ensure_future(awaited)
    try:
        await until(task.done, timeout_s, str(awaited))
        return await task
    finally:
        task.cancel()


@asynccontextmanager
async def leaving_no_task() -> AsyncIterator[None]:
    """Fails when tasks that began within it run on behind it: what is stopped, stops whole."""
    before = asyncio.all_tasks()
    yield
    deadline = time.monotonic() + 10
    own = {asyncio.current_task()}  # a fixture's end has another one than its beginning
    while left := asyncio.all_tasks() - before - own:
        assert time.monotonic() < deadline, f"still running: {sorted(map(str, left))}"
        await asyncio.sleep(0.01)
