"""Where one output stands in its grammar, and what finding that out may take."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from time import monotonic, thread_time
from typing import TypeVar

from services.worker.engine.grammar.library import Cancelled, GrammarError, State, Words

TOKEN_S = 0.05
"""Processor time that a job may take: of a token to take in, and of the mask behind it. An ordinary
one takes 40 µs, the first of a large schema 3 ms."""
_SAVED_S = 0.2
_OWED_S = 0.2
"""By a tenant, at most: he waits four seconds for it. A job is broken off long before."""
_EARNED_S = 0.0005
_SHARE = 0.05
"""Of the time: what a tenant has back of what it used."""

_Given = TypeVar("_Given")


class ConstraintError(Exception):
    """The request's constraint cannot be met, or not be made; told to the client."""


class Unavailable(Exception):
    """A grammar could not be made, or gone on with, for a reason that has nothing to do with it."""


class Late(Exception):
    """There is no time for it now: it is to be asked again."""


class TooSlow(ConstraintError):
    def __init__(self) -> None:
        super().__init__(
            "its grammar is too ambiguous or too large: it takes too long to tell which tokens may "
            "come next"
        )


class Tenant:
    """Processor time that all outputs of a tenant may take together. Who has none left waits, and
    has some again: for each token, and by the time that passes. What one job takes that cannot be
    broken off keeps the others waiting no longer than what can be."""

    def __init__(self) -> None:
        self._left_s, self._at = _SAVED_S, monotonic()

    @property
    def left_s(self) -> float:
        now = monotonic()
        self.add((now - self._at) * _SHARE)
        self._at = now
        return self._left_s

    def add(self, seconds: float) -> None:
        self._left_s = max(-_OWED_S, min(_SAVED_S, self._left_s + seconds))


class Allowance:
    """Processor time that all outputs of a tenant in one grammar may take: so much for each token,
    and what was saved, so that what is ambiguous, and takes longer with each token, ends before
    others wait long. All of it is of the tenant's, too."""

    def __init__(self, tenant: Tenant | None = None) -> None:
        self.tenant = tenant or Tenant()
        self._left_s = _SAVED_S
        self._ended_at: float | None = None

    @property
    def over(self) -> bool:
        return self._left_s < 0

    def earn(self, tokens: int) -> None:
        self._left_s = min(_SAVED_S, self._left_s + tokens * _EARNED_S)
        self.tenant.add(tokens * _EARNED_S)

    def spend(self, seconds: float) -> None:
        self._left_s -= seconds
        self.tenant.add(-seconds)

    def end(self) -> None:
        """Nobody may go on."""
        self._left_s = -1e9
        self._ended_at = self._ended_at or monotonic()

    @property
    def ended_s(self) -> float:
        """Seconds since it ended; 0: it has not."""
        return monotonic() - self._ended_at if self._ended_at else 0.0


class Matcher:
    """Of one output. The engine's thread gives it the tokens and reads what is known; it calls
    nothing of the library. That is for another thread, in jobs (filler.py): `take`, `follow`,
    `go_on`, `fill_along`. They take turns: the engine waits for a job, or has not begun one."""

    def __init__(self, start: State, allowance: Allowance, so_far: Seq[int] = ()) -> None:
        """`start`: at an output's beginning; it stays there. `so_far`: of the output."""
        self.allowance = allowance
        self.ended = False
        """It is whole, and nothing can follow."""
        self.forced: list[int] = []
        """What must come next, as far as that is one way to put it into tokens, and known."""
        self.words: Words | None = None
        """What may come next, if that is known: bit i % 32 of word i // 32 is token i's."""
        self.error: Exception | None = None
        """Why it cannot go on."""
        self._followed = False
        """`forced` is known."""
        self._start = start
        self._state: State | None = None
        """Behind what was taken in."""
        self._at_work: State | None = None
        """In which a call runs, if one does."""
        self._given = [*so_far]
        """Tokens not taken in."""

    def copy(self, allowance: Allowance | None = None, so_far: Seq[int] = ()) -> "Matcher":
        """Another output's. `allowance`: another one than this has."""
        return Matcher(self._start, allowance or self.allowance, so_far)

    @property
    def num_given(self) -> int:
        """Tokens that it has not taken in: those behind its end, or for which there was no time."""
        return len(self._given)

    def give(self, tokens: Seq[int]) -> None:
        """The output goes on with them."""
        self._given += tokens
        self.words, self.forced, self._followed = None, [], False

    def allows(self, token: int) -> bool:
        """Whether it may come next, as far as is known."""
        return self.words is None or bool(self.words[token // 32] >> token % 32 & 1)

    def cancel(self) -> None:
        """Breaks off the job that another thread runs."""
        if state := self._at_work:
            state.cancel()

    def fail(self, error: Exception) -> None:
        """It cannot go on; nor can, if it is too slow, any of its allowance."""
        self.error = self.error or error
        if isinstance(error, TooSlow):
            self.allowance.end()

    def take(self, most: int) -> None:
        """Takes in what it was given, so many tokens at most. Raises as `go_on` does."""
        if self.ended:
            return
        self._check()
        state = self._copied()
        for _ in range(min(most, len(self._given))):
            if self.ended:
                return
            self.allowance.earn(1)
            self._run(state, state.consume, self._given[0])
            del self._given[0]
            self.ended = state.stopped

    def follow(self) -> None:
        """Takes in what it was given, and finds what is forced then. Raises ConstraintError where
        nothing may come, or it takes too long to tell; and Late."""
        self.take(len(self._given))
        if not (self.ended or self._followed):
            state = self._copied()
            self.forced = self._run(state, state.forced)
            self._followed = True

    def go_on(self) -> None:
        """Follows, and finds what may come then: `words`. Raises as `follow` does."""
        self.follow()
        if not self.ended and self.words is None:
            state = self._copied()
            words = state.no_words()
            self._run(state, state.fill, words)
            self.words = words

    def fill_along(self, words: Words, guesses: Seq[int]) -> None:
        """Goes on, and tells what may come then, and behind each of `guesses`: rows of which
        nothing can be told, or behind its end, forbid everything. Raises as `go_on` does.
        words: [1 + guesses, ceil(vocab / 32)]"""
        self.go_on()
        if self.words is None:
            return
        words[0] = self.words
        if not guesses:
            return
        ahead, row = self._copied().copy(), 0
        words[1:] = 0
        try:
            for row, token in enumerate(guesses, 1):
                self._spend(ahead, ahead.consume, token)
                if ahead.stopped:
                    break
                self._spend(ahead, ahead.fill, words[row])
        except GrammarError:  # a guess, which may be wrong, costs no more than its time
            words[row:] = 0

    def _check(self) -> None:
        if self.error is not None:
            raise self.error
        if self.allowance.over:
            self.fail(TooSlow())
            raise TooSlow
        if self.allowance.tenant.left_s < 0:
            raise Late

    def _copied(self) -> State:
        if self._state is None:
            self._state = self._start.copy()
        return self._state

    def _run(self, state: State, call: Callable[..., _Given], *arguments: object) -> _Given:
        """Raises ConstraintError, and it cannot go on then."""
        began = thread_time()
        try:
            given = self._spend(state, call, *arguments)
            if thread_time() - began > TOKEN_S:
                raise Cancelled
            return given
        except Cancelled:
            self.fail(TooSlow())
            raise TooSlow from None
        except GrammarError as error:
            self.fail(found := ConstraintError(str(error)))
            raise found from None

    def _spend(self, state: State, call: Callable[..., _Given], *arguments: object) -> _Given:
        """This thread's time on the processor. Raises GrammarError."""
        began, self._at_work = thread_time(), state
        try:
            return call(*arguments)
        finally:
            self._at_work = None
            self.allowance.spend(thread_time() - began)
