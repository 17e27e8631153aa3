"""What several choices leave behind."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from services.common.event import Event
from services.common.link import End
from services.tokenizer.answers import choices
from services.tokenizer.answers.choices import generate_all


async def test_who_is_cancelled_before_the_first_has_begun_leaves_no_task_behind() -> None:
    before, asked = asyncio.all_tasks(), asyncio.Event()

    class Routers:
        async def pick_least_loaded(self, patience_s: float) -> None:
            asked.set()
            await asyncio.Event().wait()

    def output() -> Any:
        return SimpleNamespace(finish=0, token_ids=[], begun=Event())

    way: Any = SimpleNamespace(routers=Routers(), patience_s=1.0)
    running = asyncio.create_task(generate_all([b"one", b"two"], [output(), output()], way, 2))
    await asyncio.wait_for(asked.wait(), 5)
    running.cancel()
    await asyncio.wait([running])
    await asyncio.sleep(0)  # for what was cancelled with it to end
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("at_once", [1, 2, 4])
async def test_of_many_choices_so_many_are_asked_for_at_once_and_all_come(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """More would fill the router's queue by themselves, and be refused for ever."""
    running: set[bytes] = set()
    most = []

    async def generate(request: bytes, output: Any, way: Any) -> End:
        running.add(request)
        output.begun.set()
        for _ in range(5):
            most.append(len(running))
            await asyncio.sleep(0)
        running.remove(request)
        output.finish = 1
        return End()

    monkeypatch.setattr(choices, "generate", generate)
    outputs: Any = [SimpleNamespace(finish=0, begun=Event()) for _ in range(4)]
    await generate_all([b"%d" % n for n in range(4)], outputs, None, at_once)  # type: ignore[arg-type]
    assert all(output.finish for output in outputs)
    assert max(most) == at_once
