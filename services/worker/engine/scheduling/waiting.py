"""Who waits for a place, and in which order."""

import heapq

from services.worker.engine.sequence import Sequence, Status


class Waiting:
    """A queue by `Sequence.order`."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """To be computed here, over all of them."""
        self._heap: list[tuple[tuple[int, float, int], Sequence]] = []
        """Those finished meanwhile are skipped when they come up."""
        self._aside: list[Sequence] = []

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (sequence.order, sequence))
        self.num_tokens += sequence.queued_tokens

    @property
    def head(self) -> Sequence | None:
        while self._heap and self._heap[0][1].status is Status.FINISHED:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        """Takes the head out."""
        _, sequence = heapq.heappop(self._heap)
        self.num_tokens -= sequence.queued_tokens

    def set_aside(self) -> None:
        """The head waits for something else first: whoever is behind it may go ahead."""
        self._aside.append(heapq.heappop(self._heap)[1])

    def bring_back(self) -> None:
        """All that were set aside, each to its place in the order."""
        for sequence in self._aside:
            heapq.heappush(self._heap, (sequence.order, sequence))
        self._aside.clear()

    def leave(self, sequence: Sequence) -> None:
        """It ends while it waits."""
        self.num_tokens -= sequence.queued_tokens
