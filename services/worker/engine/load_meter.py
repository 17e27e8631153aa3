"""How fast the engine is, as moving averages that a router can predict from."""

_WEIGHT = 0.1
"""Of the newest step: about the last ten count."""


class LoadMeter:
    """0 stands for "not yet known"."""

    def __init__(self) -> None:
        self.prefill_tokens_per_s = 0.0
        self.decode_step_ms = 0.0

    def add(self, prefill_tokens: int, decode_tokens: int, duration_ns: int) -> None:
        """Counts a step. A mixed step counts for prefill: the decodes in it ride along."""
        if prefill_tokens:
            rate = prefill_tokens * 1e9 / max(1, duration_ns)
            self.prefill_tokens_per_s = _average(self.prefill_tokens_per_s, rate)
        elif decode_tokens:
            self.decode_step_ms = _average(self.decode_step_ms, duration_ns / 1e6)


def _average(old: float, new: float) -> float:
    return old + _WEIGHT * (new - old) if old else new
