"""Tokens that are guessed ahead change nothing but how many steps it takes."""

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.cpu.library import supported
from services.worker.engine import Constraint, EngineConfig, Request, Sampling
from services.worker.engine.kv.block_pool import BlockPool
from services.worker.engine.scheduling.cost_model import CostModel, StepShape
from services.worker.engine.scheduling.host_cost import HostCost
from services.worker.engine.scheduling.scheduler import Scheduler
from services.worker.engine.sequence import Sequence
from services.worker.engine.speculation import guess_rules
from services.worker.engine.speculation import lookup as lookup_module
from services.worker.engine.speculation.acceptance import Acceptance
from services.worker.engine.speculation.lookup import Lookup
from services.worker.engine.speculation.proposer import Wanted
from services.worker.engine.speculation.speculation import Speculation
from tests.support.checkpoint import write_checkpoint
from tests.unit.engine.checkpoints import VOCAB
from tests.unit.engine.driving import drive, greedy, make_engine, make_prompts
from tests.unit.engine.guessing import (
    KINDS,
    NOBODY,
    Oracle,
    guess,
    guessing_engine,
    requests_of,
    told,
)
from tests.unit.engine.synthetic import Machine, roofline

Checkpoint = Callable[..., Path]


@pytest.mark.parametrize("kernels", [*supported()[:1], "reference"])
@pytest.mark.parametrize("num_blocks", [256, 9], ids=["room", "preempted"])
def test_it_changes_nothing(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, kernels: str, num_blocks: int
) -> None:
    """Whichever way of sampling, alone or beside others, with blocks or preempted for them."""
    folder, asked = checkpoint(), requests_of(KINDS)
    plain = make_engine(folder, num_blocks=num_blocks, kernels=kernels)
    want = drive(plain, asked)
    engine = guessing_engine(
        folder, monkeypatch, want.tokens, num_blocks=num_blocks, kernels=kernels
    )
    found = drive(engine, asked)
    assert told(found) == told(want)
    assert bool(found.num_preempted) == (num_blocks == 9)
    drafted, accepted = (
        sum(getattr(step, name) for step in found.steps)
        for name in ("draft_tokens", "accepted_tokens")
    )
    assert 0.3 < accepted / drafted < 0.95
    if not found.num_preempted:
        assert len(found.steps) < 0.7 * len(want.steps)
    outputs = [output for step in found.steps for output in step.outputs]
    assert sum(output.draft_tokens for output in outputs) == drafted
    assert sum(output.accepted_tokens for output in outputs) == accepted
    assert all(output.accepted_tokens <= output.draft_tokens for output in outputs)
    made = sum(map(len, found.tokens.values())) - len(asked)
    again = len(asked) * found.num_preempted  # a first token behind what was computed again
    assert made - again <= sum(step.decode_tokens for step in found.steps) <= made
    # What is found in the cache is what its names say.
    assert drive(engine, asked).tokens == want.tokens


def test_split_and_gone_on_with_elsewhere(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = checkpoint(), requests_of(KINDS)[:6]
    first = make_engine(folder)
    want = drive(first, asked).tokens
    engine = guessing_engine(folder, monkeypatch, want)
    for one in asked:
        engine.add(replace(one, remote_prefill=True))
    engine.step()
    for one in asked:
        run = drive(first, [replace(one, prefill_only=True, export_kv="inline")])
        for step in run.steps:
            for blocks in step.kv_exports:
                engine.write_kv(blocks)
        engine.start_decode(one.request_id, want[one.request_id][0])
    found = drive(engine, [])
    assert found.tokens == {name: tokens[1:] for name, tokens in want.items()}
    rests = [
        replace(
            one,
            prompt_token_ids=one.prompt_token_ids + want[one.request_id][:9],
            sampling=replace(one.sampling, max_tokens=31, prompt_logprobs=None),
            generated_prefix=9,
        )
        for one in asked
    ]
    assert drive(engine, rests).tokens == {name: tokens[9:] for name, tokens in want.items()}


def test_grammars_hold_for_guesses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And say what must come, without anybody's guess."""
    folder = write_checkpoint(tmp_path, window=2048)
    shape = {
        "type": "object",
        "properties": {"a_name_that_is_long": {"type": "integer"}, "y": {"type": "null"}},
        "required": ["a_name_that_is_long", "y"],
        "additionalProperties": False,
    }
    forms = [
        Constraint("json_schema", json.dumps(shape)),
        Constraint("regex", "([a-d]{9} ){3}"),
        Constraint("choice", '["on and on and on", "off"]'),
    ]
    asked = [
        Request(str(i), [*range(10, 40)], Sampling(90, 2.0, seed=i, constraint=forms[i % 3]))
        for i in range(6)
    ]
    want = drive(make_engine(folder), asked)
    engine = guessing_engine(folder, monkeypatch, want.tokens)
    found = drive(engine, asked)
    assert told(found) == told(want)
    assert sum(step.accepted_tokens for step in found.steps) > 20
    guess(monkeypatch, NOBODY)
    forced = drive(make_engine(folder, speculation="ngram"), asked)
    assert told(forced) == told(want)
    assert sum(step.accepted_tokens for step in forced.steps) > 5


def test_what_is_drawn_is_distributed_as_the_model_says(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though always the likeliest tokens are guessed: by chi-square, over three tokens."""
    draws, sampling = 3000, Sampling(3, temperature=1.0, top_k=3, ignore_eos=True, logprobs=3)
    engine, prompt = make_engine(checkpoint()), make_prompts(1, seed=8)[0]
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    best: dict[tuple[int, ...], int] = {}
    for depth in range(3):
        asked = [
            Request(str(i), [*prompt, *made], replace(sampling, max_tokens=1))
            for i, made in enumerate(expected)
        ]
        run = drive(engine, asked)
        tops = {
            output.request_id: output.logprobs[0]
            for step in run.steps
            for output in step.outputs
            if output.logprobs
        }
        deeper = {}
        for i, (made, chance) in enumerate(expected.items()):
            weights = [exp(value) for value in tops[str(i)].top_logprobs]
            best[made] = tops[str(i)].top_ids[0]
            for token, weight in zip(tops[str(i)].top_ids, weights, strict=True):
                deeper[*made, token] = chance * weight / sum(weights)
        expected = deeper
        assert len(expected) == 3 ** (depth + 1)

    def likeliest(sequence: Sequence, count: int) -> list[int]:
        made = tuple(sequence.tokens[len(prompt) :])
        guesses: list[int] = []
        while len(guesses) < count:
            guesses.append(best[*made, *guesses])
        return guesses

    guess(monkeypatch, Oracle(likeliest, VOCAB, lambda below: below - 1))
    guessing = make_engine(checkpoint(), speculation="ngram", num_speculative_tokens=2)
    plain = replace(sampling, logprobs=None)
    run = drive(guessing, [Request(str(i), prompt, replace(plain, seed=i)) for i in range(draws)])
    assert sum(step.accepted_tokens for step in run.steps) > draws / 9
    counts = Counter(map(tuple, run.tokens.values()))
    assert set(counts) <= set(expected)
    often = {made: chance * draws for made, chance in expected.items() if chance * draws >= 5}
    rest = draws - sum(often.values()), draws - sum(counts[made] for made in often)
    pairs = [(count, counts[made]) for made, count in often.items()] + (
        [rest] if rest[0] > 5 else []
    )
    distance = sum((count - want) ** 2 / want for want, count in pairs)
    # Of so many degrees of freedom, exceeded once in a million times (Wilson and Hilferty).
    freedom = len(pairs) - 1
    assert distance < freedom * (1 - 2 / (9 * freedom) + 4.75 * (2 / (9 * freedom)) ** 0.5) ** 3


def test_guesses_take_no_block_that_is_not_free() -> None:
    """Nobody is preempted for them, and what they did not fill is given back."""
    pool = BlockPool(3, 4)
    cost = CostModel()
    cost.learn(StepShape(decodes=2), 1e-3)
    oracle = Oracle(lambda sequence, count: [7] * count, 9, lambda below: below - 1)
    scheduler = Scheduler(
        pool, cost, 64, 2, speculation=Speculation([oracle], cost, depth=6, rows=64)
    )
    sequences = [
        Sequence(Request(name, [1, 2], Sampling(30)), i, 4, frozenset(), 100, 0)
        for i, name in enumerate("ab")
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    for chunk in scheduler.schedule().chunks:
        scheduler.complete(chunk, [7])
    step = scheduler.schedule()
    # Room of each: one token in its block, and four in the only free one.
    assert [len(chunk.drafts) for chunk in step.chunks] in ([1, 5], [5, 1])
    assert not step.preempted
    assert pool.num_free == 0
    for chunk in step.chunks:
        scheduler.complete(chunk, [8])
    assert pool.num_free == 1
    assert [s.num_computed for s in sequences] == [3, 3]
    scheduler.check()


class Offering:
    """Has always as many as one likes."""

    def __init__(self, depth_s: float = 0.0, begin_s: float = 0.0) -> None:
        self._depth_s, self._begin_s = depth_s, begin_s
        self.asked: list[str] = []

    def look_s(self, sequence: Sequence) -> float:
        return 0.0

    def begin_s(self, sequence: Sequence) -> float:
        return self._begin_s

    def offers(self, sequence: Sequence, most: int) -> int:
        self.asked.append(sequence.id)
        return most

    def depth_s(self, rows: int, context: int) -> float:
        return self._depth_s

    def propose(self, wanted: Wanted, seconds: float) -> list[list[int]]:
        return [[1] * count for _, count in wanted]


def with_guesses(machine: Machine) -> Machine:
    """A guess is a row as a decode is, that looks back on nothing of its own."""
    return lambda shape: machine(shape._replace(decodes=shape.decodes + shape.drafts, drafts=0))


def settled(
    batch: int,
    right: float,
    machine: Machine,
    steps: int = 150,
    depth_s: float = 0.0,
    host_s: float = 0.0,
) -> float:
    """Of a batch whose guesses are right so often: tokens a second in the last steps, as a part of
    those without guesses. `host_s`: what each guess takes the host."""
    cost, rng = CostModel(), random.Random(4)
    speculation = Speculation([Offering(depth_s)], cost, depth=5, rows=128)
    machine = with_guesses(machine)
    sequences = [
        Sequence(Request(str(i), [1] * 100, Sampling(10**6)), i, 16, frozenset(), 10**7, 0)
        for i in range(batch)
    ]
    tokens = seconds = alone_s = 0.0
    for step in range(steps):
        context = sum(len(sequence.tokens) for sequence in sequences)
        alone = StepShape(decodes=batch, decode_context=context)
        wanted = speculation.wanted(sequences, alone, 400) if step else {}
        shape = alone._replace(drafts=sum(wanted.values()))
        cost.learn(shape, machine(shape))
        speculation.settle(shape, 1e-4 + shape.drafts * host_s)
        made = batch
        for sequence in sequences:
            if drafted := wanted.get(sequence.id, 0):
                accepted = 0
                while accepted < drafted and rng.random() < right:
                    accepted += 1
                speculation.learn(sequence, drafted, accepted)
                made += accepted
            sequence.tokens.append(1)
        if step >= steps / 2:
            tokens += made / batch
            seconds += machine(shape) + max(wanted.values(), default=0) * depth_s
            seconds += 1e-4 + shape.drafts * host_s
            alone_s += machine(alone) + 1e-4
    return tokens / (steps / 2) * alone_s / seconds


@pytest.mark.parametrize("batch", [1, 4, 16, 64])
@pytest.mark.parametrize("right", [0.05, 0.3, 0.7, 0.95])
def test_it_pays_or_it_does_not_happen(batch: int, right: float) -> None:
    """Where a step waits for its weights, and where it waits for the arithmetic."""
    for depth_s in (0.0, 1e-3):
        faster = settled(batch, right, roofline, depth_s=depth_s)
        assert faster > 0.97
        if batch == 1 and right >= 0.7:
            assert faster > 1.4
        if batch == 64 and right <= 0.3:
            assert faster < 1.03, "there is nothing to be won"


def test_what_guesses_take_the_host_is_theirs() -> None:
    """Were it any step's, it would argue for more of them."""
    for batch in (1, 8):
        assert settled(batch, 0.6, roofline, host_s=5e-3) > 0.97
        assert settled(batch, 0.9, roofline, host_s=1e-6) > 1.1
    host = HostCost(1e-4)
    rng = random.Random(2)
    for _ in range(200):
        drafts = rng.randrange(0, 40)
        late = 10 if rng.random() < 0.05 else 1
        host.learn(drafts, late * (3e-4 + 2e-5 * drafts) * rng.uniform(0.8, 1.2))
    assert host.step_s == pytest.approx(3e-4, rel=0.5)
    assert 1e-5 < host.guess_s < 4e-5
    for _ in range(200):  # all alike: what is known stays
        host.learn(8, 4e-4)
    assert 1e-5 < host.guess_s < 4e-5


def test_guesses_are_of_those_that_guess_well() -> None:
    """Beside others, whose guesses would not pay: they are not even looked for."""
    cost, offering = CostModel(), Offering()
    machine, batch = with_guesses(roofline), 8
    guesses = Speculation([offering], cost, depth=5, rows=128)
    sequences = [
        Sequence(Request(str(i), [1] * 100, Sampling(10**6)), i, 16, frozenset(), 10**7, 0)
        for i in range(batch)
    ]
    shape = StepShape(decodes=batch, decode_context=100 * batch)
    for drafts in (0, 8, 0, 24, 0, 16) * 5:
        cost.learn(shape._replace(drafts=drafts), machine(shape._replace(drafts=drafts)))
    for _ in range(2):
        wanted = guesses.wanted(sequences, shape, 400)
        for sequence in sequences:
            good = int(sequence.id) % 2
            if drafted := wanted.get(sequence.id, 0):
                guesses.learn(sequence, drafted, drafted if good else 0)
    offering.asked.clear()
    wanted = guesses.wanted(sequences, shape, 400)
    assert {int(name) % 2 for name in wanted} == {1}
    assert {int(name) % 2 for name in offering.asked} == {1}


@pytest.mark.parametrize("right", [0.5, 1.0])
def test_beside_prompts_a_guess_saves_no_step(right: float) -> None:
    """But what a decode adds to one, of which it takes most itself."""
    cost, step = CostModel(), StepShape(decodes=8, decode_context=800)
    for decodes, drafts in ((8, 0), (1, 0), (8, 8), (4, 4), (2, 0), (8, 24)) * 20:
        shape = StepShape(decodes=decodes, decode_context=100 * decodes, drafts=drafts)
        cost.learn(shape, 3e-3 + 2e-4 * decodes + 1e-4 * drafts)
    guesses = Speculation([Offering()], cost, depth=1, rows=128)
    sequences = [
        Sequence(Request(str(i), [1] * 100, Sampling(10**6)), i, 16, frozenset(), 10**7, 0)
        for i in range(8)
    ]
    for number in range(16):
        guesses.wanted(sequences, step, 400)
        for place, sequence in enumerate(sequences):
            guesses.learn(sequence, 1, 1 if right == 1.0 else (number + place) % 2)
    assert guesses.wanted(sequences, step, 400)
    beside = guesses.wanted(sequences, step, 400, prompts=True)
    assert bool(beside) == (right == 1.0)


def test_whoever_guesses_knows_of_prompts(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    real = Speculation.wanted

    def wanted(self: Speculation, *of: Any) -> dict[str, int]:
        told.append(of[-1])
        return real(self, *of)

    monkeypatch.setattr(Speculation, "wanted", wanted)
    engine = make_engine(checkpoint(), speculation="ngram", max_batched_tokens=16)
    engine.add(Request("a", make_prompts(1)[0][:9], greedy(30)))
    for _ in range(3):
        engine.step()
    assert told == [False, False]
    engine.add(Request("b", [*range(3, 63)], greedy(3)))
    engine.step()
    engine.step()
    assert told[2:] == [True, True], "queued, and begun"
    drive(engine, [])
    assert told[-1] is False


def test_costs_that_were_wrong_are_not_believed_for_ever() -> None:
    """A machine that was busy when guesses were tried: in a quiet hour they are tried again."""
    cost = CostModel()
    shape = StepShape(decodes=1, decode_context=100)
    for _ in range(5):
        cost.learn(shape, 1e-3)
        cost.learn(shape._replace(drafts=1), 3e-3)
    guesses = Speculation([Offering()], cost, depth=2, rows=9)
    sequence = Sequence(Request("a", [1] * 100, Sampling(10**6)), 0, 16, frozenset(), 10**7, 0)
    tried = [bool(guesses.wanted([sequence], shape, 9)) for _ in range(2000)]
    assert not any(tried[:300])
    assert any(tried)


def test_what_takes_long_to_begin_waits_until_as_much_has_come() -> None:
    cost = CostModel()
    shape = StepShape(decodes=1, decode_context=100)
    for drafts in (0, 1) * 5:
        cost.learn(shape._replace(drafts=drafts), 1e-3)
    guesses = Speculation([Offering(begin_s=0.01)], cost, depth=2, rows=9)
    sequence = Sequence(Request("a", [1] * 100, Sampling(10**6)), 0, 16, frozenset(), 10**7, 0)
    began = 0
    while not guesses.wanted([sequence], shape, 9):
        sequence.tokens.append(1)
        began += 1
        assert began < 100
    assert began > 20


def test_behind_what_ends_a_sequence_nothing_is_guessed() -> None:
    guesses = Speculation([Offering()], CostModel(), depth=5, rows=9)
    ends, goes_on = (
        Sequence(Request(name, [2] * 9, Sampling(99)), 0, 16, frozenset({token}), 10**7, 0)
        for name, token in (("ends", 1), ("goes on", 3))
    )
    guesses.wanted([ends, goes_on], StepShape(decodes=2, decode_context=18), 9)
    found = guesses.propose([(ends, 3), (goes_on, 3)], 1.0)
    assert found == {"ends": (1,), "goes on": (1, 1, 1)}


def test_who_guessed_wrong_is_tried_again() -> None:
    acceptance = Acceptance()
    acceptance.learn(10, 8, 0)
    acceptance.learn(11, 8, 0)
    low = acceptance.expected(12, 0.6)
    assert low < 0.4 < 0.5 < acceptance.expected(120, 0.6)
    assert acceptance.expected(12, 0.1) < 0.1 < low
    acceptance.learn(120, 8, 8)
    assert acceptance.expected(121, 0.6) > 0.85


def test_a_step_says_what_time_there_is_to_catch_up() -> None:
    pool, cost, given = BlockPool(30, 4), CostModel(), []
    for _ in range(30):
        cost.learn(StepShape(decodes=1), 1e-3)

    class Catching(Offering):
        def propose(self, wanted: Wanted, seconds: float) -> list[list[int]]:
            given.append(seconds)
            return [[7] for _ in wanted]

    guesses = Speculation([Catching()], cost, depth=1, rows=64)
    scheduler = Scheduler(pool, cost, 64, 2, target_itl_s=5e-3, speculation=guesses)
    scheduler.add(Sequence(Request("a", [1, 2], Sampling(30)), 0, 4, frozenset(), 100, 0))
    for _ in range(2):
        for chunk in scheduler.schedule().chunks:
            scheduler.complete(chunk, [7])
    assert given == [pytest.approx(4e-3, rel=0.3)]


def test_finding_guesses_is_counted_once() -> None:
    """Where they are found, and not as what a step takes the host besides."""
    cost = CostModel()
    guesses = Speculation([Offering()], cost, depth=1, rows=9)
    for _ in range(300):
        guesses._guessed_s = 5e-3
        guesses.settle(StepShape(decodes=1), 5e-3 + 2e-4)
    assert guesses._host.step_s == pytest.approx(2e-4, rel=0.1)


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    grows=st.lists(st.integers(1, 9), max_size=4),
    least=st.integers(1, 3),
    most=st.integers(3, 6),
    count=st.integers(1, 6),
)
def test_it_finds_what_was_before(
    tokens: list[int], grows: list[int], least: int, most: int, count: int
) -> None:
    """Of the last eight places where `least` tokens agree, the last of those that agree most."""
    lookup = Lookup(least, most)
    for length in [*range(1, len(tokens), 5), len(tokens)]:
        now = tokens[:length]
        found = lookup.following(now, count)

        def agreeing(place: int, now: list[int] = now) -> int:
            agree = 0
            while agree < min(most, place) and now[place - 1 - agree] == now[-1 - agree]:
                agree += 1
            return agree

        places = [place for place in range(length - 1, 0, -1) if agreeing(place) >= least][:8]
        if not places:
            assert found == []
            continue
        place = max(places, key=lambda one: (agreeing(one), one))
        endless = [*now, now[place]]
        while len(endless) < length + count:
            endless.append(endless[len(endless) - length + place])
        assert found == endless[length : length + count]


def test_runs_of_one_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LEAST_SIZE", "_MOST_SIZE"):
        monkeypatch.setattr(lookup_module, name, 1)
    assert Lookup(2, 4).following([1, 2, 3, 9, 2, 8, 7, 2], 2) == []
    assert Lookup(2, 4).following([1, 2, 3, 9, 2, 8, 1, 2], 2) == [3, 9]


def test_it_takes_little_memory() -> None:
    lookup, tokens = Lookup(2, 8), [random.Random(5).randrange(50_000) for _ in range(40_000)]
    for _ in range(6):
        lookup.following(tokens, 3)
    assert len(lookup._before) == len(tokens)
    held = sum(len(part) * part.itemsize for part in (lookup._last, lookup._before))
    assert held <= 20 * len(tokens)
    assert not any(isinstance(part, dict) for part in vars(lookup).values())


def test_a_long_prompt_is_taken_in_piece_by_piece() -> None:
    prompt = [*range(20_000), 5, 6]
    lookup = Lookup(2, 4)
    for count in (3, 3, 3):
        found = lookup.following(prompt, count)
    assert found == [7, 8, 9]
    assert Lookup(2, 4).following(prompt, 3) == [7, 8, 9], "the beginning is in the first piece"
    assert Lookup(2, 4).following([*range(20_000), 15_000, 15_001], 3) == []


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"speculation": "medusa"}, "speculation"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 33}, "num_speculative_tokens"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min"),
        ({"prompt_lookup_min": 9, "prompt_lookup_max": 8}, "prompt_lookup_min"),
        ({"speculation": "ngram", "overlap": True}, "overlap"),
        ({"speculation": "draft"}, "draft_model"),
        ({"speculation": "ngram", "draft_model": "."}, "draft_model"),
        ({"speculation": "draft", "draft_model": "no/where"}, "draft_model:"),
    ],
)
def test_settings_that_cannot_be_are_named(
    tmp_path: Path, settings: dict[str, Any], names: str
) -> None:
    with pytest.raises(ValueError, match=f"^{names} "):
        EngineConfig(model=str(tmp_path), **settings)


def test_steps_do_not_overlap_where_tokens_are_guessed(tmp_path: Path) -> None:
    config = EngineConfig(model=str(tmp_path), device="cuda", speculation="ngram")
    assert not config.overlaps


def test_a_text_that_repeats_takes_fewer_steps(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the look-up itself: a bias makes the model say what it said."""
    monkeypatch.setattr(guess_rules, "MARGIN", 0.0)  # so small a model computes faster than a look
    folder, prompt = checkpoint(), [50, 60, 70, 80] * 4
    asked = Request("a", prompt, greedy(40, logit_bias=tuple((t, 30.0) for t in (50, 60))))
    want = drive(make_engine(folder), [asked])
    found = drive(make_engine(folder, speculation="ngram"), [asked])
    assert found.tokens == want.tokens
    assert len(found.steps) < 0.7 * len(want.steps)
