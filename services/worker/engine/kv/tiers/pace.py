"""How soon blocks come from below the device.

    loading = delay + blocks * reading one

Both are measured with each loading. The delay is what passes besides the reading: others' blocks
that are read before, and the step that runs.
"""

_MOVES = 0.2
"""By so much of the difference each loading moves what is believed."""
_MOST = 4.0
"""Times as much as believed is as much as any is taken for: it was held up by something else."""
_FADES = 0.98
"""Who computes instead learns nothing of the disk: each time it is believed to be so much faster,
so that one that was slow is tried again."""


class Pace:
    block_s = 0.0
    """0: not known."""
    delay_s = 0.0

    def expected_s(self, blocks: int) -> float:
        """Nothing, as long as that is not known: what was never tried is."""
        return self.delay_s + self.block_s * blocks if self.block_s else 0.0

    def learn(self, blocks: int, read_s: float, waited_s: float) -> None:
        """So many came, within `waited_s`, of which the disk took `read_s`; or nobody waited for
        them any longer."""
        if not read_s:
            return
        block_s, delay_s = read_s / blocks, max(0.0, waited_s - read_s)
        if not self.block_s:
            self.block_s, self.delay_s = block_s, delay_s
            return
        most = _MOST * self.expected_s(blocks)
        self.block_s += _MOVES * (min(block_s, most / blocks) - self.block_s)
        self.delay_s += _MOVES * (min(delay_s, most) - self.delay_s)

    def decline(self) -> None:
        """Somebody computes what he could have loaded."""
        self.block_s *= _FADES
        self.delay_s *= _FADES
