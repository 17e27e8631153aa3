"""Places shared by tenants in turn."""

import asyncio

from services.common.fairness.turns import Turns


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


async def test_as_many_as_there_are_places_take_one_at_once():
    turns = Turns(2)
    for _ in range(2):
        assert turns.free
        await asyncio.wait_for(turns.take("a"), 1)
    assert not turns.free
    third = asyncio.create_task(turns.take("a"))
    await settle()
    assert not third.done()
    turns.give_back()
    await asyncio.wait_for(third, 1)
    assert not turns.free, "it went to the third"
    for _ in range(2):
        turns.give_back()
        assert turns.free


async def test_who_left_while_waiting_takes_no_place_and_no_turn():
    turns = Turns(1)
    await turns.take("a")
    gone = [asyncio.create_task(turns.take(tenant)) for tenant in ("a", "a", "b")]
    stays = asyncio.create_task(turns.take("a"))
    await settle()
    for one in gone:
        one.cancel()
    await settle()
    turns.give_back()
    await asyncio.wait_for(stays, 1)
    assert not turns.free
    turns.give_back()
    assert turns.free


async def test_who_left_costs_its_tenant_no_turn():
    """A client that gave up again and again made others of its tenant wait a round for each."""
    turns = Turns(1)
    await turns.take("x")
    gone = [asyncio.create_task(turns.take("a")) for _ in range(5)]
    order: list[str] = []

    async def work(tenant: str) -> None:
        await turns.take(tenant)
        order.append(tenant)
        turns.give_back()

    tasks = [asyncio.create_task(work(tenant)) for tenant in "abbbb"]
    await settle()
    for one in gone:
        one.cancel()
    await settle()
    turns.give_back()
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "b", "b", "b"]
