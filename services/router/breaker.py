"""Whether a worker is left alone because requests fail there: a circuit breaker.

    closed      takes requests
    open        takes none until its pause is over
    half-open   has taken one, the probe: its first token closes the breaker, its failure opens it
                for twice as long; while it says neither, one more is taken after each pause

Two things open it. The loss of the worker (its link, its engine, a stall, a refusal) does at once.
Failed requests do when their share is well above the share among the worker's peers: what fails
everywhere is the requests' fault or the model's, and to leave one worker alone would only move it.
A worker without peers is therefore never left alone for its errors.

Pure: no I/O, and the clock is given.
"""

import enum
import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 30.0  # what is older says nothing about the worker as it is
WINDOW_REQUESTS = 64
MIN_FAILURES = 3
MIN_SHARE = 0.2
TIMES_PEERS = 3.0
PROBE_S = 1.0  # the first pause, and the longest while no worker of the model is closed
MAX_PAUSE_S = 30.0


class State(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Attempt:
    """One request sent to the worker. Told once what became of it; more is ignored."""

    def __init__(self, breaker: "Breaker", probe: bool) -> None:
        self.probe = probe
        self._breaker = breaker
        self._over = False

    def answered(self) -> None:
        """Its first token came."""
        if not self._over:
            self._breaker._answered(self)

    def succeeded(self) -> None:
        if self._end():
            self._breaker._succeeded(self)

    def failed(self, peers_share: float | None) -> None:
        """It ended by the worker's fault. `peers_share`: of failed requests among the worker's
        peers, None without peers."""
        if self._end():
            self._breaker._failed(self, peers_share)

    def lost(self) -> None:
        """The worker was lost under it, or refused it."""
        if self._end():
            self._breaker._lost(self)

    def left(self) -> None:
        """It ended in a way that says nothing about the worker."""
        if self._end():
            self._breaker._left(self)

    def _end(self) -> bool:
        first, self._over = not self._over, True
        return first


class Breaker:
    """Of one worker, as one router sees it."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called when it may take requests sooner than `takes_in` said."""
        self.state = State.CLOSED
        self.opened = 0  # how often
        self._clock = clock
        self._on_change = on_change
        self._ends: deque[tuple[float, bool]] = deque(maxlen=WINDOW_REQUESTS)  # when, failed
        self._pause_s = PROBE_S
        self._since = 0.0  # opened, or half-opened
        self._probes: set[Attempt] = set()  # since it opened, those of which nothing is known yet

    @property
    def failed_share(self) -> float:
        """Of the requests that ended lately, those that failed; 0 when none did."""
        ends = self._recent()
        return sum(failed for _, failed in ends) / len(ends) if ends else 0.0

    def takes(self, alone: bool) -> bool:
        """Whether a request may be sent now. `alone`: no other worker of the model is closed, so
        the pause is short: a model is never away for longer than one probe takes."""
        return self.takes_in(alone) <= 0

    def takes_in(self, alone: bool) -> float:
        """In how many seconds it takes a request; 0: now."""
        if self.state is State.CLOSED:
            return 0.0
        pause_s = PROBE_S if alone else self._pause_s
        return max(0.0, self._since + pause_s - self._clock())  # of a probe, too, that says nothing

    def began(self) -> Attempt:
        """A request is sent; unless the breaker is closed, it is the probe."""
        attempt = Attempt(self, self.state is not State.CLOSED)
        if attempt.probe:
            self.state, self._since = State.HALF_OPEN, self._clock()
            self._probes.add(attempt)
        return attempt

    def describe(self) -> str:
        """For the why-record."""
        ends = self._recent()
        failed = sum(failed for _, failed in ends)
        return f"{self.state.value}, {failed} of its last {len(ends)} requests failed"

    def _answered(self, attempt: Attempt) -> None:
        if attempt in self._probes:
            self.state = State.CLOSED
            self._probes.clear()
            self._ends.clear()
            self._on_change()

    def _succeeded(self, attempt: Attempt) -> None:
        self._answered(attempt)
        self._ends.append((self._clock(), False))
        if self.state is State.CLOSED:
            self._pause_s = PROBE_S

    def _failed(self, attempt: Attempt, peers_share: float | None) -> None:
        self._ends.append((self._clock(), True))
        if attempt in self._probes:
            self._open(min(2 * self._pause_s, MAX_PAUSE_S))
        elif self.state is State.CLOSED and peers_share is not None:
            failures = sum(failed for _, failed in self._recent())
            bar = max(MIN_SHARE, TIMES_PEERS * peers_share)
            if failures >= MIN_FAILURES and self.failed_share >= min(bar, 1.0) > peers_share:
                self._open(self._pause_s)

    def _lost(self, attempt: Attempt) -> None:
        self._ends.append((self._clock(), True))
        if attempt in self._probes:
            self._open(min(2 * self._pause_s, MAX_PAUSE_S))
        elif self.state is State.CLOSED:
            self._open(self._pause_s)

    def _left(self, attempt: Attempt) -> None:
        self._probes.discard(attempt)
        if self.state is State.HALF_OPEN and not self._probes:
            self.state = State.OPEN  # the next request is the probe then, and need not wait
            self._since = float("-inf")
            self._on_change()

    def _open(self, pause_s: float) -> None:
        self.state = State.OPEN
        self._probes.clear()
        self._since, self._pause_s = self._clock(), pause_s
        self.opened += 1
        self._on_change()  # the others may be alone now, and their pauses short

    def _recent(self) -> list[tuple[float, bool]]:
        oldest = self._clock() - WINDOW_S
        while self._ends and self._ends[0][0] < oldest:
            self._ends.popleft()
        return list(self._ends)
