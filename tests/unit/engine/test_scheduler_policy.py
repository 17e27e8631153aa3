"""Whom the scheduler prefers, one choice at a time. The property tests ask only what must hold."""

from services.worker.engine import Request, Sampling
from services.worker.engine.block_pool import BlockPool
from services.worker.engine.scheduler import Scheduler, Step
from services.worker.engine.sequence import Sequence, Status

BLOCK = 4


class Bench:
    """A scheduler whose steps always succeed; every request decodes the token 9 for ever."""

    def __init__(self, num_blocks: int, budget: int = 64, max_running: int = 8) -> None:
        self.pool = BlockPool(num_blocks, BLOCK)
        self.scheduler = Scheduler(self.pool, budget, max_running)
        self.arrivals = 0

    def add(self, name: str, prompt: list[int], priority: int = 0) -> Sequence:
        self.arrivals += 1
        request = Request(name, prompt, Sampling(1000), priority=priority)
        sequence = Sequence(request, self.arrivals, BLOCK, frozenset({0}), 1000, queued_ns=0)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Step:
        step = self.scheduler.schedule()
        for chunk in step.chunks:
            self.scheduler.complete(chunk, 9 if chunk.samples else None)
        self.scheduler.check()
        return step

    def preempted(self) -> list[str]:
        """Steps until somebody is; who it was."""
        for _ in range(100):
            if victims := self.step().preempted:
                return [victim.id for victim in victims]
        raise AssertionError("nobody is preempted")


def tokens(count: int, first: int) -> list[int]:
    """A prompt that shares no block with one of another `first`."""
    return [first, *range(20, 19 + count)]


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


def test_prompts_begun_go_by_arrival_too() -> None:
    bench = Bench(num_blocks=32, budget=8)
    bench.add("first", tokens(20, first=10))
    bench.step()
    bench.add("second", tokens(20, first=11))
    assert [c.sequence.id for c in bench.step().chunks] == ["first"]
    assert [(c.sequence.id, c.count) for c in bench.step().chunks] == [("first", 4), ("second", 4)]


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    """After a preemption a sequence finds its own blocks again, which is nobody's saving."""
    bench = Bench(num_blocks=6)
    one = bench.add("one", tokens(9, first=10))
    bench.step()
    bench.scheduler._preempt(one, Step())
    (chunk,) = bench.step().chunks
    assert chunk.start == 8
    assert one.num_cached == 0
    again = bench.add("again", tokens(9, first=10))
    bench.step()
    assert again.num_cached == 8
