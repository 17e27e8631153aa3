"""Waiting for a condition, instead of sleeping and hoping."""

import asyncio
import time
from collections.abc import Awaitable, Callable


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
