"""What an engine says of its speed, and expects of its next step."""

import pytest

from services.worker.engine.load_meter import LoadMeter

S = 1_000_000_000


class Clocked:
    """A meter and the clock of its steps."""

    def __init__(self, parameters: int = 1_000_000, device: str = "cpu") -> None:
        self.meter = LoadMeter(parameters, device)
        self.now = S

    def step(self, prefill: int, decode: int, seconds: float) -> None:
        self.meter.add(prefill, decode, self.now, round(seconds * S))
        self.now += round(seconds * S)


def test_rates_of_steady_steps() -> None:
    clocked = Clocked()
    assert (clocked.meter.prefill_tokens_per_s, clocked.meter.decode_step_ms) == (0, 0)
    for _ in range(5):
        clocked.step(100, 3, 0.5)
        clocked.step(0, 3, 0.02)
    assert clocked.meter.prefill_tokens_per_s == pytest.approx(200)
    assert clocked.meter.decode_step_ms == pytest.approx(20)


def test_short_chunks_weigh_little() -> None:
    clocked = Clocked()
    for _ in range(10):
        clocked.step(512, 0, 0.25)
        clocked.step(1, 8, 0.02)
    assert clocked.meter.prefill_tokens_per_s > 1800


def test_prompts_that_are_all_but_cached_say_nothing_of_long_ones() -> None:
    """Each computes its last token only, in a step that takes what a decode step takes."""
    clocked = Clocked()
    clocked.step(512, 0, 0.25)
    for _ in range(100):
        clocked.step(1, 8, 0.02)
    assert clocked.meter.prefill_tokens_per_s > 1800
    assert clocked.meter.decode_step_ms == pytest.approx(20)
    assert clocked.meter.expected_s(512, 9) < 1


def test_a_slow_first_step_is_forgotten_over_a_pause() -> None:
    clocked = Clocked()
    clocked.step(512, 0, 20.0)
    clocked.step(0, 1, 5.0)
    assert clocked.meter.prefill_tokens_per_s < 30
    clocked.now += 60 * S
    clocked.step(512, 0, 0.25)
    clocked.step(0, 1, 0.02)
    assert clocked.meter.prefill_tokens_per_s > 800
    assert clocked.meter.decode_step_ms < 150


def test_one_slow_step_among_many_counts_as_one() -> None:
    clocked = Clocked()
    for _ in range(20):
        clocked.step(0, 1, 0.02)
    clocked.step(0, 1, 0.22)
    assert 20 < clocked.meter.decode_step_ms < 60


def test_a_step_is_expected_to_take_what_its_tokens_took_before() -> None:
    clocked = Clocked()
    clocked.step(100, 0, 2.0)
    clocked.step(0, 4, 0.1)
    assert clocked.meter.expected_s(512, 5) == pytest.approx(512 / 50 + 0.1)
    assert clocked.meter.expected_s(0, 4) == pytest.approx(0.1)


def test_a_first_step_is_expected_by_the_models_size() -> None:
    small, large = Clocked(5_000_000).meter, Clocked(8_000_000_000).meter
    assert small.expected_s(512, 1) < 1.5
    assert large.expected_s(512, 1) > 600
    assert Clocked(8_000_000_000, "cuda:0").meter.expected_s(512, 1) < 10


@pytest.mark.parametrize(
    ("prefill", "decode", "counts_for"),
    [(16, 0, "prefill"), (16, 3, "prefill"), (15, 0, "decode"), (0, 1, "decode"), (0, 0, "")],
)
def test_what_a_step_counts_for(prefill: int, decode: int, counts_for: str) -> None:
    """One that computed nothing says nothing: it told of a cancel, or that it lives."""
    clocked = Clocked()
    clocked.step(prefill, decode, 0.5)
    meter = clocked.meter
    assert bool(meter.prefill_tokens_per_s) == (counts_for == "prefill")
    assert bool(meter.decode_step_ms) == (counts_for == "decode")


def test_a_step_of_nothing_takes_nothing() -> None:
    clocked = Clocked()
    assert clocked.meter.expected_s(0, 0) == 0
    clocked.step(0, 4, 0.1)
    assert clocked.meter.expected_s(0, 0) == 0


def test_steps_one_after_the_other_forget_by_their_number_alone() -> None:
    """However long each takes: what ten of them say counts for most."""
    quick, slow = Clocked(), Clocked()
    for clocked, factor in ((quick, 1), (slow, 1000)):
        clocked.step(0, 1, 0.010 * factor)
        for _ in range(10):
            clocked.step(0, 1, 0.020 * factor)
    assert slow.meter.decode_step_ms == pytest.approx(1000 * quick.meter.decode_step_ms)
    assert 18 < quick.meter.decode_step_ms < 20
