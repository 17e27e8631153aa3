"""The figures of a run through the front door: rates, percentiles, goodput."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.openai_stream import Outcome

_PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Slo:
    """What a request must meet to count as good; None asks nothing."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @property
    def asked(self) -> bool:
        return any(limit is not None for limit in (self.ttft_ms, self.tpot_ms, self.e2e_ms))

    def met_by(self, outcome: Outcome) -> bool:
        """A failed request meets nothing; one without any text has no TTFT and does not meet it."""
        if outcome.error is not None:
            return False
        if self.ttft_ms is not None and (
            outcome.ttft_s is None or outcome.ttft_s * 1000 > self.ttft_ms
        ):
            return False
        # Fewer than two tokens have no time between them that could be too long.
        if self.tpot_ms is not None and (outcome.tpot_s or 0.0) * 1000 > self.tpot_ms:
            return False
        return self.e2e_ms is None or outcome.e2e_s * 1000 <= self.e2e_ms


def totals(outcomes: Sequence[Outcome], slo: Slo, lag_s: Sequence[float]) -> dict[str, Any]:
    """Latencies in seconds, over the requests that succeeded; rates over `wall_s`, from the first
    request sent to the last one ended. `lag_s`: how late the client's own loop woke up.
    """
    good = [o for o in outcomes if o.error is None]
    wall = _wall(outcomes)
    output = sum(o.completion_tokens for o in good)
    prompt = sum(o.prompt_tokens for o in good)
    figures: dict[str, Any] = {
        "requests": len(outcomes),
        "failed": len(outcomes) - len(good),
        "errors": dict(Counter(o.error for o in outcomes if o.error is not None).most_common(20)),
        "wall_s": wall,
        "prompt_tokens": prompt,
        "cached_tokens": sum(o.cached_tokens for o in good),
        "output_tokens": output,
        "requests_per_s": len(good) / wall,
        "output_tok_per_s": output / wall,
        "total_tok_per_s": (output + prompt) / wall,
        "ttft_s": _spread(o.ttft_s for o in good),
        "itl_s": _spread(gap for o in good for gap in o.itl_s),
        "tpot_s": _spread(o.tpot_s for o in good),
        "e2e_s": _spread(o.e2e_s for o in good),
        "send_delay_s": _spread(o.started_s - o.arrival_s for o in outcomes),
        "client_lag_s": _spread(lag_s),
    }
    if slo.asked:
        met = sum(slo.met_by(o) for o in outcomes)
        figures["slo"] = {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms, "e2e_ms": slo.e2e_ms}
        figures["goodput_requests_per_s"] = met / wall
        figures["goodput_share"] = met / len(outcomes)
    return figures


def _wall(outcomes: Sequence[Outcome]) -> float:
    first = min(o.started_s for o in outcomes)
    last = max(o.started_s + o.e2e_s for o in outcomes)
    return max(last - first, 1e-9)


def _spread(seconds: Iterable[float | None]) -> dict[str, float] | None:
    """Mean, percentiles and maximum; None when there is nothing to measure."""
    values = np.array([s for s in seconds if s is not None])
    if not len(values):
        return None
    found = {f"p{p}": float(np.percentile(values, p)) for p in _PERCENTILES}
    return {"mean": float(values.mean()), **found, "max": float(values.max())}
