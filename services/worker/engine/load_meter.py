"""How fast the engine is, as moving averages that a router can predict from."""

_KEPT = 0.9
"""Of what was measured before, with each step: about the last ten count."""
_HALF_LIFE_S = 10.0
"""Of what was measured, while nothing is: after a pause the newest step counts most, so that one
slow step (the first of all, a moment without CPU) is not held against the engine for ever."""

_FEW = 16
"""Prompt tokens. A step with fewer takes what a decode step takes, and says nothing of long
prompts: of one whose prefix is cached only the end is computed."""

# What an engine that has measured nothing is expected to do at least: a guess on the slow side.
_SLOW_FLOPS = {"cpu": 5e9, "cuda": 1e12}


class _Mean:
    """amount / seconds, the older the measurement the less its weight."""

    def __init__(self) -> None:
        self.amount = self.seconds = 0.0
        self._measured_ns = 0

    def add(self, amount: float, started_ns: int, duration_ns: int) -> None:
        idle_s = max(0, started_ns - self._measured_ns) / 1e9
        kept = _KEPT * 0.5 ** (idle_s / _HALF_LIFE_S)
        self.amount = self.amount * kept + amount
        self.seconds = self.seconds * kept + max(1, duration_ns) / 1e9
        self._measured_ns = started_ns + duration_ns


class LoadMeter:
    """0 stands for "not yet known"."""

    def __init__(self, num_parameters: int, device: str) -> None:
        flops = _SLOW_FLOPS.get(device.split(":")[0], _SLOW_FLOPS["cuda"])
        self._guessed_token_s = 2 * num_parameters / flops
        self._prefill = _Mean()
        self._decode = _Mean()

    @property
    def prefill_tokens_per_s(self) -> float:
        return self._prefill.amount / self._prefill.seconds if self._prefill.seconds else 0.0

    @property
    def decode_step_ms(self) -> float:
        return 1000 * self._decode.seconds / self._decode.amount if self._decode.amount else 0.0

    def add(
        self, prefill_tokens: int, decode_tokens: int, started_ns: int, duration_ns: int
    ) -> None:
        """Counts a step. A mixed step counts for prefill: the decodes in it ride along. With a few
        prompt tokens it is they that ride along."""
        if prefill_tokens >= _FEW:
            self._prefill.add(prefill_tokens, started_ns, duration_ns)
        elif prefill_tokens or decode_tokens:
            self._decode.add(1, started_ns, duration_ns)

    def expected_s(self, prefill_tokens: int, sequences: int) -> float:
        """What a step of so many prompt tokens, over so many sequences in all, should take."""
        decode_s = self.decode_step_ms / 1000 or sequences * self._guessed_token_s
        rate = self.prefill_tokens_per_s
        prefill_s = prefill_tokens / rate if rate else prefill_tokens * self._guessed_token_s
        return prefill_s + (decode_s if sequences else 0.0)
