"""What a request's record says of its way through the router."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from services.common.errors import PenstockError, unavailable
from services.router.admission import Ticket
from services.router.breaker import PROBE_S, Breaker
from services.router.journal import Journal
from services.router.leg import WorkerLostError


def ticket(**facts: Any) -> Ticket:
    made = Ticket("id", "m", "t", 1, 20.0, 2.0)
    for name, fact in facts.items():
        setattr(made, name, fact)
    return made


def last(journal: Journal) -> tuple[str, str, dict[str, str]]:
    told = journal.decisions[-1]
    return told.subject, told.choice, dict(told.reasons)


@pytest.mark.parametrize(
    ("state", "facts", "choice"),
    [
        ("granted", {}, "at once"),
        ("granted", {"queued": True}, "queued"),
        ("granted", {"resumed": True}, "went on"),
        ("waits", {"queued": True}, "refused"),  # its time is over, or its client went away
        ("refused", {"queued": True}, "refused"),
        ("cancelled", {"resumed": True}, "refused"),
    ],
)
async def test_how_a_request_was_admitted(state: str, facts: dict[str, Any], choice: str) -> None:
    one = ticket(before=3, order="local", **facts)
    if state == "granted":
        one.granted.set_result(None)
    elif state == "refused":
        one.granted.set_exception(unavailable("no", stage="router"))
        one.granted.exception()
    elif state == "cancelled":
        one.granted.cancel()
    journal = Journal()
    journal.admission(one)
    subject, told, reasons = last(journal)
    assert (subject, told) == ("admission", choice)
    waited_ms = float(reasons.pop("waited_ms"))
    assert 0 <= waited_ms < 60_000
    assert reasons == {
        "waiting_before": "3",
        "lane": "high",
        "cost_tokens": "20",
        "weight": "2",
        "order": "local",
    }


async def test_a_loss_is_told_of_the_last_worker() -> None:
    def loss(worker: str, error: PenstockError) -> WorkerLostError:
        one: Any = SimpleNamespace(id=worker)
        return WorkerLostError(one, error)

    lost = [
        loss("a", unavailable("gone", stage="worker", reason="peer_lost")),
        loss("b", unavailable("gone", stage="worker")),
    ]
    plan: Any = SimpleNamespace(name="p > d")
    answer: Any = SimpleNamespace(tokens=[1, 2, 3])
    journal = Journal()
    journal.failover(plan, lost, answer, SimpleNamespace(suspected=False, deaths=0))  # type: ignore[arg-type]
    expected = {"lost": "b", "cause": "unavailable", "tokens_so_far": "3", "number": "2"}
    assert last(journal) == ("failover", "p > d", expected)
    journal.failover(plan, lost, answer, SimpleNamespace(suspected=True, deaths=1))  # type: ignore[arg-type]
    assert last(journal)[2] == {**expected, "engines_ended": "1"}


async def test_breakers_are_told_when_one_is_not_closed() -> None:
    now = 0.0
    breakers = {id: Breaker(lambda: now) for id in ("closed", "open", "half-open")}
    workers: Any = [SimpleNamespace(id=id, breaker=breaker) for id, breaker in breakers.items()]
    journal = Journal()
    journal.breakers(workers)
    assert journal.decisions == []
    for id in ("open", "half-open"):
        breakers[id].began().lost()
    now = PROBE_S
    breakers["half-open"].began()
    journal.breakers(workers)
    reasons = {id: f"{id}, 1 of its last 1 requests failed" for id in ("open", "half-open")}
    assert last(journal) == ("breaker", "left alone", reasons)


async def test_a_recall_is_told_with_what_was_made() -> None:
    one = ticket(order="local")
    one.granted.set_result(None)
    one.wait_again(5.0)
    await asyncio.wait_for(one.recalled, 5)
    answer: Any = SimpleNamespace(tokens=[1])
    journal = Journal()
    journal.recall(one, answer)
    subject, choice, reasons = last(journal)
    assert (subject, choice) == ("recall", "its slot went to who was owed it")
    assert reasons == {"number": "1", "tokens_so_far": "1", "order": "local"}
