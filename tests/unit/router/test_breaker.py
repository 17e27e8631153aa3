"""The breaker: what opens it, what closes it, and that it never shuts a model off."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.breaker import (
    MAX_PAUSE_S,
    MIN_FAILURES,
    PROBE_S,
    WINDOW_REQUESTS,
    WINDOW_S,
    Attempt,
    Breaker,
    State,
)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock)


def fail(breaker: Breaker, times: int = 1, peers: float | None = 0.0) -> None:
    for _ in range(times):
        breaker.began().failed(peers)


def test_it_says_when_it_takes_requests(clock: Clock) -> None:
    """And is heard of whenever that may be sooner: who waits for a worker need not look again."""
    heard = []
    breaker = Breaker(clock, lambda: heard.append(breaker.takes_in(alone=False)))
    assert breaker.takes_in(alone=False) == 0
    breaker.began().lost()
    assert (heard, breaker.takes_in(alone=False)) == ([PROBE_S], PROBE_S)
    clock.now += 0.25 * PROBE_S
    assert breaker.takes_in(alone=False) == 0.75 * PROBE_S
    clock.now += 0.75 * PROBE_S
    assert breaker.takes_in(alone=False) == 0
    breaker.began().left()  # the probe says nothing
    assert heard.pop() == 0
    breaker.began().lost()
    assert (heard.pop(), breaker.takes_in(alone=True)) == (2 * PROBE_S, PROBE_S)
    clock.now += 2 * PROBE_S
    breaker.began().answered()
    assert heard == [PROBE_S, 0]


def test_failures_open_it_when_peers_have_fewer(breaker: Breaker) -> None:
    fail(breaker, MIN_FAILURES - 1)
    assert breaker.state is State.CLOSED
    fail(breaker)
    assert breaker.state is State.OPEN
    assert not breaker.takes(alone=False)
    assert breaker.describe() == "open, 3 of its last 3 requests failed"


@pytest.mark.parametrize("peers", [1.0, 0.5, None])
def test_what_fails_everywhere_is_not_its_fault(breaker: Breaker, peers: float | None) -> None:
    """Half of its requests fail, and as many or more of its peers', or it has none."""
    for _ in range(20):
        breaker.began().succeeded()
        fail(breaker, peers=peers)
    assert breaker.state is State.CLOSED


def test_twice_its_peers_share_at_the_most_of_all(breaker: Breaker) -> None:
    """A prefill worker whose every push fails, beside a decode worker that also runs unsplit."""
    fail(breaker, MIN_FAILURES, peers=0.5)
    assert breaker.state is State.OPEN


def test_all_of_its_requests_fail_and_all_of_its_peers_too(breaker: Breaker) -> None:
    fail(breaker, 10, peers=1.0)
    assert breaker.state is State.CLOSED


def test_a_request_fails_once(breaker: Breaker) -> None:
    one = breaker.began()
    for _ in range(MIN_FAILURES):
        one.failed(0.0)
        one.lost()
    assert breaker.describe() == "closed, 1 of its last 1 requests failed"


ENDS: dict[str, Callable[[Attempt], None]] = {
    "succeeded": Attempt.succeeded,
    "failed": lambda attempt: attempt.failed(0.0),
    "lost": Attempt.lost,
    "left": Attempt.left,
}
ENDED = {"succeeded": (0, 1), "failed": (1, 1), "lost": (1, 1), "left": (0, 0)}  # failed, of


@pytest.mark.parametrize("later", ENDS)
@pytest.mark.parametrize("first", ENDS)
def test_what_a_request_ended_as_it_stays(breaker: Breaker, first: str, later: str) -> None:
    """It may be told of twice, by its stream and by the loss of its link."""
    one = breaker.began()
    ENDS[first](one)
    state = breaker.state
    for _ in range(MIN_FAILURES):
        ENDS[later](one)
        one.answered()
    failed, of = ENDED[first]
    assert breaker.describe() == f"{state.value}, {failed} of its last {of} requests failed"


def test_the_last_requests_count_and_those_within_the_window(
    breaker: Breaker, clock: Clock
) -> None:
    for _ in range(2 * WINDOW_REQUESTS):
        breaker.began().succeeded()
    assert breaker.describe() == f"closed, 0 of its last {WINDOW_REQUESTS} requests failed"
    clock.now += WINDOW_S
    assert "0 of its last 64" in breaker.describe()
    clock.now += 0.001
    assert breaker.describe() == "closed, 0 of its last 0 requests failed"


def test_losses_are_failures_and_counted(breaker: Breaker, clock: Clock) -> None:
    """So that they weigh in what its peers are compared with."""
    for count in (1, 2, 3):
        breaker.began().lost()
        assert (breaker.opened, breaker.failed_share) == (count, 1.0)
        clock.now += MAX_PAUSE_S / 10


def test_a_small_share_does_not_open_it(breaker: Breaker) -> None:
    for _ in range(MIN_FAILURES):
        for _ in range(9):
            breaker.began().succeeded()
        fail(breaker)
    assert breaker.state is State.CLOSED


def test_old_failures_are_forgotten(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, MIN_FAILURES - 1)
    clock.now += WINDOW_S + 1
    fail(breaker)
    assert breaker.state is State.CLOSED
    assert breaker.failed_share == 1.0


def test_a_loss_opens_it_at_once_and_many_at_once_are_one(breaker: Breaker, clock: Clock) -> None:
    attempts = [breaker.began() for _ in range(32)]
    for attempt in attempts:
        attempt.lost()
    assert (breaker.state, breaker.opened) == (State.OPEN, 1)
    assert not breaker.takes(alone=False)
    clock.now += PROBE_S
    assert breaker.takes(alone=False)


def test_one_probe_at_a_time(breaker: Breaker, clock: Clock) -> None:
    breaker.began().lost()
    clock.now += PROBE_S
    probe = breaker.began()
    assert probe.probe
    assert breaker.state is State.HALF_OPEN
    assert not breaker.takes(alone=False)
    assert not breaker.takes(alone=True)
    probe.answered()
    assert breaker.state is State.CLOSED
    assert not breaker.began().probe


@pytest.mark.parametrize("end", [lambda probe: probe.failed(None), Attempt.lost])
def test_a_failed_probe_doubles_the_pause_and_success_restores_it(
    breaker: Breaker, clock: Clock, end: Callable[[Attempt], None]
) -> None:
    breaker.began().lost()
    for pause in (2.0, 4.0, 8.0, 16.0, MAX_PAUSE_S, MAX_PAUSE_S):
        clock.now += 100
        end(breaker.began())
        clock.now += PROBE_S
        assert breaker.takes(alone=True), "a model is never away for longer"
        clock.now += pause - PROBE_S - 0.01
        assert not breaker.takes(alone=False)
        clock.now += 0.02
        assert breaker.takes(alone=False)
    good = breaker.began()
    good.answered()
    good.succeeded()
    breaker.began().lost()
    clock.now += PROBE_S
    assert breaker.takes(alone=False)


def test_a_probe_that_its_client_gives_up_says_nothing(breaker: Breaker, clock: Clock) -> None:
    breaker.began().lost()
    clock.now += PROBE_S
    breaker.began().left()
    assert breaker.state is State.OPEN
    assert breaker.takes(alone=False)


def test_a_probe_may_take_longer_than_the_pause(breaker: Breaker, clock: Clock) -> None:
    """A sound worker whose first tokens take seconds, and requests come all the while."""
    breaker.began().lost()
    probes = []
    for _ in range(3):
        clock.now += PROBE_S
        assert breaker.takes(alone=True)
        probes.append(breaker.began())
    probes[2].left()
    assert breaker.state is State.HALF_OPEN  # the others may still say something
    probes[0].answered()
    assert breaker.state is State.CLOSED
    probes[1].lost()
    assert breaker.opened == 2


def test_an_older_requests_token_is_no_proof(breaker: Breaker) -> None:
    older = breaker.began()
    breaker.began().lost()
    older.answered()
    older.succeeded()
    assert breaker.state is State.OPEN


events = st.lists(
    st.tuples(
        st.sampled_from(["begin", "answered", "succeeded", "failed", "lost", "left"]),
        st.integers(0, 5),
        st.floats(0, 5),
        st.sampled_from([None, 0.0, 0.5]),
    ),
    max_size=80,
)


@given(events=events)
def test_it_is_never_shut_for_longer_than_its_pauses(
    events: list[tuple[str, int, float, float | None]],
) -> None:
    clock = Clock()
    breaker = Breaker(clock)
    attempts = [breaker.began()]
    for what, which, passed_s, peers in events:
        clock.now += passed_s
        attempt = attempts[which % len(attempts)]
        match what:
            case "begin" if breaker.takes(alone=False):
                attempts.append(breaker.began())
            case "failed":
                attempt.failed(peers)
            case "answered" | "succeeded" | "lost" | "left":
                getattr(attempt, what)()
        assert breaker.takes(alone=True) or not breaker.takes(alone=False)
        shut = clock.now
        clock.now += PROBE_S + 1e-6
        assert breaker.takes(alone=True)
        clock.now = shut + MAX_PAUSE_S + 1e-6
        assert breaker.takes(alone=False)
        clock.now = shut


@given(
    ends=st.lists(st.sampled_from(["succeeded", "left", "answered"]), max_size=60),
)
def test_a_worker_without_faults_stays_closed(ends: list[str]) -> None:
    breaker = Breaker(Clock())
    for end in ends:
        getattr(breaker.began(), end)()
    assert (breaker.state, breaker.failed_share) == (State.CLOSED, 0.0)


def test_a_good_probe_wipes_the_slate(clock: Clock, breaker: Breaker) -> None:
    """The failures that opened it do not count again, together with a new one."""
    fail(breaker, MIN_FAILURES)
    clock.now += PROBE_S
    breaker.began().answered()
    assert breaker.failed_share == 0
    fail(breaker, MIN_FAILURES - 1)
    assert breaker.state is State.CLOSED
    fail(breaker)
    assert breaker.state is State.OPEN


def test_a_late_success_of_before_does_not_shorten_the_pause(
    clock: Clock, breaker: Breaker
) -> None:
    """It began while the worker was well, and says nothing of how it is now."""
    before = breaker.began()
    breaker.began().lost()
    clock.now += PROBE_S
    breaker.began().lost()
    before.succeeded()
    assert breaker.state is State.OPEN
    assert breaker.takes_in(alone=False) == 2 * PROBE_S


def test_each_way_of_opening_begins_with_the_first_pause(clock: Clock) -> None:
    """Only a failed probe makes it longer."""
    for opened in (Breaker(clock), Breaker(clock)):
        fail(opened, MIN_FAILURES)
        assert opened.takes_in(alone=False) == PROBE_S
        clock.now += PROBE_S
        good = opened.began()
        good.answered()
        good.succeeded()
        opened.began().lost()
        assert opened.takes_in(alone=False) == PROBE_S


def test_of_several_probes_the_first_that_fails_decides(clock: Clock, breaker: Breaker) -> None:
    """The others began before it opened again, and say nothing of what comes after."""
    breaker.began().lost()
    probes = []
    for _ in range(3):
        clock.now += PROBE_S
        probes.append(breaker.began())
    probes[0].lost()
    assert breaker.takes_in(alone=False) == 2 * PROBE_S
    probes[1].answered()
    assert breaker.state is State.OPEN
    probes[1].lost()
    assert breaker.takes_in(alone=False) == 2 * PROBE_S, "it fails once"
    assert breaker.opened == 2
