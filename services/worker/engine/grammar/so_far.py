"""Matchers of requests that go on here: they take in what was generated elsewhere, aside."""

import threading
from collections.abc import Callable
from functools import partial
from time import monotonic

from services.worker.engine.grammar.filler import Filler, Job
from services.worker.engine.grammar.matcher import Late, Matcher

_AT_ONCE = 64
"""Tokens: then it is another matcher's turn."""
_REST_S = 0.01
"""While the tenants of all have used their time up."""


class SoFar:
    """A thread, under the limits that a step has (filler.py)."""

    def __init__(self, tell: Callable[[], None]) -> None:
        """`tell`: called, by the thread, when a matcher is ready."""
        self._tell = tell
        self._changed = threading.Condition()
        self._todo: list[Matcher] = []
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, matcher: Matcher) -> None:
        """Raises RuntimeError where no thread is to be had."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="so far", daemon=True)
            thread.start()
            self._thread = thread
        with self._changed:
            self._todo.append(matcher)
            self._changed.notify()

    def ready(self, matcher: Matcher) -> bool:
        """It has taken in all, or is at its end, or has an error."""
        with self._changed:
            return matcher not in self._todo

    def leave(self, matcher: Matcher) -> None:
        """Nobody waits for it any more."""
        with self._changed:
            if matcher in self._todo:
                self._todo.remove(matcher)

    def close(self, until: float) -> None:
        """Ends its thread; waits for that until so many monotonic seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(max(0.0, until - monotonic()))

    def _work(self) -> None:
        filler = Filler()
        while matchers := self._next():
            jobs = [Job(matcher, partial(matcher.take, _AT_ONCE)) for matcher in matchers]
            errors = filler.run(jobs)
            for matcher in matchers:
                if matcher.error or matcher.ended or not matcher.num_given:
                    self.leave(matcher)
                    self._tell()
            with self._changed:
                if all(isinstance(error, Late) for error in errors):
                    self._changed.wait(_REST_S)
        filler.close()

    def _next(self) -> list[Matcher]:
        """Empty at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._todo or self._closed)
            return [] if self._closed else [*self._todo]
