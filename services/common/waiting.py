"""Waiting for one of several things."""

import asyncio
from typing import Any


async def first_done(*futures: "asyncio.Future[Any]") -> None:
    """Returns when at least one is done; raises nothing of theirs and cancels none."""
    if any(future.done() for future in futures):
        return
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(_: "asyncio.Future[Any]") -> None:
        if not waiter.done():
            waiter.set_result(None)

    for future in futures:
        future.add_done_callback(wake)
    try:
        await waiter
    finally:
        for future in futures:
            future.remove_done_callback(wake)
