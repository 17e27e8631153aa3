"""Fills masks in a side thread, so that nobody waits for one for long.

A mask that takes long cannot be broken off: its thread is left to it, and ends then; another one
goes on with the rest. Time is the thread's own on the processor, whatever else runs.
"""

import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from queue import SimpleQueue
from time import clock_gettime, pthread_getcpuclockid, thread_time

from services.worker.engine.grammar.compiler import (
    TOKEN_S,
    ConstraintError,
    Matcher,
    TooSlow,
)

_LOOK_S = 0.01

Job = tuple[Matcher, Callable[[], None]]


class Filler:
    """Used from one thread."""

    def __init__(self) -> None:
        self._hand: _Hand | None = None

    def run(self, jobs: Seq[Job]) -> list[Exception | None]:
        """Each one's error, if it has one. Of who takes too long, nobody with the same allowance
        goes on."""
        found: list[Exception | None] = []
        while len(found) < len(jobs):
            self._hand = self._hand or _Hand()
            rest = jobs[len(found) :]
            done, whole = self._hand.run(rest)
            found += done
            if not whole:
                self._hand = None
                rest[len(done)][0].allowance.end()
                found.append(TooSlow())
        return found

    def close(self) -> None:
        """Ends its thread."""
        if self._hand is not None:
            self._hand.close()
            self._hand = None


class _Work:
    def __init__(self, jobs: Seq[Job]) -> None:
        self.jobs = jobs
        self.errors: list[Exception | None] = []
        self.over = threading.Event()
        self.left = False
        self.began_s = 0.0
        """The present job, on the thread's clock."""


class _Hand:
    """A thread."""

    def __init__(self) -> None:
        self._todo: SimpleQueue[_Work | None] = SimpleQueue()
        self._lock = threading.Lock()
        thread = threading.Thread(target=self._work, name="masks", daemon=True)
        thread.start()
        assert thread.ident is not None
        self._clock = pthread_getcpuclockid(thread.ident)

    def run(self, jobs: Seq[Job]) -> tuple[list[Exception | None], bool]:
        """What became of them, as far as they are done, and whether all are; if not, this hand is
        not to be used again."""
        work = _Work(jobs)
        work.began_s = clock_gettime(self._clock)
        self._todo.put(work)
        while not work.over.wait(_LOOK_S):
            with self._lock:
                slow = clock_gettime(self._clock) - work.began_s > TOKEN_S
                if slow and len(work.errors) < len(jobs):
                    work.left = True
                    return work.errors, False
        return work.errors, True

    def close(self) -> None:
        self._todo.put(None)

    def _work(self) -> None:
        while True:
            if (work := self._todo.get()) is None:
                return
            for _, fill in work.jobs:
                work.began_s = thread_time()
                error = _tried(fill)
                with self._lock:
                    if work.left:
                        return
                    work.errors.append(error)
            work.over.set()


def _tried(fill: Callable[[], None]) -> Exception | None:
    try:
        fill()
    except Exception as error:
        return error
    except BaseException as error:
        return ConstraintError(f"{type(error).__name__}: {error}")
    return None
