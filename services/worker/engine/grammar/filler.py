"""Has matchers go on in a side thread, so that nobody waits for one for long.

A call that takes long is broken off. Should it not end for that, its thread is left to it, and
another one goes on with the rest; but not for the more than a few. Time is the thread's own on the
processor, whatever else runs: it is what a grammar takes, and says nothing of a busy machine.
"""

import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from queue import SimpleQueue
from time import clock_gettime, pthread_getcpuclockid, thread_time
from typing import NamedTuple

from services.worker.engine.grammar.matcher import (
    TOKEN_S,
    ConstraintError,
    Late,
    Matcher,
    TooSlow,
    Unavailable,
)

STEP_S = 0.1
"""For all jobs of a step: none begins beyond."""
_LOOK_S = 0.01
_LEFT = 4
"""Threads at most that are left to what they do."""


class Job(NamedTuple):
    matcher: Matcher
    call: Callable[[], None]
    """Of the matcher's."""


class Filler:
    """Used from one thread."""

    def __init__(self) -> None:
        self._hand: _Hand | None = None
        self._left: list[_Hand] = []

    def run(self, jobs: Seq[Job]) -> list[Exception | None]:
        """Each one's error, if it has one, with which its matcher cannot go on; or Late: there was
        no time for it. Whose tenants have used little go first."""
        found: list[Exception | None] = [Late()] * len(jobs)
        left_s = [job.matcher.allowance.tenant.left_s for job in jobs]
        rest = sorted(range(len(jobs)), key=lambda place: -left_s[place])
        within_s = STEP_S
        while rest and within_s > 0:
            try:
                hand = self._hand = self._hand or self._new()
                done, took_s = hand.run([jobs[place] for place in rest], within_s)
            except Exception as why:  # there is no thread to be had, or it is not to be reached
                for place in rest:
                    found[place] = Unavailable(f"{type(why).__name__}: {why}")
                self._leave()
                break
            for place, error in zip(rest, done, strict=False):
                found[place] = error
            if not hand.left:
                break
            self._leave()
            found[rest[len(done)]] = TooSlow()
            rest, within_s = rest[len(done) + 1 :], within_s - took_s
        for job, error in zip(jobs, found, strict=True):
            if error is not None and not isinstance(error, Late):
                job.matcher.fail(error)
        return found

    def _leave(self) -> None:
        """Whatever its thread does, nobody waits for it any more."""
        if self._hand is not None:
            self._hand.leave()
            self._left.append(self._hand)
            self._hand = None

    def close(self) -> None:
        """Ends its thread."""
        if self._hand is not None:
            self._hand.close()
            self._hand = None

    def _new(self) -> "_Hand":
        self._left = [hand for hand in self._left if hand.runs]
        if len(self._left) >= _LEFT:
            raise Unavailable("grammars take too long that cannot be broken off")
        return _Hand()


class _Work:
    def __init__(self, jobs: Seq[Job], within_s: float, began_s: float) -> None:
        self.jobs, self.within_s = jobs, within_s
        self.errors: list[Exception | None] = []
        """Of those that are done."""
        self.over = threading.Event()
        self.began_s = self.job_began_s = began_s
        """All of it, and the present job, on the thread's clock."""


class _Hand:
    """A thread."""

    def __init__(self) -> None:
        self.left = False
        """What it does is not waited for any more; it ends then."""
        self._todo: SimpleQueue[_Work | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="masks", daemon=True)
        self._thread.start()
        assert self._thread.ident is not None
        self._clock = pthread_getcpuclockid(self._thread.ident)

    @property
    def runs(self) -> bool:
        return self._thread.is_alive()

    def run(self, jobs: Seq[Job], within_s: float) -> tuple[list[Exception | None], float]:
        """What became of them, as far as they are done, and how long that took. It is `left` if the
        next one does not end."""
        work = _Work(jobs, within_s, clock_gettime(self._clock))
        self._todo.put(work)
        while not work.over.wait(_LOOK_S):
            with self._lock:
                if work.over.is_set() or len(work.errors) == len(jobs):
                    continue
                now_s = clock_gettime(self._clock)
                if now_s - work.job_began_s > TOKEN_S:
                    jobs[len(work.errors)].matcher.cancel()
                self.left = now_s - work.job_began_s > 2 * TOKEN_S
                if self.left:
                    return work.errors, now_s - work.began_s
        return work.errors, 0.0

    def leave(self) -> None:
        with self._lock:
            self.left = True
        self._todo.put(None)

    def close(self) -> None:
        """It is at nothing, unless it was left."""
        self._todo.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (work := self._todo.get()) is not None:
            for job in work.jobs:
                if work.job_began_s - work.began_s > work.within_s:
                    break
                error = _tried(job.call)
                with self._lock:
                    if self.left:
                        return
                    work.errors.append(error)
                    work.job_began_s = thread_time()
            work.over.set()


def _tried(call: Callable[[], None]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    except BaseException as error:
        return ConstraintError(f"{type(error).__name__}: {error}")
    return None
