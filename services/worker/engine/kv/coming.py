"""Blocks that are being computed: who needs one of them, too, waits for it."""

from collections.abc import Iterable

from services.worker.engine.sequence import Sequence


class Coming:
    """Hashes of full blocks that are to be published, by who computes them."""

    def __init__(self) -> None:
        self._by: dict[bytes, Sequence] = {}

    def by(self, block_hash: bytes) -> Sequence | None:
        """Who computes it."""
        return self._by.get(block_hash)

    def __bool__(self) -> bool:
        return bool(self._by)

    def add(self, hashes: Iterable[bytes], sequence: Sequence) -> None:
        """The sequence computes them; those that another computes already stay that one's."""
        for block_hash in hashes:
            self._by.setdefault(block_hash, sequence)

    def take(self, hashes: Iterable[bytes], sequence: Sequence) -> None:
        """The sequence has published them, or will not."""
        for block_hash in hashes:
            if self._by.get(block_hash) is sequence:
                del self._by[block_hash]
