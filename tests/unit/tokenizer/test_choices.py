"""What several choices leave behind."""

import asyncio
from types import SimpleNamespace
from typing import Any

from services.common.event import Event
from services.tokenizer.choices import generate_all


async def test_who_is_cancelled_before_the_first_has_begun_leaves_no_task_behind() -> None:
    before, asked = asyncio.all_tasks(), asyncio.Event()

    class Routers:
        async def pick_least_loaded(self, patience_s: float) -> None:
            asked.set()
            await asyncio.Event().wait()

    def output() -> Any:
        return SimpleNamespace(finish=0, token_ids=[], begun=Event())

    way: Any = SimpleNamespace(routers=Routers(), patience_s=1.0)
    choices = asyncio.create_task(generate_all([b"one", b"two"], [output(), output()], way))
    await asyncio.wait_for(asked.wait(), 5)
    choices.cancel()
    await asyncio.wait([choices])
    await asyncio.sleep(0)  # for what was cancelled with it to end
    assert asyncio.all_tasks() == before
