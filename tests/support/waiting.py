"""Waiting for a condition, instead of sleeping and hoping."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager


async def until(
    condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = 10.0, what: str = ""
) -> None:
    """Returns when `condition` holds; fails the test after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        held = condition()
        if isinstance(held, Awaitable):
            held = await held
        if held:
            return
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what or condition}"
        await asyncio.sleep(0.01)


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
