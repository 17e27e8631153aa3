"""Who is convicted when engines die, and what is refused afterwards."""

from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from protos import common_pb2, router_pb2, worker_pb2
from services.common.errors import PenstockError
from services.common.packed_ids import pack
from services.router import metrics, quarantine
from services.router.answer import Answer
from services.router.quarantine import (
    ENGINE_DEATHS,
    KILLED,
    MAX_REFUSED,
    PROOF_TOKENS,
    REFUSED_S,
    Case,
    Quarantine,
    fingerprint,
)


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.freed = 0
        self.quarantine = Quarantine(self._on_free, lambda: self.now)

    def _on_free(self) -> None:
        self.freed += 1

    def case(self, *prompt: int) -> Case:
        return self.quarantine.case(request(*prompt))


def request(
    *prompt: int, tenant: str = "t", model: str = "m", **sampling: Any
) -> router_pb2.GenerateRequest:
    return router_pb2.GenerateRequest(
        caller=common_pb2.Caller(request_id="r", tenant=tenant, priority=2, weight=1),
        model=model,
        prompt_token_ids=pack(prompt),
        sampling=common_pb2.Sampling(**{"max_tokens": 9, **sampling}),
    )


def worker(id: str) -> Any:
    return SimpleNamespace(id=id)


def answer() -> Answer:
    call: Any = SimpleNamespace(send=lambda payload: None)
    return Answer(request(1), call)


def give(answer: Answer, count: int) -> None:
    for _ in range(count):
        delta = worker_pb2.TokenDelta(token_ids=[1])
        answer.take(delta, delta.SerializeToString())


def suspect(world: World, *prompt: int) -> Case:
    case = world.case(*prompt)
    with case.trial(worker("first"), answer()):
        case.lost("engine_died")
    return case


async def test_engines_killed_from_outside_convict_with_the_third() -> None:
    world = World()
    case, given = world.case(1), answer()
    for name in ("a", "b"):
        with case.trial(worker(name), given):
            case.lost("engine_killed")
    with case.trial(worker("c"), given):
        give(given, PROOF_TOKENS)
        case.lost("engine_killed")  # acquitted before: it is the first again
    with case.trial(worker("d"), given):
        case.lost("engine_killed")
    with pytest.raises(PenstockError, match="ended 3 engines"), case.trial(worker("e"), given):
        case.lost("engine_killed")
    with pytest.raises(PenstockError, match="A request like this one"):
        world.case(1).raise_if_refused()


async def test_an_engine_that_ends_itself_convicts_whatever_killed_another() -> None:
    world = World()
    case = suspect(world, 1)
    with case.trial(worker("b"), answer()):
        case.lost("engine_killed")
    with pytest.raises(PenstockError, match="ended 3 engines"), case.trial(worker("c"), answer()):
        case.lost("engine_died")


async def test_the_second_engine_convicts() -> None:
    world = World()
    case = suspect(world, 1)
    with (
        pytest.raises(PenstockError, match="ended 2 engines") as told,
        case.trial(worker("b"), answer()),
    ):
        case.lost("engine_died")
    assert (told.value.stage, told.value.reason) == ("worker", "request_quarantined")
    with pytest.raises(PenstockError, match="A request like this one"):
        world.case(1).raise_if_refused()
    world.case(2).raise_if_refused()
    world.now += REFUSED_S
    world.case(1).raise_if_refused()


@pytest.mark.parametrize(
    "cause", ["peer_lost", "draining", "kv_transfer", "too_many_requests", "engine_gone"]
)
async def test_other_losses_are_nobodys_fault(cause: str) -> None:
    case = World().case(1)
    for _ in range(5):
        with case.trial(worker("a"), answer()):
            case.lost(cause)
    assert not case.suspected


async def test_a_suspect_is_alone_until_it_has_proved_itself() -> None:
    world = World()
    one, other, innocent = suspect(world, 1), suspect(world, 2), world.case(3)
    b, c, given = worker("b"), worker("c"), answer()
    with one.trial(b, given):
        assert not other.may_run_on(b)
        assert other.may_run_on(c)
        assert innocent.may_run_on(b)
        give(given, PROOF_TOKENS - 1)
        assert not other.may_run_on(b)
        freed = world.freed
        give(given, 1)
        assert other.may_run_on(b)
        assert world.freed == freed + 1
        one.lost("engine_died")  # much later: it starts from nothing again
    assert one.deaths == 1


async def test_a_suspect_that_ends_makes_room() -> None:
    world = World()
    one, other = suspect(world, 1), suspect(world, 2)
    with one.trial(worker("b"), answer()):
        pass
    assert other.may_run_on(worker("b"))


async def test_suspects_that_had_to_share_a_worker_are_not_convicted() -> None:
    world = World()
    one, other = suspect(world, 1), suspect(world, 2)
    with (
        one.trial(worker("b"), answer()) as alone,
        other.trial(worker("b"), answer()) as in_company,
    ):
        assert (alone, in_company) == (PROOF_TOKENS, 0)
        one.lost("engine_died")
        other.lost("engine_died")
    with pytest.raises(PenstockError), one.trial(worker("c"), answer()):
        one.lost("engine_died")


def test_the_table_is_bounded() -> None:
    world = World()
    prints = [number.to_bytes(4) for number in range(MAX_REFUSED + 10)]
    for one in prints:
        world.quarantine._convict(one)
    assert [world.quarantine.refuses(one) for one in prints].count(True) == MAX_REFUSED
    assert not world.quarantine.refuses(prints[0])


def test_fingerprints() -> None:
    same = [fingerprint(request(1, 2, seed=seed, max_tokens=9)) for seed in (1, 2)]
    assert same[0] == same[1]
    others = [
        request(1, 2, 3),
        request(1, 2, tenant="other"),
        request(1, 2, temperature=0.5),
        request(1, 2, stop_token_ids=[3]),
    ]
    pooled = request(1, 2)
    pooled.pooling.kind = common_pb2.Pooling.MEAN
    others.append(pooled)
    assert len({*same, *map(fingerprint, others)}) == len(others) + 1


@pytest.mark.parametrize("cause", ENGINE_DEATHS)
async def test_what_a_conviction_tells(cause: str) -> None:
    world = World()
    case = world.case(1)
    with case.trial(worker("a"), answer()):
        case.lost(cause)
    counted = {
        why: metrics.quarantined.labels(why)._value.get() for why in ("convicted", "refused")
    }
    if cause == KILLED:
        case.lost(cause)
    with pytest.raises(PenstockError) as told:
        case.lost(cause)
    world.now += REFUSED_S - 1
    with pytest.raises(PenstockError) as again:
        world.case(1).raise_if_refused()
    for error in (told.value, again.value):
        assert error.code is grpc.StatusCode.FAILED_PRECONDITION
        assert (error.stage, error.reason) == ("worker", "request_quarantined")
        assert error.message.endswith("is not run again for 10 minutes")
    for why, before in counted.items():
        assert metrics.quarantined.labels(why)._value.get() == before + 1


async def test_proof_is_what_comes_after_the_death() -> None:
    """Not the tokens that the request had before."""
    world = World()
    case, given = suspect(world, 1), answer()
    give(given, 50)
    with case.trial(worker("b"), given):
        give(given, PROOF_TOKENS - 1)
        assert case.suspected
        give(given, 1)
        assert not case.suspected


async def test_who_waits_for_a_free_worker_hears_of_it_once() -> None:
    world = World()
    one, given, b = suspect(world, 1), answer(), worker("b")
    with world.case(2).trial(b, answer()):
        assert world.quarantine.free(b), "the innocent are in nobody's way"
    assert world.freed == 0
    with one.trial(b, given):
        assert world.freed == 0
        assert not world.quarantine.free(b)
        give(given, PROOF_TOKENS)
        assert world.quarantine.free(b)
    assert world.freed == 1


async def test_a_worker_is_free_when_the_last_of_its_suspects_has_left() -> None:
    world = World()
    one, other, b = suspect(world, 1), suspect(world, 2), worker("b")
    with one.trial(b, answer()):
        with other.trial(b, answer()):
            assert one.in_company
            assert other.in_company
        assert not world.quarantine.free(b)
    assert world.quarantine.free(b)


async def test_company_is_over_with_the_next_trial_and_all_deaths_are_told() -> None:
    world = World()
    one, other = suspect(world, 1), suspect(world, 2)
    with one.trial(worker("b"), answer()), other.trial(worker("b"), answer()):
        one.lost("engine_died")
    with (
        pytest.raises(PenstockError, match="This request ended 3 engines"),
        one.trial(worker("b"), answer()),
    ):
        one.lost("peer_stalled")


def test_who_is_convicted_again_is_not_forgotten_first() -> None:
    world = World()
    prints = [number.to_bytes(4) for number in range(MAX_REFUSED + 1)]
    for one in (*prints[:-1], prints[0], prints[-1]):
        world.quarantine._convict(one)
    assert world.quarantine.refuses(prints[0])
    assert not world.quarantine.refuses(prints[1])
    assert fingerprint(request(1)) != fingerprint(request(1, model="other"))


def test_a_prompt_is_told_apart_only_while_something_is_refused(monkeypatch) -> None:
    """It takes time that goes by its length, before anything else is done for the request."""
    world, told = World(), []
    monkeypatch.setattr(quarantine, "fingerprint", lambda one: told.append(one) or b"alike")
    world.case(1).raise_if_refused()
    assert not told
    poison = world.case(1)
    for _ in range(2):
        try:
            poison.lost("engine_died")
        except PenstockError:
            break
    with pytest.raises(PenstockError):
        world.case(1).raise_if_refused()
    assert len(told) == 2
