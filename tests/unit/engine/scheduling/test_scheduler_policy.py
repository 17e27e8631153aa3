"""Who gives way, who is admitted and what a step takes in, one choice of the scheduler at a time.
The property tests ask only what must hold."""

from typing import Any

from services.worker.engine import FinishReason
from services.worker.engine.scheduling.chunks import Step
from services.worker.engine.scheduling.cost_model import StepShape
from services.worker.engine.scheduling.scheduler import Scheduler
from services.worker.engine.sequence import Sequence, Status
from tests.unit.engine.schedule_bench import BLOCK, Bench, tokens
from tests.unit.engine.synthetic import additive, warmed


def test_the_victim_is_the_one_that_wastes_least() -> None:
    """Not the latest, nor the one in the middle: the shortest, wherever it came."""
    for order in ((12, 3, 8), (3, 8, 12), (12, 8, 3)):
        bench = Bench(num_blocks=9)
        names = [str(length) for length in order]
        for length in order:
            bench.add(str(length), tokens(length, first=length + 10))
        assert bench.preempted() == ["3"], names


def test_waste_does_not_count_what_others_hold() -> None:
    """The longer one has most of its blocks in common with another, so it is cheaper to compute
    again than the shorter one."""
    bench = Bench(num_blocks=13)
    long = tokens(16, first=11)
    keeper = bench.add("keeper", long)
    bench.step()
    bench.add("sharer", long)
    bench.add("alone", tokens(11, first=12))
    assert keeper.blocks
    assert bench.preempted() == ["sharer"]


def test_among_equals_the_latest_is_the_victim() -> None:
    bench = Bench(num_blocks=6)
    for number, name in enumerate(("first", "second", "third")):
        bench.add(name, tokens(4, first=number + 10))
    assert bench.preempted()[0] == "third"


def test_the_least_important_is_the_victim_however_much_it_wastes() -> None:
    bench = Bench(num_blocks=6)
    bench.add("important", tokens(3, first=10), priority=1)
    bench.add("not", tokens(13, first=11), priority=2)
    assert bench.preempted() == ["not"]


def test_admission_leaves_a_free_block_for_each_sequence_that_runs() -> None:
    for num_blocks, status in ((8, Status.WAITING), (9, Status.RUNNING)):
        bench = Bench(num_blocks)
        for number in range(2):
            bench.add(str(number), tokens(4, first=number + 10))
        bench.step()
        new = bench.add("new", tokens(12, first=12))
        bench.step()  # the others hold two blocks each by now, this one needs three
        assert new.status is status


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    """After a preemption a sequence finds its own blocks again, which is nobody's saving."""
    bench = Bench(num_blocks=6)
    one = bench.add("one", tokens(9, first=10))
    bench.step()
    bench.scheduler.places.preempt(one, Step())
    (chunk,) = bench.step().chunks
    assert chunk.start == 8
    assert one.num_cached == 0
    again = bench.add("again", tokens(9, first=10))
    bench.step()
    assert again.num_cached == 8


def test_decodes_take_their_tokens_from_the_budget_and_prompts_the_rest() -> None:
    bench = Bench(num_blocks=32, budget=8)
    bench.add("a", tokens(3, first=10))
    bench.add("b", tokens(3, first=11))
    bench.step()
    bench.add("long", tokens(20, first=12))
    taken = [[(c.sequence.id, c.count) for c in bench.step().chunks] for _ in range(4)]
    assert taken == [[("a", 1), ("b", 1), ("long", count)] for count in (6, 6, 6, 2)]
    bench.add("next", tokens(2, first=13))
    assert [(c.sequence.id, c.count) for c in bench.step().chunks] == [
        ("a", 1),
        ("b", 1),
        ("long", 1),
        ("next", 2),
    ]


def test_a_prefill_is_done_with_its_first_token_unless_that_ends_it() -> None:
    for max_tokens, token, reason in (
        (9, 9, FinishReason.PREFILL_DONE),
        (9, 0, FinishReason.STOP),
        (1, 9, FinishReason.LENGTH),
    ):
        bench = Bench(num_blocks=8, budget=4)
        bench.add("one", tokens(6, first=10), max_tokens=max_tokens, prefill_only=True)
        (chunk,) = bench.scheduler.schedule().chunks
        assert bench.scheduler.complete(chunk, []) is None
        (chunk,) = bench.scheduler.schedule().chunks
        assert bench.scheduler.complete(chunk, [token]) is reason
    bench = Bench(num_blocks=8)
    bench.add("plain", tokens(6, first=10))
    (chunk,) = bench.scheduler.schedule().chunks
    assert bench.scheduler.complete(chunk, [9]) is None


def test_a_remote_prompt_may_come_from_the_cache_as_a_whole() -> None:
    """A prompt computed here leaves its last block out, for the logits of its last token."""
    for remote, cached in ((True, 2), (False, 1)):
        bench = Bench(num_blocks=16)
        bench.add("before", tokens(8, first=10))
        bench.step()
        again = bench.add("again", tokens(8, first=10), remote_prefill=remote)
        step = bench.step()
        assert (again in step.reserved) is remote
        assert (again.num_received, again.num_cached) == (cached, cached * BLOCK)
        assert bench.scheduler.num_running == 2
        if remote:
            assert bench.scheduler.start_decode(again, 9) is None
            assert [(c.start, c.count) for c in bench.step().chunks] == [(8, 1), (9, 1)]


def test_one_that_shares_all_its_blocks_gives_way_itself_it_wastes_nothing() -> None:
    bench = Bench(num_blocks=6)
    shared = tokens(8, first=10)
    maker = bench.add("maker", shared)
    bench.step()
    bench.scheduler.finish(maker)
    bench.add("eater", tokens(3, first=11))
    bench.step()
    bench.add("keeper", shared, remote_prefill=True)
    late = bench.add("late", shared, remote_prefill=True)
    bench.step()
    while bench.pool.num_free:
        assert not bench.step().preempted
    bench.scheduler.start_decode(late, 9)
    step = bench.step()
    assert [victim.id for victim in step.preempted] == ["late"]
    assert [chunk.sequence.id for chunk in step.chunks] == ["eater"]


def test_a_prompt_that_another_engine_computes_is_no_queue_here() -> None:
    bench = Bench(num_blocks=16, budget=4)
    remote = bench.add("remote", tokens(8, first=10), remote_prefill=True)
    bench.add("own", tokens(7, first=11))
    assert bench.scheduler.queued_prefill_tokens == 7
    assert remote in bench.step().reserved
    assert bench.scheduler.queued_prefill_tokens == 3


def test_what_was_generated_is_computed_again_in_chunks_too() -> None:
    """A preempted sequence has more to compute again than its prompt."""
    bench = Bench(num_blocks=16, budget=4)
    sequence = bench.add("a", tokens(3, first=10))
    while len(sequence.tokens) < 20:
        bench.step()
    bench.pool.withdraw(sequence.blocks)  # nothing of it is found again
    bench.scheduler.places.preempt(sequence, Step())
    assert [[c.count for c in bench.step().chunks] for _ in range(6)] == [[4]] * 5 + [[1]]


def test_room_for_a_remote_prompt_takes_no_budget() -> None:
    bench = Bench(num_blocks=32, budget=4)
    long = bench.add("long", tokens(9, first=10))
    remote = bench.add("remote", tokens(8, first=11), remote_prefill=True)
    plain = bench.add("plain", tokens(4, first=12))
    step = bench.step()
    assert [(c.sequence, c.count) for c in step.chunks] == [(plain, 4)]
    assert step.reserved == [remote]
    assert long.status is Status.WAITING


def test_admission_leaves_a_free_block_for_those_that_are_reserved_too() -> None:
    for num_blocks, status in ((6, Status.WAITING), (7, Status.RUNNING)):
        bench = Bench(num_blocks)
        for number in range(2):
            bench.add(str(number), tokens(4, first=number + 10), remote_prefill=True)
        new = bench.add("new", tokens(12, first=12))
        bench.step()
        assert new.status is status


def test_places_are_for_the_running_and_the_reserved_together() -> None:
    bench = Bench(num_blocks=32, max_running=3)
    reserved = [bench.add(f"r{n}", tokens(4, first=n + 10), remote_prefill=True) for n in range(2)]
    bench.add("a", tokens(4, first=20))
    late = bench.add("late", tokens(4, first=21))
    bench.step()
    scheduler = bench.scheduler
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_pending) == (3, 1, 2)
    scheduler.start_decode(reserved[0], 9)  # keeps its place
    bench.step()
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_pending) == (3, 1, 3)
    assert late.status is Status.WAITING
    scheduler.finish(reserved[1])
    bench.step()
    assert late.status is Status.RUNNING
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_pending) == (3, 0, 3)


def test_what_waits_for_another_engine_is_no_victim() -> None:
    """Nor is it computed: what it holds was made elsewhere."""
    bench = Bench(num_blocks=7)
    remote = bench.add("remote", tokens(4, first=10), priority=5, remote_prefill=True)
    bench.add("a", tokens(4, first=11))
    bench.add("b", tokens(4, first=12))
    assert bench.preempted() == ["b"]
    assert remote.status is Status.AWAITING_KV
    assert len(remote.blocks) == 1


def test_nobody_new_comes_in_on_the_blocks_of_a_victim() -> None:
    """In the same step: they were freed for those that go on running."""
    bench = Bench(num_blocks=6)
    bench.add("stays", tokens(4, first=10), priority=1)
    bench.add("victim", tokens(12, first=11), priority=2)
    while bench.pool.num_free:
        bench.step()
    new = bench.add("new", tokens(2, first=12), priority=0)
    assert bench.preempted() == ["victim"]
    assert bench.pool.num_free > 2
    assert new.status is Status.WAITING
    bench.step()
    assert new.status is Status.RUNNING


def test_without_a_prefix_cache_nothing_is_named_or_found() -> None:
    bench = Bench(num_blocks=16)
    bench.scheduler.tables.prefix_caching = False
    for name in ("one", "two"):
        sequence = bench.add(name, tokens(9, first=10))
        (chunk,) = bench.step().chunks
        assert (chunk.start, sequence.num_cached) == (0, 0)
        bench.scheduler.finish(sequence)
    assert bench.pool.take_events() == []


def test_a_failed_sequences_blocks_are_found_by_nobody() -> None:
    bench = Bench(num_blocks=16)
    for end, cached in ((bench.scheduler.finish, 8), (bench.scheduler.abort, 0)):
        bad = bench.add("bad", tokens(9, first=cached + 10))
        bench.step()
        end(bad)
        again = bench.add("again", tokens(9, first=cached + 10))
        bench.step()
        assert again.num_cached == cached
        bench.scheduler.finish(again)


def test_whoever_ends_while_it_waits_is_passed_over() -> None:
    bench = Bench(num_blocks=16, max_running=1)
    bench.add("runs", tokens(4, first=10))
    waiting = [bench.add(f"w{number}", tokens(4, first=number + 11)) for number in range(3)]
    bench.step()
    for sequence in waiting[:2]:
        bench.scheduler.finish(sequence)
    assert bench.scheduler.num_waiting == 1
    assert bench.scheduler.queued_prefill_tokens == 4
    bench.scheduler.finish(bench.scheduler.sequences["runs"])
    assert [c.sequence.id for c in bench.step().chunks] == ["w2"]


def test_decodes_are_no_prompt_that_waits() -> None:
    bench = Bench(num_blocks=16)
    bench.add("a", tokens(5, first=10))
    assert bench.scheduler.queued_prefill_tokens == 5
    bench.step()
    assert bench.scheduler.queued_prefill_tokens == 0


def test_nobody_gives_way_whose_blocks_others_hold_too() -> None:
    """It would waste nothing, and free nothing."""
    bench = Bench(num_blocks=8)
    shared = tokens(8, first=10)
    bench.add("maker", shared)
    bench.step()
    bench.scheduler.finish(bench.scheduler.sequences["maker"])
    early = bench.add("early", tokens(3, first=11))
    bench.add("eater", tokens(3, first=12))
    bench.step()
    bench.add("keeper", shared, remote_prefill=True)
    late = bench.add("late", shared, remote_prefill=True, priority=1)
    while len(early.tokens) < 13:
        assert not bench.step().preempted
    assert bench.pool.num_free == 0
    bench.scheduler.start_decode(late, 9)
    step = bench.step()
    assert [victim.id for victim in step.preempted] == ["eater"]
    assert [chunk.sequence.id for chunk in step.chunks] == ["early", "late"]


def test_what_many_have_in_common_is_computed_once() -> None:
    bench = Bench(num_blocks=40, budget=8)
    common = list(range(20, 32))
    first = bench.add("first", [*common, 1])
    others = [bench.add(name, [*common, 2, number]) for number, name in enumerate("ab")]
    assert [chunk.sequence for chunk in bench.step().chunks] == [first]
    step = bench.step()  # the rest of it; the others wait for this last block, too
    assert [(chunk.sequence, chunk.count) for chunk in step.chunks] == [(first, 5)]
    step = bench.step()
    told = {chunk.sequence.id: (chunk.start, chunk.count) for chunk in step.chunks}
    assert told == {"first": (13, 1), "a": (12, 2), "b": (12, 2)}
    assert [other.num_cached for other in others] == [12, 12]


def test_who_waits_for_a_block_goes_on_when_it_will_not_come() -> None:
    for end in (Scheduler.abort, Scheduler.finish):
        bench = Bench(num_blocks=40, budget=8)
        first, second = (bench.add(name, list(range(20, 50))) for name in ("first", "second"))
        bench.step()
        assert second.status is Status.WAITING
        end(bench.scheduler, first)
        bench.scheduler.check()
        assert [chunk.sequence for chunk in bench.step().chunks] == [second]


def test_nobody_waits_for_blocks_of_another_prompt_salt_or_without_a_cache() -> None:
    def begins_at_once(**how: Any) -> bool:
        bench = Bench(num_blocks=40, budget=64)
        bench.scheduler.tables.prefix_caching = how.pop("prefix_caching", True)
        bench.add("first", list(range(20, 30)))
        second = bench.add("second", how.pop("prompt", list(range(20, 30))), **how)
        bench.step()
        return second.status is Status.RUNNING

    assert not begins_at_once()
    assert begins_at_once(salt=b"other")
    assert begins_at_once(prompt=[1, *range(20, 30)])
    assert begins_at_once(prompt=[20, 21, 22])  # no full block
    assert begins_at_once(prefix_caching=False)


class Asked:
    """In a scheduler's place for guesses: who was asked, and nobody has any."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def wanted(
        self, decodes: list[Sequence], shape: StepShape, room: int, prompts: bool
    ) -> dict[str, int]:
        assert shape.decodes == len(decodes)
        self.names |= {sequence.id for sequence in decodes}
        return {}


def test_a_prompts_last_token_is_no_decode_however_few_are_left() -> None:
    """Else a guess is made of it, and its first token counts as a decode's."""
    bench = Bench(num_blocks=100, budget=8, cost=warmed(additive))
    bench.scheduler.speculation = asked = Asked()  # type: ignore[assignment]
    last = StepShape(prompt_tokens=1, prompt_context=9)
    nine = tokens(9, first=10)
    bench.add("in chunks", nine)
    bench.step()
    assert bench.scheduler.queued_prefill_tokens == 1
    assert bench.step().shape == last
    bench.scheduler.finish(bench.scheduler.sequences["in chunks"])
    bench.add("of one", [15])
    assert bench.step().shape == StepShape(prompt_tokens=1, prompt_context=1)
    bench.scheduler.finish(bench.scheduler.sequences["of one"])
    cached = bench.add("cached", nine)
    assert bench.step().shape == last
    assert not asked.names

    for length in (10, 11, 12, 13):
        assert bench.scheduler.queued_prefill_tokens == 0
        assert bench.step().shape == StepShape(decodes=1, decode_context=length)
    assert asked.names == {"cached"}
    bench.scheduler.places.preempt(cached, Step())
    chunks = [chunk for _ in range(2) for chunk in bench.step().chunks]
    assert [(chunk.count, chunk.is_decode) for chunk in chunks] == [(2, False), (1, True)]
