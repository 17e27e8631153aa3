"""Whose prompt the scheduler takes first."""

from services.worker.engine.scheduling.low_lane import PATIENT
from tests.unit.engine.schedule_bench import Bench, tokens


def test_first_come_first_served_and_a_preempted_one_keeps_its_place() -> None:
    bench = Bench(num_blocks=16, max_running=1)
    names = ["c", "a", "b", "d"]
    made = [bench.add(name, tokens(4, first=number + 10)) for number, name in enumerate(names)]
    served = []
    for sequence in made:
        served += [chunk.sequence.id for chunk in bench.step().chunks]
        bench.scheduler.finish(bench.scheduler.sequences[served[-1]])
        assert sequence.id == served[-1]
    assert served == names

    bench = Bench(num_blocks=6)
    for number, name in enumerate(("first", "second", "third")):
        bench.add(name, tokens(4, first=number + 10))
    assert bench.preempted()[0] == "third"
    late = bench.add("late", tokens(4, first=20))
    for name in ("first", "second"):
        if name in bench.scheduler.sequences:
            bench.scheduler.finish(bench.scheduler.sequences[name])
    assert [c.sequence.id for c in bench.step().chunks] == ["third", late.id]


def order_of_prompts(bench: Bench, steps: int) -> list[str]:
    """Who computed a prompt, each named once for steps in a row."""
    names: list[str] = []
    for _ in range(steps):
        for chunk in bench.step().chunks:
            if not chunk.is_decode and names[-1:] != [chunk.sequence.id]:
                names.append(chunk.sequence.id)
    return names


def test_a_short_prompt_is_not_behind_the_whole_of_a_long_one() -> None:
    bench = Bench(num_blocks=64, budget=8)
    bench.add("long", tokens(100, first=10))
    bench.step()
    bench.add("short", tokens(12, first=11))
    assert order_of_prompts(bench, 14) == ["short", "long"]


def test_a_short_prompt_is_not_behind_many_long_ones_that_came_at_once() -> None:
    """All of which would be due, if each were alone."""
    bench = Bench(num_blocks=256, budget=8)
    for number in range(8):
        bench.add(f"long {number}", tokens(80, first=number + 10), prefill_only=True)
    assert order_of_prompts(bench, 25) == ["long 0", "long 1", "long 2"]
    bench.add("short", tokens(8, first=20), prefill_only=True)
    assert order_of_prompts(bench, 2)[0] == "short"


def test_the_shorter_of_those_that_come_together_goes_first() -> None:
    bench = Bench(num_blocks=64, budget=8)
    for length in (30, 10, 20):
        bench.add(str(length), tokens(length, first=length + 10))
    assert order_of_prompts(bench, 10) == ["10", "20", "30"]


def test_what_is_cached_of_a_prompt_does_not_make_it_a_long_one() -> None:
    bench = Bench(num_blocks=64, budget=8)
    bench.add("before", tokens(60, first=10), max_tokens=1)
    while bench.scheduler.sequences["before"].num_remaining > 1:
        bench.step()
    bench.scheduler.finish(bench.scheduler.sequences["before"])
    bench.add("longer", tokens(30, first=11))
    again = bench.add("again", tokens(60, first=10))
    assert bench.scheduler.queued_prefill_tokens == 30 + 4
    assert order_of_prompts(bench, 6) == ["again", "longer"]
    assert again.num_cached == 56


def test_short_prompts_that_come_all_the_time_do_not_starve_a_long_one() -> None:
    """It is due when its share is twice as many tokens as it has."""
    bench = Bench(num_blocks=256, budget=8)
    long = bench.add("long", tokens(80, first=10))
    steps = 0
    while long.num_computed < 80:
        name = str(steps)
        bench.add(name, tokens(8, first=steps % 9), prefill_only=True)
        bench.step()
        for sequence in list(bench.scheduler.sequences.values()):
            if sequence is not long and len(sequence.tokens) > sequence.num_prompt:
                bench.scheduler.finish(sequence)
        bench.pool.withdraw(range(256))
        steps += 1
        assert steps < 40
    assert steps > 20


def test_a_flood_of_short_prompts_does_not_starve_a_long_one() -> None:
    """However many wait, no more than the places share what is computed."""
    bench = Bench(num_blocks=256, budget=8, max_running=2)
    long = bench.add("long", tokens(40, first=10))
    for step in range(50):
        for each in range(3):
            bench.add(f"{step} {each}", tokens(8, first=step % 9), prefill_only=True)
        bench.step()
        for sequence in list(bench.scheduler.sequences.values()):
            if sequence is not long and len(sequence.tokens) > sequence.num_prompt:
                bench.scheduler.finish(sequence)
        bench.pool.withdraw(range(256))
    assert long.num_computed >= 40


def test_streams_that_only_decode_bring_a_waiting_prompt_nearer_too() -> None:
    """The next place is not for a shorter one, though nobody computed a prompt meanwhile."""
    bench = Bench(num_blocks=256, max_running=1)
    bench.add("runs", tokens(4, first=10))
    bench.step()
    bench.add("long", tokens(20, first=11))
    for _ in range(50):
        bench.step()
    bench.add("short", tokens(4, first=12))
    bench.scheduler.finish(bench.scheduler.sequences["runs"])
    assert order_of_prompts(bench, 1) == ["long"]


def test_a_more_important_prompt_goes_first_however_long_it_is() -> None:
    bench = Bench(num_blocks=64, budget=8)
    bench.add("short", tokens(12, first=10), priority=1)
    bench.step()
    bench.add("long", tokens(30, first=11), priority=0)
    assert order_of_prompts(bench, 6) == ["long", "short"]


def test_prompts_begun_go_by_arrival_too() -> None:
    bench = Bench(num_blocks=32, budget=8)
    bench.add("first", tokens(20, first=10))
    bench.step()
    bench.add("second", tokens(20, first=11))
    assert [c.sequence.id for c in bench.step().chunks] == ["first"]
    assert [(c.sequence.id, c.count) for c in bench.step().chunks] == [("first", 4), ("second", 4)]


def test_what_nobody_waits_for_stands_aside_while_a_prompt_is_computed() -> None:
    bench = Bench(num_blocks=128, budget=32)
    for name in ("batch 1", "batch 2"):
        bench.add(name, tokens(4, first=ord(name[-1])), priority=PATIENT)
    bench.step()
    assert {chunk.sequence.id for chunk in bench.step().chunks} == {"batch 1", "batch 2"}
    bench.add("batch 3", tokens(8, first=70), priority=PATIENT)
    bench.add("chat", tokens(80, first=90), priority=PATIENT - 1)
    steps = [{chunk.sequence.id for chunk in bench.step().chunks} for _ in range(3)]
    assert steps[:2] == [{"chat"}, {"chat"}]
    assert steps[2] == {"chat"}
    assert {chunk.sequence.id for chunk in bench.step().chunks} >= {"chat", "batch 1", "batch 3"}


def test_what_stands_aside_has_its_turn_all_the_same() -> None:
    bench = Bench(num_blocks=512, budget=2)
    bench.add("batch", tokens(2, first=10), priority=PATIENT)
    bench.step()
    bench.add("chat", tokens(200, first=90), priority=PATIENT - 1)
    steps = [{chunk.sequence.id for chunk in bench.step().chunks} for _ in range(40)]
    assert sum("batch" in ids for ids in steps) == 40 // 17
    assert all("chat" in ids or "batch" in ids for ids in steps)
