"""The grammars of an engine's requests: made in a side thread, kept by content."""

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from select import select
from time import monotonic

from services.worker.engine.grammar.compiler import Compiler, ConstraintError, Matcher
from services.worker.engine.grammar.trial import Trial
from services.worker.engine.messages import Constraint

_KEPT = 256
"""Grammars. A large schema's takes a few MB."""
_REFUSED_S = 30.0
"""For so long a reason why there is none is kept: it may have been for want of time."""


@dataclass(frozen=True, slots=True)
class _Made:
    matcher: Matcher | None
    """At an output's beginning."""
    error: ConstraintError | None
    until: float
    """Monotonic seconds."""


class Grammars:
    """Used from the engine's thread: `find` a grammar until it is there, or `leave` it."""

    def __init__(self, folder: str, vocab_size: int, eos_token_ids: Seq[int]) -> None:
        """Costs nothing before the first is wanted."""
        self._of = folder, vocab_size, tuple(eos_token_ids)
        self._made: OrderedDict[Constraint, _Made] = OrderedDict()
        self._wanted: OrderedDict[Constraint, None] = OrderedDict()
        """What is being made stays in it, first."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when something was made, until `hear`."""

    def find(self, constraint: Constraint) -> Matcher | None:
        """A matcher of one's own; None while the grammar is being made. Raises ConstraintError."""
        with self._changed:
            made = self._made.get(constraint)
            if made is not None and monotonic() < made.until:
                self._made.move_to_end(constraint)
            else:
                made = None
                self._wanted[constraint] = None
                self._changed.notify()
        if made is None:
            self._start()
            return None
        if made.matcher is None:
            assert made.error is not None
            raise made.error
        return made.matcher.copy()

    def leave(self, constraint: Constraint) -> None:
        """Nobody waits for it any more."""
        with self._changed:
            self._wanted.pop(constraint, None)

    def wait(self, within_s: float) -> None:
        """Until something was made."""
        select([self.news], [], [], within_s)
        self.hear()

    def hear(self) -> None:
        """To call before `find`, by whoever polls `news`."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.news)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="grammars", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        trial = Trial(*self._of)
        compiler: Compiler | None = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted)
                constraint = next(iter(self._wanted))
            matcher, error = None, None
            try:
                grammar = trial.grammar(constraint)
                compiler = compiler or Compiler(*self._of)
                matcher = compiler.matcher(grammar)
            except ConstraintError as why:
                error = why
            except Exception as why:  # starting a process may fail in many ways
                error = ConstraintError(f"its grammar could not be made: {type(why).__name__}")
            until = inf if error is None else monotonic() + _REFUSED_S
            with self._changed:
                self._made[constraint] = _Made(matcher, error, until)
                self._wanted.pop(constraint, None)
                while len(self._made) > _KEPT:
                    self._made.popitem(last=False)
            os.eventfd_write(self.news, 1)
