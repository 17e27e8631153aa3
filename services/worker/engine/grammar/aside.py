"""Requests that wait for their grammars, while others overtake them."""

import logging
from collections.abc import Iterator

from services.worker.engine.grammar.compiler import ConstraintError, Unavailable
from services.worker.engine.grammar.grammars import Grammars
from services.worker.engine.messages import Constraint, ModelInfo, RequestError
from services.worker.engine.sequence import Sequence

log = logging.getLogger(__name__)

_LOOK_S = 0.01


class Aside:
    def __init__(self, folder: str, info: ModelInfo) -> None:
        """`folder`: of the checkpoint."""
        self._grammars = Grammars(folder, info.vocab_size, info.eos_token_ids)
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
        self._grammars.close()

    def add(self, sequence: Sequence) -> None:
        self.sequences[sequence.id] = sequence
        self._grammars.want(*_wanted(sequence))

    def leave(self, request_id: str) -> Sequence | None:
        """Gives a sequence that waits no more."""
        sequence = self.sequences.pop(request_id, None)
        if sequence is not None:
            wanted = _wanted(sequence)
            if all(_wanted(other) != wanted for other in self.sequences.values()):
                self._grammars.leave(*wanted)
        return sequence

    def wait(self) -> None:
        """A moment, for something to be made."""
        self._grammars.wait(_LOOK_S)

    def take(self) -> Iterator[tuple[Sequence, RequestError | None]]:
        """Those whose grammars are made, with their matchers behind what was generated before, or
        why there is none."""
        for sequence in list(self.sequences.values()):
            try:
                matcher = self._grammars.find(*_wanted(sequence))
            except (ConstraintError, Unavailable) as error:
                del self.sequences[sequence.id]
                yield sequence, _told(error)
                continue
            if matcher is None:
                continue
            del self.sequences[sequence.id]
            if count := sequence.request.generated_prefix:
                matcher.advance(sequence.tokens[-count:])
            sequence.matcher = matcher
            yield sequence, None


def _wanted(sequence: Sequence) -> tuple[Constraint, bytes]:
    """What, and by which tenant: each has a salt of its own."""
    constraint = sequence.request.sampling.constraint
    assert constraint is not None
    return constraint, sequence.request.salt


def _told(error: ConstraintError | Unavailable) -> RequestError:
    if isinstance(error, ConstraintError):
        return RequestError("invalid_request", str(error), "constraint")
    log.error("a grammar was not made: %s", error)
    return RequestError("internal", str(error))
