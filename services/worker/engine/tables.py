"""How sequences come by their blocks: from the prefix cache, from the pool, and back."""

from collections.abc import Iterable

from services.worker.engine.block_pool import BlockPool, IntegrityError
from services.worker.engine.coming import Coming
from services.worker.engine.sequence import Sequence


class Tables:
    """The pool's one owner: fills the block tables, and names what is complete in them."""

    def __init__(self, pool: BlockPool, prefix_caching: bool) -> None:
        self.pool = pool
        self.prefix_caching = prefix_caching
        self._coming = Coming()

    def to_compute(self, sequence: Sequence) -> int:
        """Tokens of one that holds nothing that are to be computed here, and are not cached now."""
        if sequence.remote:
            return 0
        return len(sequence.tokens) - len(self._cached(sequence)) * self.pool.block_size

    def fill(self, sequence: Sequence, headroom: int) -> bool:
        """Gives it blocks for all its tokens, those in the cache among them, if `headroom` others
        stay free; and none, if the next that it needs is being computed."""
        cached = self._cached(sequence)
        if self._is_coming(sequence, len(cached)):
            return False
        new = sequence.blocks_needed - len(cached)
        if new + headroom > self.pool.num_free - self.pool.num_unheld(cached):
            return False
        self.pool.acquire(cached)
        sequence.hold(cached + self.pool.allocate(new))
        sequence.num_published = sequence.num_received = len(cached)
        if self.prefix_caching and not sequence.remote:
            full = len(sequence.tokens) // self.pool.block_size
            self._coming.add(sequence.hash_blocks(full)[len(cached) :], sequence)
        return True

    def stretch(self, sequence: Sequence, count: int) -> int:
        """Room behind its tokens for `count` guesses, or as many as there are free blocks for."""
        while sequence.length + count > sequence.room and self.pool.num_free:
            sequence.hold(self.pool.allocate(1))
        return min(count, sequence.room - sequence.length)

    def trim(self, sequence: Sequence) -> None:
        """Takes back what only guesses needed."""
        self.pool.free(sequence.let_go())

    def publish(self, sequence: Sequence) -> None:
        """Makes its newly completed blocks findable."""
        complete = sequence.num_computed // self.pool.block_size
        if complete == sequence.num_published or not self.prefix_caching:
            return
        hashes = sequence.hash_blocks(complete)
        for index in range(sequence.num_published, complete):
            self.pool.publish(sequence.blocks[index], hashes[index])
        self._coming.take(hashes[sequence.num_published :], sequence)
        sequence.num_published = complete

    def leave(self, sequence: Sequence) -> None:
        """It computes no more of what others may wait for."""
        self._coming.take(sequence.hashes, sequence)

    def release(self, sequence: Sequence) -> None:
        """Takes all its blocks back. Who asks for no tokens does not go on after its prompt, so
        what it computed is worth less than what it found."""
        found = None if sequence.pool is None else sequence.num_received
        self.pool.free(sequence.blocks, found)
        sequence.give_back()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raises IntegrityError if a block is lost or held twice by all that hold any."""
        held = [sequence.blocks for sequence in sequences]
        self.pool.check(held)
        if not held and self._coming:
            raise IntegrityError("blocks are awaited that nobody computes")

    def _usable(self, sequence: Sequence) -> int:
        """Full blocks that may come from the cache. A remote prompt is not computed here, so all of
        it may; else its last token is, for its logits, or all are, whose logprobs or states are
        wanted."""
        pool = sequence.pool
        if sequence.scores is not None or (pool is not None and pool.of_all):
            return 0
        return (len(sequence.tokens) - (not sequence.remote)) // self.pool.block_size

    def _cached(self, sequence: Sequence) -> list[int]:
        if not self.prefix_caching:
            return []
        return self.pool.match(sequence.hash_blocks(self._usable(sequence)))

    def _is_coming(self, sequence: Sequence, index: int) -> bool:
        """Whether block `index` is being computed, and of use."""
        if not self.prefix_caching or index >= self._usable(sequence):
            return False
        return sequence.hash_blocks(index + 1)[index] in self._coming
