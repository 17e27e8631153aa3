"""What an engine says of its speed."""

import random

import pytest

from services.worker.engine.scheduling.cost_model import StepShape
from services.worker.engine.scheduling.load_meter import LoadMeter
from tests.unit.engine.synthetic import additive, decodes, prompt, warmed


class Metered:
    """A meter of a warm engine."""

    def __init__(self) -> None:
        self.meter = LoadMeter(warmed(additive), chunk=512)

    def step(self, shape: StepShape, times: float = 1, each: int = 1) -> None:
        """`each`: tokens that a decode makes."""
        self.meter.add(shape, times * additive(shape), each * shape.decodes)

    @property
    def rates(self) -> tuple[float, float]:
        return self.meter.prefill_tokens_per_s, self.meter.decode_step_ms


WHOLE_CHUNKS = 512 / additive(prompt(512))


def test_each_rate_is_of_its_own_kind_of_work() -> None:
    metered = Metered()
    assert metered.rates == (0, 0)
    metered.step(prompt(300))
    assert metered.rates == (pytest.approx(WHOLE_CHUNKS, rel=0.05), 0)
    metered = Metered()
    for context in range(300, 340):
        metered.step(decodes(4, context))
    assert metered.rates == (0, pytest.approx(1000 * additive(decodes(4, 339)), rel=0.05))


def test_a_step_of_both_says_what_each_would_take_alone() -> None:
    metered = Metered()
    for context in range(300, 340):
        metered.step(decodes(8, context))
        metered.step(prompt(30, 100, decodes=8, context=context))
    rate, step_ms = metered.rates
    assert rate == pytest.approx(WHOLE_CHUNKS, rel=0.1)
    assert step_ms == pytest.approx(1000 * additive(decodes(8, 339)), rel=0.1)


def test_a_token_takes_less_where_guesses_are_right() -> None:
    metered = Metered()
    guessed = decodes(4, 300)._replace(drafts=16)
    for _ in range(200):
        metered.step(guessed, each=3)
    assert metered.rates[1] == pytest.approx(1000 * additive(guessed) / 3, rel=0.05)


def test_hits_in_the_cache_are_no_crawling_worker() -> None:
    """Ten tokens of a prompt take hardly less than a hundred."""
    metered = Metered()
    for _ in range(200):
        metered.step(prompt(10, 1000))
    assert metered.meter.prefill_tokens_per_s == pytest.approx(WHOLE_CHUNKS, rel=0.25)
    assert 10 / additive(prompt(10, 1000)) < 0.6 * WHOLE_CHUNKS


def test_a_rate_stands_still_while_nothing_of_its_kind_runs() -> None:
    """A router takes a rate that does not move for an old one, and tries it again some time."""
    metered = Metered()
    metered.step(prompt(300))
    metered.step(decodes(4, 300))
    rate, step_ms = metered.rates
    metered.step(decodes(4, 300), times=3)
    assert metered.meter.prefill_tokens_per_s == rate
    assert metered.meter.decode_step_ms > step_ms
    step_ms = metered.meter.decode_step_ms
    metered.step(prompt(300), times=3)
    assert metered.meter.decode_step_ms == step_ms
    assert metered.meter.prefill_tokens_per_s < rate


def test_a_step_of_nothing_says_nothing() -> None:
    """It told of a cancel, or that the engine lives."""
    metered = Metered()
    metered.step(prompt(300))
    metered.step(decodes(4, 300))
    before, costs = metered.rates, list(metered.meter._cost._costs)
    metered.meter.add(StepShape(), 5.0, 0)
    assert metered.rates == before
    assert metered.meter._cost._costs == costs


def test_what_seems_to_take_no_time_leaves_the_rate_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metered = Metered()
    metered.step(prompt(300))
    before = metered.meter.prefill_tokens_per_s
    costs = [0.0, 0.0, 0.0, 4e-4, 0.0, 0.0]  # all of it for decodes
    cost = metered.meter._cost
    monkeypatch.setattr(cost, "learn", lambda shape, seconds: setattr(cost, "_costs", costs))
    metered.step(prompt(8, 0, decodes=4, context=300))
    assert metered.meter.prefill_tokens_per_s == before


def a_rate_among_noise(seed: int, warm_up: float, short_at: int | None) -> float:
    """The highest that is told, as so many times the true one, after a warm-up that took `warm_up`
    times as long as what follows, and with one step whose time is far too short."""
    rng = random.Random(seed)
    meter = LoadMeter(warmed(lambda shape: warm_up * additive(shape) * rng.uniform(1, 1.3)), 512)
    count, context, highest = 16, 500, 0.0
    for step in range(200):
        if rng.random() < 0.05:
            count, context = rng.randint(1, 40), rng.randint(10, 1500)
        tokens, start = rng.choice([0, 0, 0, 8, 60, 90]), rng.choice([0, 0, 100, 1000])
        shape = prompt(tokens, start, count, context)
        seconds = additive(shape) * rng.uniform(1, 1.2)
        meter.add(shape, 3e-4 if step == short_at else seconds, shape.decodes)
        highest = max(highest, meter.prefill_tokens_per_s / WHOLE_CHUNKS)
    return highest


@pytest.mark.parametrize(("warm_up", "short_at"), [(1, 100), (10, None), (30, None)])
def test_one_short_time_or_a_slow_warm_up_makes_no_worker_seem_many_times_as_fast(
    warm_up: float, short_at: int | None
) -> None:
    """All would be sent to it; and what seems to take no time at all is not divided by."""
    assert max(a_rate_among_noise(seed, warm_up, short_at) for seed in range(20)) < 3
