"""What the cost model makes of steps, on processors whose speed is known."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine.scheduling.cost_model import CostModel, StepShape, looked_back
from tests.unit.engine.synthetic import Machine, additive, decodes, noisy, prompt, roofline, warmed

TYPICAL = [
    decodes(1, 300),
    decodes(32, 300),
    prompt(64),
    prompt(512),
    prompt(32, 200, decodes=16, context=300),
]


def mixed_traffic(cost: CostModel, machine: Machine, steps: int = 100) -> None:
    rng = random.Random(1)
    for index in range(steps):
        shape = decodes(rng.randint(1, 32), 100 + index)
        if index % 2:
            count, start = rng.randint(16, 64), rng.randint(0, 400)
            shape = prompt(count, start, shape.decodes, 100 + index)
        cost.learn(shape, machine(shape))


def errors(cost: CostModel, machine: Machine) -> list[float]:
    return [abs(cost.step_s(shape) / machine(shape) - 1) for shape in TYPICAL]


def test_nothing_learned_is_nothing_expected() -> None:
    cost = CostModel()
    assert cost.step_s(prompt(512, 0, 3, 100)) == 0
    assert cost.chunk_within(0.1, 0) == math.inf
    assert cost.chunk_s(0, 100) == 0


def test_a_step_of_nothing_takes_nothing() -> None:
    assert warmed(additive).step_s(StepShape()) == 0


def test_after_a_warm_up_steps_are_known_but_for_what_they_look_back_on() -> None:
    cost = warmed(additive)
    for shape in (decodes(1, 1), decodes(16, 1), prompt(16), prompt(256), prompt(64, 0, 16, 1)):
        assert cost.step_s(shape) == pytest.approx(additive(shape), rel=0.12)


@pytest.mark.parametrize(
    ("machine", "within"), [(additive, 0.07), (noisy(additive), 0.2), (roofline, 0.3)]
)
def test_it_learns_what_runs(machine: Machine, within: float) -> None:
    cost = warmed(machine)
    mixed_traffic(cost, machine)
    truth = roofline if machine is roofline else additive
    assert max(errors(cost, truth)) < within


def test_a_long_spell_of_decodes_does_not_wash_away_what_prompts_take() -> None:
    """So that the first prompt after it does not settle it alone, held up as it may be."""
    cost = warmed(additive)
    mixed_traffic(cost, additive)
    for step in range(500):
        shape = decodes(8, 300 + step)
        cost.learn(shape, additive(shape))
    assert cost.step_s(prompt(512)) == pytest.approx(additive(prompt(512)), rel=0.1)
    cost.learn(prompt(512), 10 * additive(prompt(512)))
    assert cost.step_s(prompt(512)) < 2.5 * additive(prompt(512))


def test_what_has_not_been_seen_for_long_does_not_get_out_of_hand() -> None:
    """Nor is all told of by what is seen instead."""
    cost = warmed(additive)
    mixed_traffic(cost, additive)
    before = cost.step_s(decodes(8, 300))
    for step in range(15_500):
        cost.learn(prompt(100), additive(prompt(100)))
        if step % 50 == 0:
            assert cost.step_s(decodes(8, 300)) == pytest.approx(before, rel=0.1)


def test_one_step_that_was_held_up_is_no_slow_engine() -> None:
    cost = warmed(additive)
    mixed_traffic(cost, additive)
    for shape in (decodes(8, 300), prompt(64)):
        before = cost.step_s(shape)
        cost.learn(shape, 100 * additive(shape))
        assert cost.step_s(shape) < 1.15 * before


def test_one_time_that_is_far_too_short_is_no_fast_engine() -> None:
    """Nor for long what it seems to be."""
    for shape in (decodes(8, 300), prompt(64)):
        cost = warmed(additive)
        mixed_traffic(cost, additive)
        cost.learn(shape, 3e-4)
        assert cost.step_s(shape) > 0.4 * additive(shape)
        for _ in range(5):
            mixed_traffic(cost, additive, steps=20)
        assert cost.step_s(shape) == pytest.approx(additive(shape), rel=0.2)


def test_what_steps_took_alone_is_forgotten_where_prompts_always_come_beside() -> None:
    cost = warmed(additive)
    mixed_traffic(cost, additive)
    rng = random.Random(1)
    for _ in range(3000):
        shape = prompt(rng.randint(1, 64), rng.randint(0, 400), rng.randint(1, 32), 300)
        cost.learn(shape, 3 * additive(shape))
    assert cost.step_s(decodes(16, 300)) == pytest.approx(3 * additive(decodes(16, 300)), rel=0.1)


def test_steps_that_are_alike_change_all_costs_alike() -> None:
    """They do not tell which it is: the machine was slower for long, and is as fast as before."""
    cost, rng = warmed(additive), random.Random(2)
    shape = prompt(90, 0, decodes=16, context=500)
    for factor, steps in ((1, 100), (3, 1100), (1, 100)):
        for _ in range(steps):
            cost.learn(shape, factor * additive(shape) * rng.uniform(1, 1.2))
    for alone in (decodes(16, 500), prompt(512)):
        assert additive(alone) / 2 < cost.step_s(alone) < 2 * additive(alone)


def test_what_does_not_run_meanwhile_stays_as_it_was_and_is_soon_known_again() -> None:
    cost = warmed(additive)
    mixed_traffic(cost, additive)
    rng = random.Random(5)
    for _ in range(5000):
        shape = decodes(1, rng.randint(1, 2000))
        cost.learn(shape, 3 * additive(shape) * rng.lognormvariate(0, 0.2))
    assert cost.step_s(prompt(512)) == pytest.approx(additive(prompt(512)), rel=0.25)
    assert cost.doubt(prompt(512)) > 0.5
    for _ in range(5):
        cost.learn(prompt(512), 3 * additive(prompt(512)))
    assert cost.step_s(prompt(512)) == pytest.approx(3 * additive(prompt(512)), rel=0.2)


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_a_machine_that_changes_its_speed_is_followed(factor: float) -> None:
    cost = warmed(additive)
    mixed_traffic(cost, additive)
    mixed_traffic(cost, lambda shape: factor * additive(shape), steps=200)
    assert max(errors(cost, lambda shape: factor * additive(shape))) < 0.15


@pytest.mark.parametrize("start", [0, 100, 5000])
@pytest.mark.parametrize("seconds", [1e-3, 0.03, 2.0])
def test_what_fits_takes_the_time_that_it_was_to_fit(start: int, seconds: float) -> None:
    cost = warmed(additive)
    mixed_traffic(cost, additive)
    count = cost.chunk_within(seconds, start)
    assert cost.chunk_s(start, math.floor(count)) <= seconds * 1.001
    assert cost.chunk_s(start, math.floor(count) + 1) > seconds * 0.999


def test_nothing_fits_into_no_time_and_anything_into_all_of_it() -> None:
    cost = warmed(additive)
    assert cost.chunk_within(0, 10) == 0
    assert cost.chunk_within(-1, 10) == 0
    assert cost.chunk_within(math.inf, 10) == math.inf


def test_tokens_look_back_on_those_before_them_and_themselves() -> None:
    assert looked_back(0, 4) == 1 + 2 + 3 + 4
    assert looked_back(10, 3) == 11 + 12 + 13


shapes = st.builds(
    StepShape,
    prompt_tokens=st.integers(0, 10_000),
    prompt_context=st.integers(0, 10**9),
    decodes=st.integers(0, 1000),
    decode_context=st.integers(0, 10**8),
    drafts=st.integers(0, 1000),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(shapes, st.floats(0, 1e4)), max_size=60), shapes)
def test_no_cost_is_ever_negative_or_not_a_number(
    steps: list[tuple[StepShape, float]], shape: StepShape
) -> None:
    cost = CostModel()
    for ran, seconds in steps:
        cost.learn(ran, seconds)
        assert all(0 <= one < math.inf for one in cost._costs)
    assert 0 <= cost.step_s(shape) < math.inf
    assert cost.chunk_within(0.1, shape.prompt_tokens) >= 0
