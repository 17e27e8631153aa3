"""meter.lua against a plain ledger: never negative, never lost, idempotent."""

import copy
import json
import time
import uuid
from collections import Counter
from dataclasses import replace
from datetime import datetime

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from redis import Redis as BlockingRedis

from services.gateway.identity.limits import Bound, Limit
from services.gateway.metering.run import Held, Run, Used
from services.gateway.metering.shared_meter import SOURCE
from tests.support.plain_meter import PlainMeter, period_ends

LEASE_S = 50.0
MEMORY_S = 3600
BEGIN_S = 2_082_758_390.0  # ten seconds before a month's end, in a far year: nothing expires yet
# The clock is the test's, and no key expires by the server's own.
SCRIPT = SOURCE
for theirs, ours in (
    ("call('TIME')", "{call('GET', KEYS[1] .. '-s'), call('GET', KEYS[1] .. '-us')}"),
    ("'PX', whole(", "'PX', 3600000 + whole("),
    ("rule.at, whole(math.ceil(lease / 1e3))", "rule.at, 3600000"),
):
    assert SCRIPT.count(theirs) == 1, theirs
    SCRIPT = SCRIPT.replace(theirs, ours)

FIELDS = ("prompt", "cached", "output", "cost")


def rule(name: str, of: str, most: float, per: str | None = None, owner: str = "tenant:a") -> Bound:
    return Bound(owner, Limit(name=name, of=of, most=most, per=per))  # type: ignore[arg-type]


RULES = [
    rule("rpm", "requests", 5, "minute"),
    rule("rpd", "requests", 12, "day"),
    rule("tpm", "tokens", 1000, "minute"),
    rule("tph", "tokens", 4321, "hour", owner="key:k"),
    rule("tokens", "tokens", 3000, "month"),
    rule("day", "cost", 5e-6, "day"),
    rule("month", "cost", 9e-6, "month", owner="key:k"),
    rule("spend", "cost", 2e-6, "minute"),
    rule("few", "concurrent", 3),
    rule("none", "requests", 0, "day", owner="key:never"),
]


def run_of(
    id: str, bounds: list[Bound], tokens: int = 100, cost: int = 300, model: str = "m"
) -> Run:
    who = {"tenant": "a", "user": "key_1", "model": model, "tier": "normal", "route": "/v1"}
    return Run(id, who, bounds, Held(tokens, cost))


class Lua:
    """Calls meter.lua directly, at the test's time."""

    def __init__(self, url: str) -> None:
        self.redis = BlockingRedis.from_url(url, decode_responses=True)
        self._run = self.redis.register_script(SCRIPT)
        self.root = f"test-{uuid.uuid4().hex}:{{meter}}"
        self.at(BEGIN_S)

    def at(self, now: float) -> None:
        whole = int(now)
        us = round((now - whole) * 1e6)
        self.redis.mset({f"{self.root}-s": whole, f"{self.root}-us": us})

    def call(self, op: str, *args: object):
        return self._run([self.root], [op, round(LEASE_S * 1e6), MEMORY_S, *args])

    def reserve(self, run: Run):
        """(the rule in the way, seconds, what each rule leaves)"""
        told = json.loads(self.call("reserve", run.id, json.dumps(run.told())))
        assert told["granted"] == (told["rule"] == 0)
        wait = told["wait"] / 1e6 if told["wait"] > 0 else told["wait"]
        return told["rule"], wait, [left for left, _ in told["rules"] or ()]

    def hold(self, run: Run) -> None:
        self.call("hold", run.id, json.dumps(run.told()))

    def settle(self, run: Run) -> int:
        return self.call("settle", run.id, json.dumps(run.told()))

    def release(self, run: Run) -> None:
        self.call("release", run.id, json.dumps(run.told()))

    def sweep(self, most: int = 100) -> int:
        return self.call("sweep", most)[0]

    def ledger(self) -> list[tuple[str, str, dict[str, int]]]:
        return [
            (e["id"], e["status"], {field: int(e[field]) for field in FIELDS})
            for _, e in self.redis.xrange(f"{self.root}:ledger")
        ]

    def counts(self) -> dict[str, dict[str, int]]:
        return {
            key[len(self.root) + 3 :]: {k: int(v) for k, v in self.redis.hgetall(key).items()}
            for key in self.redis.keys(f"{self.root}:c:*")
        }

    def keys(self) -> set[str]:
        return {key[len(self.root) + 1 :] for key in self.redis.keys(f"{self.root}:*")}

    def close(self) -> None:
        for key in self.redis.keys(f"{self.root}*"):
            self.redis.delete(key)
        self.redis.close()


@pytest.fixture
def lua(redis_url):
    script = Lua(redis_url)
    yield script
    script.close()


class Both:
    """The function and the plain ledger, called alike; every answer must be the same."""

    def __init__(self, lua: Lua) -> None:
        self.lua = lua
        self.plain = PlainMeter(LEASE_S)
        self.now = self.plain.now = BEGIN_S
        self.runs: list[Run] = []
        self.final: dict[str, Used] = {}

    def pass_time(self, seconds: float) -> None:
        self.now = self.plain.now = round(self.now + seconds, 6)
        self.lua.at(self.now)

    def reserve(self, bounds: list[Bound], tokens: int, cost: int, times: int) -> bool:
        run = run_of(f"r{len(self.runs)}", bounds, tokens, cost)
        self.runs.append(run)
        return self._reserve(run, times)

    def _reserve(self, run: Run, times: int) -> bool:
        for _ in range(times):
            expected, wait = self.plain.reserve(run.id, run.told())
            blocking, waits, left = self.lua.reserve(run)
            assert (blocking, waits) == (expected, pytest.approx(wait, abs=1e-4))
            looks = [self.plain.look(rule, 0)[0] for rule in run.told()["rules"]]
            assert left == pytest.approx(looks, rel=1e-6, abs=0.1)
            assert all(one >= 0 for one in left)
        self._look(run)
        return run.id in self.plain.standing

    def _look(self, run: Run) -> None:
        """What the end is to be, if nothing more comes."""
        standing = self.plain.standing.get(run.id)
        if used := standing.used if standing else self.plain.charged.get(run.id):
            self.final[run.id] = Used(*(used[field] for field in FIELDS))
        else:
            self.final.pop(run.id, None)

    def taken_over(self, run: Run, times: int) -> None:
        """By another gateway."""
        next_ = replace(run, attempt=f"{run.attempt}+", used=Used(), status="")
        self.runs[self.runs.index(run)] = next_
        self._reserve(next_, times)

    def left_at_the_door(self, run: Run, comes_late: bool, times: int) -> None:
        """Of another gateway, which had asked or not."""
        there = replace(run, attempt=f"{run.attempt}-", used=Used(), status="")
        self.release(there, times)
        if comes_late:
            self._reserve(there, times)

    def of_another_model(self, run: Run, bounds: list[Bound], tokens: int, times: int) -> None:
        """It has what it had used, as far as anybody was told."""
        if run.id in self.plain.standing:
            other = "n" if run.who["model"] == "m" else "m"
            moved = run_of(run.id, bounds, tokens, model=other)
            moved.used, moved.attempt = self.final[run.id], run.attempt
            self.runs[self.runs.index(run)] = moved
            self._reserve(moved, times)

    def gives_up(self, run: Run, used: Used, times: int) -> None:
        """Another gateway that has it too, or had it: its job is this one's."""
        there = replace(run, attempt=f"{run.attempt}-")
        self.ask("settle", there, used, times, "cancelled")

    def ask(self, op: str, run: Run, used: Used, times: int, status: str = "ok") -> None:
        before = self.final.get(run.id, Used())
        grown = Used(*map(max, before, used))
        run.used = grown if op == "settle" else used  # another gateway may have told more
        run.status = status
        told = run.id in self.plain.standing or self.plain.over.get(run.id, "lost") == "lost"
        if op == "settle" or told:
            self.final[run.id] = grown
        for _ in range(times):
            getattr(self.plain, op)(run.id, copy.deepcopy(run.told()))
            getattr(self.lua, op)(run)

    def release(self, run: Run, times: int) -> None:
        for _ in range(times):
            self.plain.release(run.id, run.attempt)
            self.lua.release(run)
        self._look(run)

    def check(self) -> None:
        assert self.lua.ledger() == self.plain.ledger
        counts = {
            f"{key}:{date}": (count.held, count.used)
            for (key, date), count in self.plain.counts.items()
        }
        told = {at: (c.get("held", 0), c.get("used", 0)) for at, c in self.lua.counts().items()}
        assert told == {at: c for at, c in counts.items() if at in told}
        assert all(c == (0, 0) for at, c in counts.items() if at not in told)
        assert all(held >= 0 and used >= 0 for held, used in told.values())


USED = st.builds(
    lambda prompt, cached, output, cost: Used(prompt, min(prompt, cached), output, cost),
    *(st.integers(0, 900) for _ in range(3)),
    st.integers(0, 3000),
)
TIMES = st.integers(1, 2)
OPS = st.one_of(
    st.tuples(
        st.just("reserve"),
        st.lists(st.sampled_from(RULES), unique_by=id, max_size=len(RULES)),
        st.integers(0, 1100),
        st.integers(0, 5500),
        TIMES,
    ),
    st.tuples(st.just("hold"), st.integers(0, 30), USED, TIMES),
    st.tuples(st.just("settle"), st.integers(0, 30), USED, TIMES),
    st.tuples(st.just("gives_up"), st.integers(0, 30), USED, TIMES),
    st.tuples(st.just("unreserved"), USED, TIMES),
    st.tuples(st.just("release"), st.integers(0, 30), TIMES),
    st.tuples(st.just("taken_over"), st.integers(0, 30), TIMES),
    st.tuples(st.just("left_at_the_door"), st.integers(0, 30), st.booleans(), TIMES),
    st.tuples(
        st.just("of_another_model"),
        st.integers(0, 30),
        st.lists(st.sampled_from(RULES), unique_by=id, max_size=3),
        st.integers(0, 1100),
        TIMES,
    ),
    st.tuples(st.just("time"), st.sampled_from([0.001, 3.0, 12.5, 60.0, 50.0, 90_000.0])),
    st.tuples(st.just("sweep"), st.integers(1, 3)),
)
ANYBODYS = ("taken_over", "left_at_the_door")  # also of a request that nothing stands of


@settings(
    max_examples=70, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(ops=st.lists(OPS, max_size=40))
@example(  # one that leaves what another has reserved, and settles it
    ops=[("reserve", [], 0, 0, 1), ("taken_over", 0, 1), ("release", 0, 1),
         ("settle", 0, Used(), 1)]
)  # fmt: skip
def test_the_function_is_the_plain_ledger(redis_url, ops):
    """Whatever comes, twice or late or never, both say the same of every limit and write the same
    ledger; in the end its sum is what was told last of each request, and nothing is held."""
    lua = Lua(redis_url)
    both = Both(lua)
    try:
        for op, *args in ops:
            if op == "reserve":
                both.reserve(*args)
            elif op == "unreserved":
                both.runs.append(run_of(f"r{len(both.runs)}", RULES[:7]))
                both.ask("settle", both.runs[-1], *args)
            elif op == "time":
                both.pass_time(*args)
            elif op == "sweep":
                assert lua.sweep(*args) == both.plain.sweep(*args)
            elif known := [r for r in both.runs if r.id in both.final or op in ANYBODYS]:
                run, rest = known[args[0] % len(known)], args[1:]
                if op in ("hold", "settle"):
                    both.ask(op, run, *rest)
                else:
                    getattr(both, op)(run, *rest)
            both.check()
        both.pass_time(LEASE_S)  # nobody renews: all of it comes back
        while both.plain.sweep(100):
            lua.sweep(100)
        both.check()
        sums: dict[str, Counter[str]] = {id: Counter() for id in both.final}
        for id, _, used in lua.ledger():
            sums[id].update(used)
        assert {id: Used(*(total[f] for f in FIELDS)) for id, total in sums.items()} == both.final
        assert all(count.get("held", 0) == 0 for count in lua.counts().values())
        assert not [key for key in sorted(lua.keys()) if key.startswith(("open", "due", "n:"))]
    finally:
        lua.close()


def test_the_calendar_is_the_worlds(lua):
    """Days and months by name, and when they end: leap years, centuries, both ends of a year."""
    day, month = rule("d", "tokens", 9, "day"), rule("m", "tokens", 9, "month")
    for number, date in enumerate(
        (
            *("2027-02-28", "2028-02-28", "2028-02-29", "2028-12-31", "2029-01-01", "2100-02-28"),
            *("2400-02-29", "2030-04-30", "2031-07-31", "2032-08-01", "2033-11-15"),
        )
    ):
        at = datetime.fromisoformat(f"{date}T23:59:59+00:00").timestamp()
        lua.at(at)
        run = run_of(f"r{number}", [day, month], tokens=10)
        assert lua.reserve(run)[0] == 1  # more than either ever holds
        lua.hold(run)
        for per, name in (("day", date), ("month", date[:7])):
            key = f"{lua.root}:c:{run.told()['rules'][per == 'month']['key']}:{name}"
            left_s = lua.redis.ttl(key) - (period_ends(per, at) + 86_400 - time.time())
            assert abs(left_s) < 60, (date, per)


def test_the_longest_wait_is_told(lua):
    """Else a client would come back to the next refusal."""
    rules = [rule("rpm", "requests", 60, "minute"), rule("tph", "tokens", 100, "hour")]
    rules += [rule("few", "concurrent", 1)]
    assert lua.reserve(run_of("r1", rules, tokens=100))[0] == 0
    assert lua.reserve(run_of("r2", rules, tokens=50))[:2] == (2, 1800)
    assert lua.reserve(run_of("r3", rules[::-1], tokens=50))[:2] == (2, 1800)


def test_what_is_held_may_be_free_soon_and_what_was_used_with_the_next_day(lua):
    rules = [rule("d", "tokens", 100, "day")]
    lua.at(BEGIN_S + 20)  # of a new day
    assert lua.reserve(run_of("r1", rules, tokens=60))[0] == 0
    assert lua.reserve(run_of("r2", rules, tokens=60))[:2] == (1, 1.0)
    run = run_of("r1", rules, tokens=60)
    run.used, run.status = Used(prompt=60), "ok"
    lua.settle(run)
    left_s = period_ends("day", BEGIN_S + 20) - (BEGIN_S + 20)
    assert lua.reserve(run_of("r3", rules, tokens=60))[:2] == (1, pytest.approx(left_s, abs=1))
    assert lua.reserve(run_of("r4", rules, tokens=40))[0] == 0


def test_what_runs_on_after_it_was_thought_lost_has_its_place_again(lua):
    """Told again under its own id, it is charged the rest and counted once."""
    rules = [rule("few", "concurrent", 1), rule("rpd", "requests", 9, "day")]
    rules += [rule("tokens", "tokens", 900, "day")]
    run = run_of("r1", rules, tokens=500)
    lua.at(BEGIN_S + 20)  # of a new day
    assert lua.reserve(run)[0] == 0
    run.used = Used(prompt=40)
    lua.hold(run)
    lua.at(BEGIN_S + 20 + LEASE_S)
    assert lua.sweep() == 1
    assert lua.reserve(run_of("r2", rules))[2][0] == 0  # nobody was there
    lua.hold(run)  # and here it is
    lua.settle(run_of("r2", rules))
    blocking, _, left = lua.reserve(run_of("r3", rules))
    assert (blocking, left[1]) == (1, 9 - 2), "r1 is counted once"
    run.used, run.status = Used(prompt=40, output=7), "ok"
    lua.settle(run)
    lua.hold(run)  # late: it is over
    _, _, left = lua.reserve(run_of("r4", rules, tokens=0))
    assert left == [0, 9 - 3, 900 - 47]
    assert [(id, status, used["prompt"], used["output"]) for id, status, used in lua.ledger()] == [
        ("r1", "lost", 40, 0), ("r2", "", 0, 0), ("r1", "correction", 0, 7)
    ]  # fmt: skip


def test_what_was_handed_over_keeps_its_place_all_the_time_and_is_charged_once(lua):
    """The gateway that leaves tells of it once more; and again, late, when it is over."""
    rules = [rule("few", "concurrent", 1), rule("rpd", "requests", 9, "day")]
    lua.at(BEGIN_S + 20)  # of a new day
    left, taken = run_of("r1", rules), run_of("r1", rules)
    assert lua.reserve(left)[0] == 0
    lua.at(BEGIN_S + 20 + 0.9 * LEASE_S)
    left.used = Used(prompt=40, output=3)
    lua.hold(left)
    lua.at(BEGIN_S + 20 + 1.8 * LEASE_S)
    assert lua.reserve(run_of("r2", rules))[0] == 1, "nobody has taken it over yet"
    assert lua.reserve(taken) == (0, 0, [0, 8])
    lua.at(BEGIN_S + 20 + 2.7 * LEASE_S)
    assert lua.reserve(run_of("r2", rules))[0] == 1
    taken.used, taken.status = Used(prompt=40, output=9), "ok"
    lua.settle(taken)
    lua.hold(left)
    assert [(status, used["prompt"], used["output"]) for _, status, used in lua.ledger()] == [
        ("ok", 40, 9)
    ]
    assert lua.reserve(run_of("r2", rules))[2] == [0, 7]


def test_what_is_told_by_who_takes_it_over_is_no_less_than_what_was(lua):
    """It dies before it has read what was told."""
    left, taken = run_of("r1", []), run_of("r1", [])
    left.used = Used(prompt=40, output=3)
    lua.hold(left)
    lua.hold(taken)
    lua.at(BEGIN_S + LEASE_S)
    lua.sweep()
    lua.hold(taken)
    lua.at(BEGIN_S + 2 * LEASE_S)
    lua.sweep()
    assert [(status, used["output"]) for _, status, used in lua.ledger()] == [("lost", 3)]


def test_who_leaves_at_the_door_of_one_gateway_is_counted_at_the_next(lua):
    """Its call came late there, and holds nothing."""
    rules = [rule("few", "concurrent", 1), rule("rpd", "requests", 9, "day")]
    lua.at(BEGIN_S + 20)  # of a new day
    left, taken = run_of("r1", rules), run_of("r1", rules)
    lua.release(left)
    lua.reserve(left)
    assert lua.reserve(taken)[2] == [0, 8]
    lua.release(replace(taken, attempt="a third's"))  # which was to take it over, and leaves
    assert lua.reserve(run_of("r2", rules))[0] == 1, "what it found is not its own"
    taken.used, taken.status = Used(prompt=40), "ok"
    lua.settle(taken)
    assert lua.reserve(run_of("r2", rules))[2] == [0, 7]
    assert [status for _, status, _ in lua.ledger()] == ["ok"]


def test_what_is_done_again_has_room_or_waits_and_is_charged_what_is_missing(lua):
    """A batch's line that a draining gateway cut off, at the next one."""
    rules = [rule("few", "concurrent", 1), rule("rpd", "requests", 9, "day")]
    lua.at(BEGIN_S + 20)  # of a new day
    cut, again = run_of("r1", rules), run_of("r1", rules)
    assert lua.reserve(cut)[0] == 0
    cut.used, cut.status = Used(prompt=40, output=3), "cancelled"
    lua.settle(cut)
    assert lua.reserve(cut)[2] == [1, 8], "late, of who has ended it: nothing is held"
    assert lua.reserve(run_of("r2", rules))[0] == 0
    assert lua.reserve(again)[0] == 1, "another has the place meanwhile"
    lua.settle(run_of("r2", rules))
    assert lua.reserve(again) == (0, 0, [0, 7]), "it is counted once"
    assert lua.reserve(run_of("r3", rules))[0] == 1
    again.used, again.status = Used(prompt=40, output=9), "ok"
    lua.settle(again)
    assert lua.reserve(run_of("r3", rules))[2] == [0, 6]
    assert [(id, status, used["output"]) for id, status, used in lua.ledger()] == [
        ("r1", "cancelled", 3), ("r2", "", 0), ("r1", "correction", 6)
    ]  # fmt: skip


@pytest.mark.parametrize("killed", [False, True])
def test_a_job_done_again_that_finds_its_work_done_gives_no_charge_back(lua, killed):
    """A file's, whose gateway was lost before it noted that the file is indexed: what it embedded
    is there, and was paid for."""
    rules = [rule("tokens", "tokens", 100, "day")]
    lua.at(BEGIN_S + 20)
    first, again = run_of("r1", rules, tokens=12), run_of("r1", rules, tokens=12)
    assert lua.reserve(first)[0] == 0
    first.used, first.status = Used(prompt=10, cost=5), "ok"
    if killed:  # before it settled
        lua.hold(first)
        lua.at(BEGIN_S + 20 + LEASE_S)
        assert lua.sweep() == 1
    else:
        lua.settle(first)
    assert lua.reserve(again)[0] == 0
    again.used, again.status = Used(), "ok"
    lua.settle(again)
    assert lua.reserve(run_of("r2", rules, tokens=0))[2] == [90]
    [(id, status, used)] = lua.ledger()
    assert (id, status, used["prompt"]) == ("r1", "lost" if killed else "ok", 10)


@pytest.mark.parametrize("tells_again", [False, True])
def test_what_fails_after_it_was_thought_lost_gives_the_charge_back(lua, tells_again):
    """It has shown nothing, whatever was told of it before: an embedding's prompt, whose gateway
    was silent for a while."""
    rules = [rule("tokens", "tokens", 100, "day")]
    lua.at(BEGIN_S + 20)
    run = run_of("r1", rules, tokens=12)
    assert lua.reserve(run)[0] == 0
    run.used = Used(prompt=10, cost=5)
    lua.hold(run)
    lua.at(BEGIN_S + 20 + LEASE_S)
    assert lua.sweep() == 1
    if tells_again:
        lua.hold(run)
    run.used, run.status = Used(), "failed"
    for _ in range(2):
        lua.settle(run)
    assert lua.reserve(run_of("r2", rules, tokens=0))[2] == [100]
    assert [(status, used["prompt"], used["cost"]) for _, status, used in lua.ledger()] == [
        ("lost", 10, 5), ("correction", -10, -5)
    ]  # fmt: skip


def test_who_is_cancelled_because_another_has_it_ends_nothing_of_the_others(lua):
    """A gateway that froze over a batch's line wakes while the next one is at it."""
    rules = [rule("few", "concurrent", 1)]
    froze, next_ = run_of("r1", rules), run_of("r1", rules)
    assert lua.reserve(froze)[0] == lua.reserve(next_)[0] == 0
    froze.used, froze.status = Used(prompt=40, output=3), "cancelled"
    lua.settle(froze)
    assert lua.reserve(run_of("r2", rules))[0] == 1, "the next one runs"
    lua.at(BEGIN_S + LEASE_S)
    lua.sweep()  # and is killed: nothing is lost that anybody told
    assert [(status, used["output"]) for _, status, used in lua.ledger()] == [("lost", 3)]
    assert lua.reserve(next_)[0] == 0
    next_.used, next_.status = Used(prompt=40, output=9), "cancelled"
    lua.settle(next_)
    assert lua.reserve(run_of("r2", rules))[0] == 0
    assert [(status, used["output"]) for _, status, used in lua.ledger()][1:] == [("correction", 6)]


def test_one_that_stands_is_told_of_the_rules_that_are_asked_for(lua):
    """They may have changed since another gateway reserved for it."""
    few, day = rule("few", "concurrent", 1), rule("rpd", "requests", 9, "day")
    assert lua.reserve(run_of("r1", [few]))[0] == 0
    assert lua.reserve(run_of("r1", [few, day])) == (0, 0, [0, 9])


@pytest.mark.parametrize(
    "odd",
    [
        None,
        {"who": {}},
        {"who": {"tenant": "a", "user": "u", "model": "m", "tier": None, "route": "/v1"}},
        {"used": {"prompt": 1}},
        {"held": {"requests": "1", "tokens": 1, "cost": 1}},
        {"rules": [{"key": "k", "of": "tokens", "per": "day", "most": 9}]},
    ],
    ids=["bytes", "nobody", "tier", "used", "held", "rules"],
)
def test_a_reservation_that_cannot_be_read_holds_up_no_other(lua, odd):
    """More of them than a request at the door looks at."""
    few = [rule("few", "concurrent", 12)]
    pack = "redis.call('HSET', KEYS[1], ARGV[1], cmsgpack.pack(cjson.decode(ARGV[2])))"
    for number in range(13):
        id, at = f"odd{number}", f"{lua.root}:open"
        if odd is None:
            lua.redis.hset(at, id, b"\xc1")
        else:
            lua.redis.eval(pack, 1, at, id, json.dumps({**run_of(id, []).told(), **odd}))
        lua.redis.zadd(f"{lua.root}:due", {id: number})
    first, own = run_of("r1", few), run_of("odd0", few)
    assert lua.reserve(first)[0] == 0
    lua.hold(own)  # its gateway tells it anew
    own.used, own.status = Used(prompt=5), "ok"
    lua.settle(own)
    settled = run_of("odd1", few)  # or ends it
    settled.status = "ok"
    lua.settle(settled)
    lua.at(BEGIN_S + LEASE_S)
    ended, aside = lua.call("sweep", 100)
    left = [f"odd{number}" for number in range(2, 13)]
    assert (ended, sorted(aside)) == (1, sorted(left))
    assert [(id, status) for id, status, _ in lua.ledger()] == [
        ("odd0", "ok"), ("odd1", "ok"), ("r1", "lost")
    ]  # fmt: skip
    assert sorted(lua.redis.hkeys(f"{lua.root}:aside")) == sorted(left)
    assert lua.redis.ttl(f"{lua.root}:aside") > 0
    assert lua.call("sweep", 100) == [0, []]


def test_another_model_is_judged_by_its_own_rules_and_charged(lua):
    ours, theirs = rule("m", "tokens", 1000, "day"), rule("n", "tokens", 300, "day", "key:k")
    assert lua.reserve(run_of("r1", [ours], tokens=900))[0] == 0
    moved = run_of("r1", [theirs], tokens=200, model="n")
    assert lua.reserve(moved) == (0, 0, [100])
    assert lua.reserve(run_of("r2", [ours], tokens=1000))[0] == 0  # all of it is back
    over = run_of("r2", [theirs], tokens=200, model="n")
    assert lua.reserve(over)[0] == 1
    assert lua.reserve(run_of("r3", [ours], tokens=1000))[0] == 0  # it holds nothing any more
    moved.used, moved.status = Used(prompt=7), "ok"
    lua.settle(moved)
    quick = run_of("r3", [], model="n")  # its settlement comes before the new reservation was told
    quick.used, quick.status = Used(prompt=5), "ok"
    lua.settle(quick)
    assert lua.reserve(run_of("r4", [ours], tokens=1000))[0] == 0
    entries = [entry for _, entry in lua.redis.xrange(f"{lua.root}:ledger")]
    assert [(e["id"], e["model"], e["prompt"]) for e in entries] == [
        ("r1", "n", "7"), ("r3", "n", "5")
    ]  # fmt: skip


def test_a_limit_of_zero_lets_nothing_through_whatever_it_costs(lua):
    for per in ("minute", "day"):
        none = rule("none", "cost", 0, per)
        assert lua.reserve(run_of(f"r-{per}", [none], cost=0))[:2] == (1, -1)
