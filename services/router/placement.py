"""Where a request runs: the placement that costs everybody the least time, by prediction.

Costs are in sequence-seconds: what the request itself will wait, plus the delay that it brings upon
the sequences already decoding there. So one sum weighs a cached prefix against a queue, and a split
against the interference that it avoids. docs/decisions/0003-placement.md explains the model.

Pure functions over the workers' views: no I/O, nothing remembered.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

from services.router.block_index import Reach
from services.router.workers import DECODE_ROLES, PREFILL_ROLES, Worker

SplitMode = Literal["auto", "always", "never"]

# Until a worker of the model has measured its own.
PRIOR_PREFILL_TOKENS_PER_S = 2000.0
PRIOR_STEP_S = 0.03
# A rate is trusted for so long after it last moved, and then less and less: a worker that once was
# slow, and so gets nothing to measure itself by, is tried again.
TRUSTED_S = 30.0
FORGOTTEN_S = 120.0
OPTIMISM = 1.05  # a rate that is not known is taken for a little better than the best that is
# Share by which a full batch slows a step. Real steps may stay flat; this also keeps room free on
# every worker, so it is not zero even then.
FULL_BATCH_SLOWDOWN = 0.5
# A request may end early, at its end-of-text token: more of max_tokens is not counted on.
EXPECTED_OUTPUT_TOKENS = 128
# What a sequence that runs now is expected to have left.
REMAINING_TOKENS = 64
# Handing KV over: one round trip to reserve and one to commit, and bytes at a pessimistic rate.
HANDOVER_S = 0.01
HANDOVER_TOKENS_PER_S = {True: 1_000_000.0, False: 100_000.0}  # on one host; between hosts
# Blocks on disk, against computing them, until a worker has measured its own.
PRIOR_LOADS_FASTER = 5.0
# Pairs of prefill and decode workers weighed: the best few of each side.
PAIR_POOL = 4
# Candidates named in the why-record.
TOLD = 6


@dataclass(frozen=True)
class Ask:
    """What placement must know of a request."""

    prompt_tokens: int
    max_tokens: int
    matched: Mapping[int, int]  # index bit → leading blocks held (BlockIndex.match)
    split: SplitMode
    split_min_tokens: int
    prompt_alone: bool = False  # nothing is decoded
    below: Mapping[int, Reach] = field(default_factory=dict)  # likewise, with blocks on disk


@dataclass(frozen=True)
class Rates:
    """How fast a worker is, its own measurements or the best of its peers'."""

    prefill_tokens_per_s: float
    step_s: float


@dataclass(frozen=True)
class Plan:
    """One possible placement, with the figures that speak for or against it. Times in seconds."""

    decode: Worker
    prefill: Worker | None  # None: unsplit
    cached_tokens: int  # of the prompt, where it is computed
    uncached_tokens: int
    ttft_s: float
    itl_s: float
    cost_s: float
    loaded_tokens: int = 0  # of the cached ones: from disk

    @property
    def first(self) -> Worker:
        """The worker that computes the prompt."""
        return self.prefill or self.decode

    @property
    def name(self) -> str:
        """ "worker-a" or "worker-a > worker-b"."""
        return f"{self.prefill.id} > {self.decode.id}" if self.prefill else self.decode.id


@dataclass(frozen=True)
class Placement:
    """The chosen plan and why."""

    plan: Plan
    candidates: Sequence[Plan]  # best first, the chosen among them
    split_reason: str

    def best_costs(self) -> dict[str, float]:
        """The lowest cost of each kind that was weighed: "split", "unsplit"."""
        costs: dict[str, float] = {}
        for plan in self.candidates:
            costs.setdefault("split" if plan.prefill else "unsplit", plan.cost_s)
        return costs


def place(ask: Ask, workers: Sequence[Worker], now: float | None = None) -> Placement:
    """The best placement on these workers (all ready, all of one checkpoint, at least one).

    `now`: monotonic seconds, the clock's by default.
    """
    rates = rates_of(workers, time.monotonic() if now is None else now)
    decoding = [w for w in workers if w.role in DECODE_ROLES]
    prefilling = [w for w in workers if w.role in PREFILL_ROLES]
    # With no decode worker left, a prefill worker is better than an error; and so the other way
    # round for a prompt alone.
    homes = prefilling or decoding if ask.prompt_alone else decoding or prefilling
    unsplit = sorted((_unsplit(ask, w, rates[w]) for w in homes), key=_by_cost)
    pairs, reason = _weigh_split(ask, unsplit[0], prefilling, decoding, rates)
    plans = sorted([*pairs, *unsplit], key=_by_cost)
    best = plans[0]
    if ask.split == "always" and pairs:
        best, reason = min(pairs, key=_by_cost), "asked for"
    if not reason:
        reason = "cheaper split" if best.prefill else "cheaper unsplit"
    return Placement(best, plans, reason)


def reasons(chosen: Plan, best: Sequence[Plan], weighed: int) -> dict[str, str]:
    """The predictions of the chosen and the `best` of so many candidates, for the why-record."""
    told = {plan.name: _figures(plan) for plan in best}
    told[chosen.name] = _figures(chosen)
    if weighed > len(told):
        told["more candidates"] = str(weighed - len(told))
    return told


def rates_of(workers: Sequence[Worker], now: float) -> dict[Worker, Rates]:
    """Measured rates, as far as they are to be trusted.

    What a worker has not measured, or not for long, is taken for a little better than its peers'
    best, so that the worker is tried; between, for something between the two. Without any
    measurement the priors stand.
    """
    speeds = [w.load.prefill_tokens_per_s for w in workers if w.load.prefill_tokens_per_s > 0]
    steps = [w.load.decode_step_ms / 1000 for w in workers if w.load.decode_step_ms > 0]
    fastest = max(speeds, default=PRIOR_PREFILL_TOKENS_PER_S) * OPTIMISM
    shortest_s = min(steps, default=PRIOR_STEP_S) / OPTIMISM
    return {
        w: Rates(
            _faded(w.load.prefill_tokens_per_s, fastest, now - w.prefill_measured_s),
            _faded(w.load.decode_step_ms / 1000, shortest_s, now - w.step_measured_s),
        )
        for w in workers
    }


def _faded(own: float, best: float, age_s: float) -> float:
    """From `own` (0: not known) to `best`, by its age."""
    if not own:
        return best
    trust = min(1.0, max(0.0, (FORGOTTEN_S - age_s) / (FORGOTTEN_S - TRUSTED_S)))
    return float(best * (own / best) ** trust)


def _weigh_split(
    ask: Ask,
    unsplit: Plan,
    prefilling: Sequence[Worker],
    decoding: Sequence[Worker],
    rates: Mapping[Worker, Rates],
) -> tuple[list[Plan], str]:
    """The split plans worth weighing, or why there are none."""
    if ask.split == "never":
        return [], "switched off"
    if not prefilling or not decoding:
        return [], f"degraded: no {'prefill' if not prefilling else 'decode'} worker"
    if ask.max_tokens == 1 or ask.prompt_alone:
        return [], "a single token: nothing to decode"
    if ask.split == "auto" and unsplit.uncached_tokens < ask.split_min_tokens:
        return [], f"fewer than {ask.split_min_tokens} uncached tokens"
    # The blocks reserved on the decode worker wait for the prefill worker. So two workers of both
    # roles are never paired: in turns, each could wait for room that the other's requests hold.
    only_prefill = [w for w in prefilling if w.role not in DECODE_ROLES]
    only_decode = [w for w in decoding if w.role not in PREFILL_ROLES]
    both = [w for w in decoding if w.role in PREFILL_ROLES]
    pairs = [
        _split(ask, first, then, rates[first], rates[then])
        for kv in {w.kv_format for w in prefilling}  # two, while a model's settings are changed
        for firsts, thens in ((only_prefill, decoding), (both, only_decode))
        for first, then in _best_ends(ask, _of(kv, firsts), _of(kv, thens), rates)
    ]
    return pairs, "" if pairs else "no worker of one role to pair"


def _of(kv_format: tuple[str, str], workers: Sequence[Worker]) -> list[Worker]:
    return [w for w in workers if w.kv_format == kv_format]


def _best_ends(
    ask: Ask, firsts: Sequence[Worker], thens: Sequence[Worker], rates: Mapping[Worker, Rates]
) -> Iterator[tuple[Worker, Worker]]:
    """Both ends' costs add up, so the best pairs are made of the best ends."""
    best_first = sorted(firsts, key=lambda w: _prefill_s(ask, w, rates[w]))[:PAIR_POOL]
    best_then = sorted(thens, key=lambda w: _decode_s(ask, w, rates[w]))[:PAIR_POOL]
    return product(best_first, best_then)


def _unsplit(ask: Ask, worker: Worker, rates: Rates) -> Plan:
    cached, uncached, loaded = _reach(ask, worker, rates)
    ttft_s = _slot_wait_s(worker, rates) + _prefill_s(ask, worker, rates)
    # Each sequence that decodes there stands still while this prompt's chunks are computed. An idle
    # decode worker counts as one sequence: it keeps its pace for whoever comes next.
    standing = max(_occupancy(worker), 1 if worker.role == "decode" else 0)
    interference_s = standing * uncached / rates.prefill_tokens_per_s
    itl_s = _itl_s(worker, rates)
    cost_s = ttft_s + _output(ask) * itl_s + interference_s + _no_room_s(ask, worker, rates)
    return Plan(worker, None, cached, uncached, ttft_s, itl_s, cost_s, loaded)


def _split(ask: Ask, first: Worker, then: Worker, rates: Rates, then_rates: Rates) -> Plan:
    cached, uncached, loaded = _reach(ask, first, rates)
    _, moved = _cached(ask, then)
    same_host = first.replica.host_id == then.replica.host_id
    handover_s = HANDOVER_S + moved / HANDOVER_TOKENS_PER_S[same_host]
    ttft_s = _slot_wait_s(then, then_rates) + _prefill_s(ask, first, rates)
    itl_s = _itl_s(then, then_rates)
    cost_s = ttft_s + handover_s + _output(ask) * itl_s + _no_room_s(ask, then, then_rates)
    return Plan(then, first, cached, uncached, ttft_s, itl_s, cost_s, loaded)


def _cached(ask: Ask, worker: Worker) -> tuple[int, int]:
    """Prompt tokens that the worker has on its device and has not; the last one is always
    computed."""
    blocks = ask.matched.get(worker.holder.bit, 0)
    cached = min(blocks, _full(ask, worker)) * worker.block_size
    return cached, ask.prompt_tokens - cached


def _reach(ask: Ask, worker: Worker, rates: Rates) -> tuple[int, int, int]:
    """Prompt tokens that are not computed where the worker computes the prompt, those that are, and
    how many of the first it loads from disk: only if that is sooner, as the worker will find too.
    """
    cached, uncached = _cached(ask, worker)
    if (below := ask.below.get(worker.holder.bit)) is None:
        return cached, uncached, 0
    reach = min(below.blocks, _full(ask, worker)) * worker.block_size
    loaded = min(below.loads * worker.block_size, reach)
    if _load_s(worker, rates, loaded) > (reach - cached) / rates.prefill_tokens_per_s:
        return cached, uncached, 0
    return reach, ask.prompt_tokens - reach, loaded


def _load_s(worker: Worker, rates: Rates, tokens: int) -> float:
    """Until so many have come from its disk."""
    if not tokens:
        return 0.0
    load = worker.load
    loads_per_s = load.load_tokens_per_s or rates.prefill_tokens_per_s * PRIOR_LOADS_FASTER
    return load.load_delay_s + tokens / loads_per_s


def _full(ask: Ask, worker: Worker) -> int:
    """Blocks that need not be computed, if they are there."""
    return (ask.prompt_tokens - 1) // worker.block_size


def _prefill_s(ask: Ask, worker: Worker, rates: Rates) -> float:
    queued = worker.load.queued_prefill_tokens + sum(s.prefill_tokens for s in worker.unseen)
    share = worker.load.prompt_share or 1.0  # the rest of the time is for those that decode there
    _, uncached, loaded = _reach(ask, worker, rates)
    computing_s = (queued + uncached) / (rates.prefill_tokens_per_s * share)
    return computing_s + _load_s(worker, rates, loaded)


def _decode_s(ask: Ask, worker: Worker, rates: Rates) -> float:
    return (
        _slot_wait_s(worker, rates)
        + _output(ask) * _itl_s(worker, rates)
        + _no_room_s(ask, worker, rates)
    )


def _slot_wait_s(worker: Worker, rates: Rates) -> float:
    """Until the worker has a place in its batch for one more sequence."""
    excess = _occupancy(worker) + 1 - worker.max_running
    return max(0, excess) * REMAINING_TOKENS * rates.step_s / worker.max_running


def _itl_s(worker: Worker, rates: Rates) -> float:
    fullness = min(1.0, (_occupancy(worker) + 1) / worker.max_running)
    return rates.step_s * (1 + FULL_BATCH_SLOWDOWN * fullness)


def _no_room_s(ask: Ask, worker: Worker, rates: Rates) -> float:
    """What preempting others for this request's blocks would cost in recomputation."""
    if not worker.load.total_blocks:
        return 0.0
    needed = (_cached(ask, worker)[1] + _output(ask)) / worker.block_size
    missing = max(0.0, needed - worker.load.free_blocks)
    return missing * worker.block_size / rates.prefill_tokens_per_s


def _occupancy(worker: Worker) -> int:
    return worker.load.running + worker.load.waiting + len(worker.unseen)


def _output(ask: Ask) -> int:
    return min(ask.max_tokens, EXPECTED_OUTPUT_TOKENS)


def _by_cost(plan: Plan) -> tuple[float, int, bool]:
    return plan.cost_s, _occupancy(plan.decode), plan.prefill is not None


def _figures(plan: Plan) -> str:
    loads = f", of them {plan.loaded_tokens} on disk" if plan.loaded_tokens else ""
    return (
        f"cost {plan.cost_s:.3f} s, ttft {plan.ttft_s * 1000:.1f} ms, "
        f"itl {plan.itl_s * 1000:.1f} ms, cached {plan.cached_tokens}{loads}, "
        f"uncached {plan.uncached_tokens}"
    )
