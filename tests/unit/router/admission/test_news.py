"""What the order is told and nobody waits for: gathered where there is room, at once where not."""

import asyncio
from typing import Any, cast

import pytest

from services.router.admission import news
from services.router.admission.news import Leaver, News
from tests.support.admission_ends import queued, ticket
from tests.support.waiting import until


class Wide:
    """A room that says what the test wants."""

    def __init__(self, wide: bool) -> None:
        self.wide = wide

    def is_wide(self, model: str) -> bool:
        return self.wide


async def due(gathered: News) -> float:
    """In how many seconds it leaves."""
    assert gathered._timer is not None
    return gathered._at - asyncio.get_running_loop().time()


async def test_what_leaves_waits_for_others_only_while_nobody_waits_for_its_slot(monkeypatch):
    monkeypatch.setattr(news, "GATHER_S", 1000.0)
    room = Wide(True)
    gathered = News(cast(Any, room), lambda: None)
    gathered.left("m", Leaver("a", 0.0))
    assert await due(gathered) > 900
    room.wide = False
    gathered.left("m", Leaver("b", 0.0))
    assert await due(gathered) <= 0, "and the first leaves with it"
    taken = gathered.take()
    assert [one.id for one in taken["m"].left] == ["a", "b"]
    assert not len(gathered)
    gathered.left("m", Leaver("c", 0.0))
    assert await due(gathered) <= 0


async def test_nothing_is_called_for_what_was_taken(monkeypatch):
    monkeypatch.setattr(news, "GATHER_S", 0.0)
    calls: list[int] = []
    gathered = News(cast(Any, Wide(True)), lambda: calls.append(len(gathered)))
    gathered.held(ticket())
    gathered.take()
    gathered.held(ticket())
    await until(lambda: bool(calls))
    assert calls == [1]


async def test_of_what_leaves_the_latest_wait_while_nobody_takes_it(monkeypatch):
    """All of it is told in one call, which Redis must bear."""
    monkeypatch.setattr(news, "_KEPT", 3)
    gathered = News(cast(Any, Wide(True)), lambda: None)
    for id in "abcd":
        gathered.left("m", Leaver(id, 0.0))
    gathered.left("n", Leaver("z", 0.0))
    assert len(gathered) == 4
    taken = gathered.take()["m"].left
    assert [one.id for one in taken] == ["b", "c", "d"]
    gathered.left("m", Leaver("e", 0.0))
    gathered.keep("m", taken)
    gathered.left("m", Leaver("f", 0.0))
    assert [one.id for one in gathered.take()["m"].left] == ["d", "e", "f"]


@pytest.fixture
def calls(monkeypatch):
    """What this test's routers call, by operation."""
    made: list[tuple[Any, ...]] = []

    def watch(end):
        script = end._shared._script

        def called(keys, args):
            made.append((args[0], *args[8:]))
            return script(keys, args)

        end._shared._script = called
        return made

    return watch


async def test_chats_that_come_and_go_in_one_moment_are_one_call(routers, calls, monkeypatch):
    monkeypatch.setattr(news, "GATHER_S", 1000.0)
    routers.capacity = 100
    end = await routers.add()
    await queued(end, 0, 0)
    made = calls(end)
    claims = [ticket(cost=8) for _ in range(10)]
    for claim in claims:
        await end.admit(claim)
    for claim in claims[:6]:
        end.leave(claim)
    assert not made
    assert await end.status(["m"]) == (4, 0), "it is told before it is asked"
    assert [op for op, *_ in made] == ["tell", "status"]
    assert made[0][1] == 10
    for claim in claims[6:]:
        end.leave(claim)
    await queued(end, 0, 0)


async def test_who_enters_is_behind_what_was_left(routers, monkeypatch, calls):
    """A slot that is free, and not told of yet, is granted at once."""
    monkeypatch.setattr(news, "GATHER_S", 1000.0)
    routers.capacity = 4
    end = await routers.add()
    await queued(end, 0, 0)
    claims = [ticket() for _ in range(2)]
    for claim in claims:
        await end.admit(claim)
    made = calls(end)
    for claim in claims:
        end.leave(claim)
    routers.capacity = 1
    last = ticket()
    await end.admit(last)
    assert last.order == "redis"
    assert [op for op, *_ in made] == ["tell", "enter"]
    end.leave(last)


async def test_what_gathers_is_told_when_the_router_ends(routers, monkeypatch):
    monkeypatch.setattr(news, "GATHER_S", 1000.0)
    routers.capacity = 8
    end, other = await routers.add(), await routers.add()
    await queued(end, 0, 0)
    claim = ticket()
    await end.admit(claim)
    assert claim.order == "ahead"
    end.leave(claim)
    await end.stop()
    assert await other.status(["m"]) == (0, 0)
    assert not len(end._news)
