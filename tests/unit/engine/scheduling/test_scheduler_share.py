"""How the scheduler shares a step's time between prompts and streams that decode."""

import pytest

from services.worker.engine.scheduling.cost_model import CostModel, StepShape
from services.worker.engine.scheduling.prompt_room import time_for_prompts
from tests.unit.engine.schedule_bench import Bench, tokens
from tests.unit.engine.synthetic import additive, decodes, prompt, warmed


def decoding(target_itl_s: float | None = None, streams: int = 1) -> Bench:
    """A bench on a processor of known speed, on which streams decode."""
    cost = warmed(additive)
    for _ in range(50):
        for shape in (decodes(1, 9), decodes(30, 9), prompt(40), prompt(40, 0, 4, 9)):
            cost.learn(shape, additive(shape))
    bench = Bench(num_blocks=1000, budget=512, max_running=32, cost=cost, target_itl_s=target_itl_s)
    for number in range(streams):
        bench.add(str(number), tokens(5, first=number + 300))
    bench.step()
    return bench


def test_a_prompt_beside_a_stream_takes_no_longer_than_its_decodes() -> None:
    bench = decoding()
    bench.add("long", tokens(400, first=10))
    for _ in range(10):
        step = bench.step()
        alone = decodes(1, step.shape.decode_context)
        assert additive(step.shape) == pytest.approx(2 * additive(alone), rel=0.15)
        assert step.shape.prompt_tokens == sum(c.count for c in step.chunks if not c.is_decode)


def test_without_streams_a_prompt_takes_all_tokens_of_a_step() -> None:
    bench = decoding(streams=0)
    bench.add("long", tokens(900, first=10))
    assert [chunk.count for chunk in bench.step().chunks] == [512]


def test_of_many_prompts_at_once_a_step_takes_as_many_as_if_all_decoded() -> None:
    """Else those first done would decode in small batches while the others hardly get on."""
    bench = decoding(streams=4)
    for number in range(28):
        bench.add(f"new {number}", tokens(100, first=100 + number))
    step = bench.step()
    all_of_them = additive(decodes(32, step.shape.decode_context // 4))
    assert additive(step.shape) == pytest.approx(2 * all_of_them, rel=0.15)


def test_each_of_them_is_taken_to_look_back_as_far_as_those_that_decode() -> None:
    cost = CostModel()
    cost._costs = [0.0, 0.0, 0.0, 0.0, 0.01 / 1000, 0.0]  # nothing but what is looked back on
    seconds, share = time_for_prompts(cost, decodes(2, 1000), 8, 512, None)
    assert seconds == pytest.approx(2 * 0.08 - 0.02)
    assert share == pytest.approx(1 - 0.02 / 0.16)


def test_a_step_aims_at_the_duration_that_was_set() -> None:
    for target_s in (0.02, 0.1):
        bench = decoding(target_s, streams=4)
        bench.add("long", tokens(900, first=10))
        assert additive(bench.step().shape) == pytest.approx(target_s, rel=0.1)


def test_prompts_get_on_though_decodes_alone_take_longer_than_was_set() -> None:
    """A fifth of the time, and a token at least."""
    bench = decoding(0.001, streams=4)
    bench.add("long", tokens(400, first=10))
    step = bench.step()
    alone = StepShape(decodes=4, decode_context=step.shape.decode_context)
    assert additive(step.shape) == pytest.approx(additive(alone) / 0.8, rel=0.15)
    slow = CostModel()
    for shape in (decodes(1, 1), prompt(1)):
        for _ in range(20):
            slow.learn(shape, 0.01 + 10 * shape.prompt_tokens)
    bench.scheduler.cost = slow
    # What decodes take is in doubt: they run alone once.
    assert [bench.step().shape.prompt_tokens for _ in range(3)] == [0, 1, 0]


def test_several_prompts_share_what_time_there_is() -> None:
    bench = decoding(0.03)
    for number in range(9):
        bench.add(f"new {number}", tokens(20, first=100 + number))
    step = bench.step()
    assert [chunk.count for chunk in step.chunks].count(20) > 1
    assert additive(step.shape) == pytest.approx(0.03, rel=0.1)


def test_it_says_what_share_of_the_time_prompts_get() -> None:
    bench = decoding()
    bench.step()
    assert bench.scheduler.prompt_share == pytest.approx(0.5, abs=0.05)
    bench = decoding(0.1, streams=4)
    bench.step()
    assert bench.scheduler.prompt_share == pytest.approx(
        1 - additive(decodes(4, 7)) / 0.1, abs=0.02
    )
    for name in list(bench.scheduler.sequences):
        bench.scheduler.finish(bench.scheduler.sequences[name])
    assert bench.scheduler.prompt_share == 1, "though no step ran since"


def test_that_share_is_no_more_than_the_tokens_of_a_step_take() -> None:
    bench = decoding(2.0, streams=4)
    bench.scheduler.max_batched_tokens = 20
    bench.add("long", tokens(900, first=10))
    shape = bench.step().shape
    assert shape.prompt_tokens == 20 - 4
    alone = StepShape(decodes=4, decode_context=shape.decode_context)
    share = 1 - additive(alone) / additive(shape)
    assert bench.scheduler.prompt_share == pytest.approx(share, abs=0.05)
