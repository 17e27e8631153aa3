"""Limits per minute and hour: whatever comes back, no window ever holds more than it may."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.gateway.metering.run import Used
from tests.support.plain_meter import PlainMeter
from tests.unit.gateway.metering.test_meter_function import (
    BEGIN_S,
    LEASE_S,
    Both,
    Lua,
    lua,
    rule,
    run_of,
)

__all__ = ["lua"]
MOST = 12
TPM = rule("tpm", "tokens", MOST, "minute")
RATE = MOST / 60
WHICH = st.integers(0, 30)
OPS = st.one_of(
    st.tuples(st.just("reserve"), st.integers(1, MOST)),
    st.tuples(st.just("reserve"), st.integers(1, MOST)),
    st.tuples(st.just("settle"), WHICH, st.integers(0, MOST)),
    st.tuples(st.just("release"), WHICH),
    st.tuples(st.just("hold"), WHICH, st.integers(0, MOST)),
    st.tuples(st.just("time"), st.sampled_from([0.0, 0.7, 5.0, 5.0, 20.0, LEASE_S, 61.0])),
    st.tuples(st.just("sweep")),
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(ops=st.lists(OPS, min_size=5, max_size=40))
def test_no_window_holds_more_than_the_limit_and_one_burst(redis_url, ops):
    """By what each request had in the end, at the time of its door; and both models agree."""
    lua = Lua(redis_url)
    both = Both(lua)
    doors: dict[str, float] = {}
    held: dict[str, int] = {}
    try:
        for op, *args in ops:
            known = [run for run in both.runs if run.id in both.plain.standing]
            if op == "reserve":
                if both.reserve([TPM], args[0], 0, 1):
                    id = both.runs[-1].id
                    doors[id], held[id] = both.now, args[0]
            elif op == "time":
                both.pass_time(*args)
            elif op == "sweep":
                assert lua.sweep() == both.plain.sweep(100)
            elif known:
                run = known[args[0] % len(known)]
                if op == "release":
                    both.release(run, 1)
                else:
                    both.ask(op, run, Used(prompt=min(args[1], held[run.id])), 1)
            _check(both, doors, held)
    finally:
        lua.close()


def _check(both: Both, doors: dict[str, float], held: dict[str, int]) -> None:
    def amount(id: str) -> int:
        if id in both.plain.standing:
            return held[id]
        return both.plain.charged.get(id, {"prompt": 0})["prompt"]

    admitted = [(at, amount(id)) for id, at in doors.items()]
    for number, (begin, _) in enumerate(admitted):
        sum_ = 0
        for at, some in admitted[number:]:
            sum_ += some
            assert sum_ <= MOST + (at - begin) * RATE + 1e-3


def test_what_has_leaked_does_not_come_back(lua):
    """Nine old ones, all given up at once, made room for nine more and the nine that had leaked."""
    ten = rule("rpm", "requests", 10, "minute")
    old = [run_of(f"old{n}", [ten]) for n in range(9)]
    assert [lua.reserve(run)[0] for run in old] == [0] * 9
    lua.at(BEGIN_S + 48)  # in which eight have leaked
    for run in old:
        lua.release(run)
    let_in = [lua.reserve(run_of(f"new{n}", [ten]))[0] == 0 for n in range(20)]
    assert sum(let_in) == 10


def test_in_a_bucket_that_is_never_empty_all_of_it_comes_back(lua):
    """However long a request takes: else a limit would count what nobody used."""
    tpm = rule("tpm", "tokens", 6000, "minute")  # 100 a second
    lua.reserve(run_of("base", [tpm], tokens=5000))
    long = run_of("long", [tpm], tokens=600)
    assert lua.reserve(long)[0] == 0
    for second in range(1, 40):
        lua.at(BEGIN_S + second)
        assert lua.reserve(run_of(f"r{second}", [tpm], tokens=100))[0] == 0
    _, _, (before,) = lua.reserve(run_of("r40", [tpm], tokens=0))
    long.used, long.status = Used(prompt=100), "ok"
    lua.settle(long)
    _, _, (after,) = lua.reserve(run_of("r41", [tpm], tokens=0))
    assert after - before == pytest.approx(500, abs=0.1)


def test_of_a_burst_of_many_nearly_all_comes_back_and_never_more(lua):
    """More than a bucket has pairs for: some of them then give back less than they might."""
    tpm = rule("tpm", "tokens", 100_000, "minute")
    plain, chance, runs = PlainMeter(LEASE_S), random.Random(7), []
    now = BEGIN_S
    for number in range(400):
        now = plain.now = now + chance.choice([0.001, 0.1, 0.2])
        lua.at(now)
        runs.append(run_of(f"r{number}", [tpm], tokens=chance.choice([100, 300, 500])))
        assert lua.reserve(runs[-1])[0] == plain.reserve(runs[-1].id, runs[-1].told())[0]
        lua.hold(runs[-1])
        plain.hold(runs[-1].id, runs[-1].told())  # whether there was room or not
    assert lua.redis.strlen(f"{lua.root}:b:{runs[0].told()['rules'][0]['key']}") < 2500
    for run in chance.sample(runs, 399):
        lua.release(run)
        plain.release(run.id, run.attempt)
        left = lua.reserve(run_of("none", [tpm], tokens=0))[2][0]
        exact = plain.look(run.told()["rules"][0], 0)[0]
        assert exact - 4000 < left <= exact + 0.1
