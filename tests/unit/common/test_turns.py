"""Places shared by tenants in turn."""

import asyncio

from services.common.turns import Turns


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_places_go_round_the_tenants_and_to_the_longest_waiting_of_each():
    turns = Turns(1)
    await turns.take("a")
    order: list[str] = []

    async def work(tenant: str, name: str) -> None:
        await turns.take(tenant)
        order.append(name)
        turns.give_back()

    waiting = ("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"), ("b", "b2")
    tasks = [asyncio.create_task(work(*one)) for one in waiting]
    await settle()
    assert order == []
    turns.give_back()
    await asyncio.gather(*tasks)
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


async def test_no_place_is_lost_with_a_cancelled_one():
    turns = Turns(1)
    await turns.take("a")
    early, late = (asyncio.create_task(turns.take("b")) for _ in range(2))
    await settle()
    early.cancel()
    await settle()
    turns.give_back()  # passes over the one that left, to the next
    late.cancel()  # in the moment in which it got its place
    await asyncio.gather(early, late, return_exceptions=True)
    assert early.cancelled()
    assert late.cancelled()
    async with asyncio.timeout(1):
        await turns.take("c")
