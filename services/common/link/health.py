"""What the caller's end of a link knows of its peer's health."""

from services.common.link.frames import LinkLostError, Vitals


class PeerHealth:
    """A peer is silent when it sends no frame, and stalled when it has work and makes no step.

    Time is counted in beats of the caller's loop: while this process itself hangs, no peer is
    blamed.
    """

    def __init__(self, silent_after_s: float, stalled_after_s: float) -> None:
        """`stalled_after_s`: longer by what a long step takes, see `Vitals.patience_s`."""
        self.vitals = Vitals(0, 0)
        self.unmoved_s = 0.0  # while there was work
        self.stalled_at: int | None = None  # the step counter's value when it was given up
        self._silent_after_s = silent_after_s
        self._stalled_after_s = stalled_after_s
        self._silent_s = 0.0

    def connected(self) -> None:
        """A new connection: what was missed on the last one is forgotten."""
        self._silent_s = self.unmoved_s = 0.0

    def heard(self) -> None:
        """A frame came."""
        self._silent_s = 0.0

    def beat(self, beat_s: float) -> bool:
        """So much time went by; returns whether the peer has stalled just now. Raises LinkLostError
        when it is silent."""
        self._silent_s += beat_s
        if self._silent_s > self._silent_after_s:
            raise LinkLostError(f"silent for {self._silent_s:.1f} s")
        self.unmoved_s += beat_s if self.vitals.pending else 0.0
        patience_s = self.vitals.patience_s(self._stalled_after_s)
        if self.unmoved_s <= patience_s or self.stalled_at is not None:
            return False
        self.stalled_at = self.vitals.steps
        return True

    def observe(self, vitals: Vitals) -> bool:
        """Takes the vitals of a frame; returns whether they end a stall: the steps move again."""
        moved = vitals.steps != self.vitals.steps
        if moved or not vitals.pending or not self.vitals.pending:
            self.unmoved_s = 0.0
        self.vitals = vitals
        if self.stalled_at is None or vitals.steps == self.stalled_at:
            return False
        self.stalled_at = None
        return True

    def well_at_first(self, told: Vitals) -> bool:
        """Whether the first frame of a connection leaves no stall: one goes on only with work."""
        if told.pending > 0 and told.steps == self.stalled_at:
            return False
        self.stalled_at = None
        return True
