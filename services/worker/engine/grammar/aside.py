"""Requests that wait for their grammars, while others overtake them."""

import logging
from collections.abc import Iterator
from contextlib import suppress
from time import monotonic

from services.worker.engine.grammar.grammars import Grammars
from services.worker.engine.grammar.matcher import ConstraintError, Matcher, Unavailable
from services.worker.engine.grammar.so_far import SoFar
from services.worker.engine.messages import Constraint
from services.worker.engine.outputs import ModelInfo, RequestError
from services.worker.engine.sequence import Sequence

log = logging.getLogger(__name__)

_LOOK_S = 0.01
_ENDS_S = 2.0


class Aside:
    def __init__(self, folder: str, info: ModelInfo) -> None:
        """`folder`: of the checkpoint."""
        self._grammars = Grammars(folder, info.vocab_size, info.eos_token_ids, info.generates)
        self._so_far = SoFar(self._grammars.tell)
        self._behind: dict[str, Matcher] = {}
        """Of sequences that go on here: they take in what was generated before."""
        self.sequences: dict[str, Sequence] = {}
        """In the order in which they came."""

    @property
    def news(self) -> int:
        """A file descriptor, readable when `take` may give something, until `hear`."""
        return self._grammars.news

    def hear(self) -> None:
        """`news` was polled. Whether anybody waits for it or not: it would stay readable."""
        self._grammars.hear()

    def close(self) -> None:
        """Ends its threads, whatever they are at: those that take long are not waited for."""
        until = monotonic() + _ENDS_S
        self._so_far.close(until)
        self._grammars.close(until)

    def add(self, sequence: Sequence) -> None:
        self.sequences[sequence.id] = sequence
        with suppress(ConstraintError, Unavailable):  # which `take` tells
            self._grammars.want(*_wanted(sequence))

    def leave(self, request_id: str) -> Sequence | None:
        """Gives a sequence that waits no more."""
        sequence = self.sequences.pop(request_id, None)
        if matcher := self._behind.pop(request_id, None):
            self._so_far.leave(matcher)
        if sequence is not None:
            wanted = _wanted(sequence)
            if all(_wanted(other) != wanted for other in self.sequences.values()):
                self._grammars.leave(*wanted)
        return sequence

    def wait(self) -> None:
        """A moment, for something to be made."""
        self._grammars.wait(_LOOK_S)

    def take(self) -> Iterator[tuple[Sequence, RequestError | None]]:
        """Those whose matchers are there, behind what was generated before, or why not."""
        for sequence in list(self.sequences.values()):
            try:
                matcher = self._matcher(sequence)
            except Exception as error:  # of whatever kind, it is this one's alone
                self.leave(sequence.id)
                yield sequence, _told(error)
                continue
            if matcher is not None:
                del self.sequences[sequence.id]
                self._behind.pop(sequence.id, None)
                sequence.matcher = matcher
                yield sequence, None

    def _matcher(self, sequence: Sequence) -> Matcher | None:
        matcher = self._behind.get(sequence.id)
        if matcher is None:
            before = sequence.request.generated_prefix
            so_far = sequence.tokens[-before:] if before else []
            matcher = self._grammars.find(*_wanted(sequence), so_far)
            if matcher is None or not so_far:
                return matcher
            self._so_far.add(matcher)
            self._behind[sequence.id] = matcher
        if not self._so_far.ready(matcher):
            return None
        if matcher.error is not None:
            raise matcher.error
        return matcher


def _wanted(sequence: Sequence) -> tuple[Constraint, bytes]:
    """What, and by which tenant: each has a salt of its own."""
    constraint = sequence.request.sampling.constraint
    assert constraint is not None
    return constraint, sequence.request.salt


def _told(error: Exception) -> RequestError:
    if isinstance(error, ConstraintError):
        return RequestError("invalid_request", str(error), "constraint")
    if isinstance(error, Unavailable):
        log.error("a grammar was not made: %s", error)
        return RequestError("internal", str(error))
    log.error("a grammar was not gone on with", exc_info=error)
    return RequestError("internal", f"The grammar failed: {type(error).__name__}")
