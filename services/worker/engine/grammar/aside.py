"""Requests that wait for their grammars, while others overtake them."""

from collections.abc import Iterator

from services.worker.engine.grammar.compiler import ConstraintError
from services.worker.engine.grammar.grammars import Grammars
from services.worker.engine.messages import Constraint, ModelInfo, RequestError
from services.worker.engine.sequence import Sequence

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

    def add(self, sequence: Sequence) -> None:
        self.sequences[sequence.id] = sequence

    def leave(self, request_id: str) -> Sequence | None:
        """Gives a sequence that waits no more."""
        sequence = self.sequences.pop(request_id, None)
        if sequence is not None:
            constraint = _constraint(sequence)
            if all(_constraint(other) != constraint for other in self.sequences.values()):
                self._grammars.leave(constraint)
        return sequence

    def wait(self) -> None:
        """A moment, for something to be made."""
        self._grammars.wait(_LOOK_S)

    def take(self) -> Iterator[tuple[Sequence, RequestError | None]]:
        """Those whose grammars are made, with their matchers behind what was generated before, or
        why there is none."""
        for sequence in list(self.sequences.values()):
            try:
                matcher = self._grammars.find(_constraint(sequence))
            except ConstraintError as error:
                del self.sequences[sequence.id]
                yield sequence, RequestError("invalid_request", str(error), "constraint")
                continue
            if matcher is None:
                continue
            del self.sequences[sequence.id]
            if count := sequence.request.generated_prefix:
                matcher.advance(sequence.tokens[-count:])
            sequence.matcher = matcher
            yield sequence, None


def _constraint(sequence: Sequence) -> Constraint:
    constraint = sequence.request.sampling.constraint
    assert constraint is not None
    return constraint
