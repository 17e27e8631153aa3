"""A router's end of admission against a real Redis: who has which slots, and for how long."""

import asyncio
import contextlib

import grpc
import pytest

from services.common.errors import PenstockError
from services.router import metrics
from services.router.admission import Ticket
from services.router.admission.shared_order import Reply
from tests.support.admission_ends import queued, ticket
from tests.support.waiting import until, within


async def test_leases_outlive_their_time(make_routers, redis_url):
    routers = make_routers(redis_url, slot_lease_s=1.1)
    first, second = await routers.add(), await routers.add()
    a, b = ticket(), ticket()
    await first.admit(a)
    waiting = asyncio.create_task(second.admit(b))
    await queued(second, 1, 1)
    done, _ = await asyncio.wait([waiting], timeout=2.0)  # longer than a lease
    assert not done
    first.leave(a)
    await within(5, waiting)
    second.leave(b)


async def test_more_capacity_wakes_the_waiting(make_routers, redis_url, seldom):
    routers = make_routers(redis_url, **seldom)
    end = await routers.add()
    a, b = ticket(), ticket()
    await end.admit(a)
    waiting = asyncio.create_task(end.admit(b))
    await queued(end, 1, 1)
    routers.capacity = 2
    end.poke()
    await within(10, waiting)
    end.leave(a)
    end.leave(b)


async def test_many_routers_never_exceed_the_slots(routers):
    routers.capacity = 3
    ends = [await routers.add() for _ in range(3)]
    running = most = served = 0

    async def one(n: int) -> None:
        nonlocal running, most, served
        claim = ticket(f"t{n % 5}", 1 + n % 3, cost=1 + n % 7)
        end = ends[n % 3]
        try:
            await end.admit(claim)
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            served += 1
        finally:
            end.leave(claim)

    await asyncio.gather(*(one(n) for n in range(120)))
    assert served == 120
    assert most <= 3
    await queued(ends[0], 0, 0)


async def test_gauges_are_read_while_tickets_come_and_go(routers):
    """The metrics' thread reads them; here what another thread does happens between two looks."""
    end = await routers.add()

    class Moving(Ticket):
        @property
        def holds(self) -> bool:
            end._tickets.pop(self.id, None)
            return True

    for n in range(3):
        end._tickets[f"{n}"] = Moving(f"{n}", "m", "t", 2, 10, 1.0)
    assert [s.value for m in metrics.admitted.collect() for s in m.samples] == [3]


async def test_what_held_a_slot_at_a_lost_router_has_one_at_once(routers):
    """Also past the capacity, which the dead router's leases still fill, and past the waiting."""
    lost, end = await routers.add(), await routers.add()
    a, b = ticket(), ticket()
    await lost.admit(a)
    waiting = asyncio.create_task(end.admit(b))
    await queued(end, 1, 1)
    again = ticket(cost=0)
    again.resumed = True
    await within(5, end.admit(again))
    assert again.holds
    await queued(end, 2, 1)
    lost.leave(a)  # the slots are full without it
    await queued(end, 1, 1)
    assert not waiting.done()
    end.leave(again)
    await within(5, waiting)
    end.leave(b)
    await queued(end, 0, 0)


async def test_what_goes_on_pays_when_it_leaves(routers):
    end = await routers.add()
    a = ticket("long", cost=0)
    a.resumed = True
    a.progress = lambda: (500, 0)  # tokens that it made here
    await end.admit(a)
    await queued(end, 1, 0)
    tasks = {}
    for name in ("long", "calm"):
        claim = ticket(name)
        tasks[name] = asyncio.create_task(end.admit(claim))
        await queued(end, 1, len(tasks))
    end.leave(a)
    await within(5, tasks["calm"])
    assert not tasks["long"].done()
    tasks["long"].cancel()


async def test_without_workers_requests_wait_in_their_order(make_routers, redis_url, seldom):
    routers = make_routers(redis_url, **seldom)
    routers.capacity = 0
    end = await routers.add()
    claims = [ticket("t", lane) for lane in (3, 2, 1)]
    waiting = [asyncio.create_task(end.admit(claim)) for claim in claims]
    await queued(end, 0, 3)
    routers.capacity = 1
    end.poke()
    await within(10, waiting[2])
    assert not waiting[0].done()
    assert not waiting[1].done()
    end.leave(claims[2])
    await within(5, waiting[1])
    end.leave(claims[1])
    await within(5, waiting[0])


async def test_without_workers_the_patience_ends(make_routers, redis_url):
    """It begins when the last worker went or the request came, whichever was later."""
    routers = make_routers(redis_url, worker_patience_s=0.3)
    end = await routers.add()
    a, b = ticket(), ticket()
    await end.admit(a)
    waiting = asyncio.create_task(end.admit(b))
    await queued(end, 1, 1)
    done, _ = await asyncio.wait([waiting], timeout=0.4)
    assert not done  # there is a worker
    began = asyncio.get_running_loop().time()
    routers.capacity = 0
    end.poke()
    for claim, least_s in ((b, 0.29), (ticket(), 0.59)):
        with pytest.raises(PenstockError) as refused:
            await within(5, waiting if claim is b else end.admit(claim))
        assert refused.value.reason == "no_worker"
        assert refused.value.code is grpc.StatusCode.UNAVAILABLE
        assert asyncio.get_running_loop().time() - began >= least_s
        end.leave(claim)
    waiting = asyncio.create_task(end.admit(ticket()))
    await queued(end, 1, 1)
    routers.capacity = 2
    end.poke()
    await within(5, waiting)


async def test_models_have_slots_and_queues_of_their_own(make_routers, redis_url, seldom):
    """And a word to another router says which model it is of."""
    routers = make_routers(redis_url, queue_limit=1, **seldom)
    first, second = await routers.add(), await routers.add()
    await until(lambda: routers.listening(second))
    held = {model: ticket(model=model) for model in ("m", "a:b", "m}")}
    waiting = {}
    for model, one in held.items():
        await within(5, first.admit(one))  # whatever the others hold
        wait = ticket(model=model)
        waiting[model] = wait, asyncio.create_task(second.admit(wait))
        await queued(first, 1, 1, model)
    assert await first.status(held) == (3, 3)
    for model, one in held.items():
        wait, admitted = waiting.pop(model)
        first.leave(one)
        await within(5, admitted)
        assert not any(task.done() for _, task in waiting.values())
        second.leave(wait)
        await queued(first, 0, 0, model)


async def test_installs_in_one_redis_know_nothing_of_each_other(make_routers, redis_url, namespace):
    ends = [
        await make_routers(redis_url, namespace=f"{namespace}-{n}").add() for n in range(2)
    ]  # routers of the same name
    for end in ends:
        await within(5, end.admit(ticket()))
    assert [await end.status(["m"]) for end in ends] == [(1, 0)] * 2


async def test_a_word_that_none_waits_for_gives_the_slot_back(routers):
    """Its request left while the grant was under way, and its leaving came first."""
    end, other = await routers.add(), await routers.add()
    gone = ticket()
    entered = await end._shared.enter(gone, 9)
    assert entered.first == "granted"
    waiting = asyncio.create_task(other.admit(ticket()))
    await queued(other, 1, 1)
    end._follow("m", Reply(granted=[gone.id]))
    await within(5, waiting)


async def test_what_leaves_while_its_lease_is_renewed_ends_no_renewal(routers, monkeypatch):
    """Redis does not know it, and it is no more there to be entered or held again."""
    end = await routers.add()
    holds, waits = ticket(), ticket()
    await end.admit(holds)
    waiting = asyncio.create_task(end.admit(waits))
    await queued(end, 1, 1)
    renewed = asyncio.Event()

    async def renew(model: str, held: list[str], waiting: list[str]) -> Reply:
        assert (held, waiting) == ([holds.id], [waits.id])
        end.leave(holds)
        end.leave(waits)
        renewed.set()
        return Reply(first=held, second=waiting)

    monkeypatch.setattr(end._shared, "renew", renew)
    end.poke()
    await within(5, renewed.wait())
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await queued(end, 0, 0)
    end.check()


async def test_a_router_that_stops_gives_back_what_it_holds(routers):
    end, other = await routers.add(), await routers.add()
    await end.admit(ticket())
    waiting = asyncio.create_task(end.admit(ticket()))
    await queued(other, 1, 1)
    mine = asyncio.create_task(other.admit(ticket()))
    await queued(other, 1, 2)
    await end.stop()
    await within(5, mine)
    assert await other.status(["m"]) == (1, 0)
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    assert waiting.cancelled()


async def test_a_renewal_that_has_ended_is_no_health(routers):
    end = await routers.add()
    end.check()
    end._loops[0].cancel()
    await asyncio.wait(end._loops[:1])
    with pytest.raises(RuntimeError, match="admission renewal has ended"):
        end.check()


async def test_what_waits_for_a_model_that_was_removed_is_refused_at_once(make_routers, redis_url):
    """As soon as its last worker takes nothing any more; one that is served is waited for."""
    routers = make_routers(redis_url, worker_patience_s=3600)
    end = await routers.add()
    waiting = {}
    for model in ("m", "kept"):
        await end.admit(ticket(model=model))
        waiting[model] = asyncio.create_task(end.admit(ticket(model=model)))
        await queued(end, 1, 1, model)
    end.refuse_what_nobody_serves({"kept"})
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting.values())
    routers.capacity = 0
    end.refuse_what_nobody_serves({"kept"})
    with pytest.raises(PenstockError) as refused:
        await within(5, waiting["m"])
    told = refused.value
    assert (told.code, told.reason) == (grpc.StatusCode.NOT_FOUND, "model_not_found")
    await asyncio.sleep(0)
    assert not waiting["kept"].done()
    waiting["kept"].cancel()
