"""The low lane: what nobody waits for stands aside for prompts of those who wait."""

from collections import deque
from collections.abc import Iterable

from services.worker.engine.sequence import Sequence

PATIENT = 3
"""Nobody waits for what has this priority, or a larger one."""
_MOST_ASIDE = 16


def is_patient(sequence: Sequence) -> bool:
    return sequence.request.priority >= PATIENT


class LowLane:
    def __init__(self) -> None:
        self.aside = 0
        """Steps in a row that were without it."""

    def part(
        self, decodes: list[Sequence], begun: deque[Sequence]
    ) -> tuple[list[Sequence], deque[Sequence]]:
        """Those of a step that take part in it: without the low lane, if somebody who waits has a
        prompt begun; but for `_MOST_ASIDE` steps in a row at most."""
        if self.aside == _MOST_ASIDE or all(map(is_patient, begun)):
            self.aside = 0
            return decodes, begun
        self.aside += 1
        return _urgent(decodes), deque(_urgent(begun))


def _urgent(sequences: Iterable[Sequence]) -> list[Sequence]:
    return [one for one in sequences if not is_patient(one)]
