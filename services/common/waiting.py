"""Waiting for one of several things."""

import asyncio
from typing import Any


async def first_done(*futures: "asyncio.Future[Any]") -> None:
    """Returns when at least one is done; raises nothing of theirs and cancels none."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
