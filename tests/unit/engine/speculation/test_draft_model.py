"""Guesses of a smaller model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification

from kernels.cpu.library import supported
from services.worker.engine import EngineConfig, Request, Sampling
from services.worker.engine import engine as engine_module
from services.worker.engine.engine import Engine
from services.worker.engine.parallel.seats import Lock, Seat, Spread
from services.worker.engine.runners.runner import Runner
from services.worker.engine.scheduling.chunks import Chunk
from services.worker.engine.scheduling.cost_model import CostModel
from services.worker.engine.sequence import Sequence
from services.worker.engine.speculation import draft_model, guess_rules
from services.worker.engine.speculation.drafted import Drafted
from tests.support.checkpoint import write_checkpoint
from tests.unit.engine.checkpoints import VOCAB, make
from tests.unit.engine.driving import Run, drive, greedy, make_engine, make_prompts
from tests.unit.engine.guessing import (
    FEW,
    KINDS,
    NOBODY,
    guess,
    guessing_engine,
    requests_of,
    told,
)
from tests.unit.engine.process.test_engine_client import INFO

Checkpoint = Callable[..., Path]


def drafting(folder: Path, draft: Path, **settings: Any) -> Engine:
    return make_engine(folder, speculation="draft", draft_model=str(draft), **settings)


def accepted(run: Run) -> float:
    drafted = sum(step.draft_tokens for step in run.steps)
    return sum(step.accepted_tokens for step in run.steps) / max(1, drafted)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model guesses, alone, and whether it pays or not: so small a model computes faster
    than another."""
    guess(monkeypatch, NOBODY)
    monkeypatch.setattr(guess_rules, "WAGER", 0.0)


def test_it_is_whole_and_here_wherever_ranks_of_the_model_are(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint()
    spread = Spread((Seat("127.0.0.2", str(folder)), Seat("127.0.0.3", str(folder), 1)), Lock(b""))
    config = EngineConfig(
        str(folder),
        tensor_parallel=2,
        spread=spread,
        speculation="draft",
        draft_model=str(folder),
    )
    told: list[EngineConfig] = []

    def make_runner(own: EngineConfig) -> Runner:
        told.append(own)
        raise ValueError("so far")

    monkeypatch.setattr(draft_model, "make_runner", make_runner)
    with pytest.raises(ValueError, match="draft_model: so far"):
        draft_model.DraftProposer(config, INFO)
    assert (told[0].tensor_parallel, told[0].spread) == (1, None)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("kernels", [*supported()[:1], "reference"])
def test_who_thinks_alike_guesses_right(checkpoint: Checkpoint, kernels: str) -> None:
    """Drawn tokens, too, from what was computed for others, behind wrong guesses of a grammar or
    anybody, and after a preemption: it knows of each sequence all that there is before its guesses.
    """
    folder = checkpoint()
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0, "logprobs": 1},
        {"temperature": 1.4, "top_k": 20},
        {"temperature": 0.7, "min_tokens": 39, "stop_token_ids": tuple(range(100))},
        {"temperature": 1.0, "logit_bias": FEW},
    ]
    asked = requests_of(kinds)
    shared = make_prompts(1, longest=60, seed=1)[0] + [7] * 33
    asked += [
        Request(name, [*shared, i], Sampling(20, 1.0, seed=i)) for i, name in enumerate("xyz")
    ]
    for num_blocks in (256, 9):
        want = drive(make_engine(folder, num_blocks=num_blocks, kernels=kernels), asked)
        engine = drafting(folder, folder, num_blocks=num_blocks, kernels=kernels)
        found = drive(engine, asked)
        assert told(found) == told(want)
        assert accepted(found) > 0.97
        assert bool(found.num_preempted) == (num_blocks == 9)
    assert len(drive(drafting(folder, folder), asked).steps) < len(want.steps) / 3


@pytest.mark.usefixtures("eager")
def test_who_thinks_otherwise_changes_nothing(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A model of other weights, whose context is shorter; many guesses are wrong."""
    folder = checkpoint()
    other = make(tmp_path, "gqa", seed=8, max_position_embeddings=64)
    few = [kind | {"logit_bias": FEW} for kind in KINDS[:-1]]
    asked = requests_of(few)
    want = drive(make_engine(folder), asked)
    found = drive(drafting(folder, other, num_speculative_tokens=3), asked)
    assert told(found) == told(want)
    assert 0.05 < accepted(found) < 0.9
    beyond = Request("b", make_prompts(1, longest=200, seed=3)[0] + [5] * 70, greedy(5))
    assert not sum(step.draft_tokens for step in drive(drafting(folder, other), [beyond]).steps)


@pytest.mark.usefixtures("eager")
def test_a_prompt_is_caught_up_with_in_pieces(checkpoint: Checkpoint) -> None:
    """Those of a step have a step's tokens together, and nobody guesses before he is caught up."""
    folder = checkpoint()
    asked = [Request(str(i), [9 + i] * 100, Sampling(30, seed=i)) for i in range(3)]
    want = drive(make_engine(folder), asked)
    found = drive(drafting(folder, folder, max_batched_tokens=32), asked)
    assert told(found) == told(want)
    assert accepted(found) > 0.97


@pytest.mark.usefixtures("eager")
def test_many_who_are_a_little_behind_take_turns(checkpoint: Checkpoint) -> None:
    """Together they are more than a step has tokens for."""
    folder = checkpoint()
    asked = [Request(str(i), [9 + i] * 5, Sampling(20, seed=i)) for i in range(16)]
    want = drive(make_engine(folder, max_running=16), asked)
    engine = drafting(folder, folder, max_batched_tokens=32, max_running=16)
    found = drive(engine, asked)
    assert told(found) == told(want)
    assert accepted(found) > 0.97
    proposer = engine.scheduler.speculation._sources[1].proposer  # type: ignore[union-attr]
    assert proposer._runner is not None, "it has failed"  # type: ignore[attr-defined]


def test_what_was_before_is_taken_before_a_model_is_asked(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the model knows what came of it, when it is asked."""
    folder = checkpoint()
    asked = requests_of([{"temperature": 1.0}] * 4)
    want = drive(make_engine(folder), asked)
    known = {name: tokens[:20] for name, tokens in want.tokens.items()}
    guessing_engine(folder, monkeypatch, known)  # an oracle, as far as it knows
    monkeypatch.setattr(guess_rules, "WAGER", 0.0)
    engine = drafting(folder, folder)
    found = drive(engine, asked)
    assert told(found) == told(want)
    guesses = engine.scheduler.speculation
    assert guesses is not None
    right = [source.acceptance.expected(guesses._tokens, 0.5) for source in guesses._sources]
    assert right[0] < 0.9 < 0.97 < right[1]


@pytest.mark.usefixtures("eager")
def test_a_draft_model_that_fails_ends_nothing(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint()
    engine = drafting(folder, folder)
    guesses = engine.scheduler.speculation
    assert guesses is not None
    asked = Request("a", make_prompts(1)[0], greedy(30))
    want = drive(make_engine(folder), [asked])
    engine.add(asked)
    steps = [engine.step() for _ in range(3)]
    assert sum(step.accepted_tokens for step in steps)

    def fail(plan: object) -> None:
        raise RuntimeError("device trouble")

    guesses._sources[1].proposer._runner.launch = fail  # type: ignore[attr-defined]
    rest = drive(engine, [])
    tokens = [t for step in steps for o in step.outputs for t in o.new_token_ids]
    assert tokens + rest.tokens["a"] == want.tokens["a"]
    assert not sum(step.draft_tokens for step in rest.steps)
    assert "no tokens are guessed from now on" in caplog.text


def test_it_knows_what_it_has_computed(checkpoint: Checkpoint) -> None:
    """Not what was guessed wrong, and not a block of which it wrote another beginning."""
    drafted = Drafted(4)
    drafted.fed = [8, 7, 9]
    assert drafted.catch_up([1, 2, 3, 4, 8, 6, 9, 5]) == 5
    assert drafted.catch_up([1, 2, 3, 4, 8, 6, 9, 5]) == 5, "once"
    folder = checkpoint()
    engine = drafting(folder, folder)
    assert engine.scheduler.speculation is not None
    proposer: Any = engine.scheduler.speculation._sources[1].proposer
    sequence = Sequence(Request("a", [5] * 40, Sampling(9)), 0, 16, frozenset(), 256, 0)
    sequence.hold([3, 4, 5, 6])
    assert proposer.propose([(sequence, 2)], 1.0) != [[]]
    assert set(proposer._hashes) == {3, 4}
    other = Sequence(Request("b", [6] * 20, Sampling(9)), 0, 16, frozenset(), 256, 0)
    other.hold([7, 4])
    proposer.propose([(other, 2)], 1.0)
    assert set(proposer._hashes) == {3, 7}
    again = Sequence(Request("c", [5] * 40, Sampling(9)), 0, 16, frozenset(), 256, 0)
    again.hold([3, 4, 8])
    assert proposer._computed(again) == 16


def test_guesses_in_blocks_that_are_given_back_are_forgotten() -> None:
    sequence = Sequence(Request("a", [5] * 6, Sampling(9)), 0, 4, frozenset(), 99, 0)
    sequence.hold([1, 2, 3])
    sequence.drafted = Drafted(6)
    sequence.drafted.fed = [7, 7, 7, 7]
    assert sequence.let_go() == [3]
    assert sequence.drafted.fed == [7, 7]


def test_catching_up_takes_the_time_that_prompts_leave(checkpoint: Checkpoint) -> None:
    folder = checkpoint()
    engine = drafting(folder, folder)
    scheduler = engine.scheduler
    assert scheduler.speculation is not None
    proposer: Any = scheduler.speculation._sources[1].proposer
    proposer._cost = CostModel()
    proposer._cost._costs = [0.0, 1e-3, 0.0, 1e-3, 0.0, 0.0]  # a token takes 1 ms
    far, near = (
        Sequence(Request(name, [5] * 90, Sampling(9)), 0, 16, frozenset(), 256, 0) for name in "fn"
    )
    far.hold([*range(6)])
    near.drafted = Drafted(86)
    rows = proposer._rows([(far, 2), (near, 3)], 0.02)
    assert [(row.sequence.id, row.guesses) for row in rows] == [("n", 3), ("f", 0)]
    assert 15 <= rows[1].end - rows[1].start <= 25
    assert [row.sequence.id for row in proposer._rows([(far, 2), (near, 3)], 0.0)] == ["n"]


def test_it_waits_for_no_grammar() -> None:
    sequence: Any = Sequence(
        Request("a", [5] * 6, Sampling(9, logprobs=3, constraint="x")), 0, 4, frozenset(), 99, 0
    )
    sequence.hold([1, 2])
    sequence.matcher = object()
    plan = draft_model._plan([Chunk.of(sequence, 6)], {})
    assert len(plan.sampled) == 1
    assert not len(plan.constrained)
    assert plan.samplings["logprobs"].tolist() == [0]


def test_it_has_its_part_of_the_memory(checkpoint: Checkpoint) -> None:
    folder = checkpoint()
    room = {"num_blocks": None, "kv_cache_bytes": 2**20}
    assert drafting(folder, folder, **room).info.num_blocks == (
        make_engine(folder, **room).info.num_blocks // 2
    )


def test_another_vocabulary_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    larger = make(tmp_path / "larger", "gqa", vocab_size=VOCAB + 3)
    with pytest.raises(ValueError, match=r"draft_model .* vocabulary of 260 tokens"):
        drafting(checkpoint(), larger)
    classes = make(tmp_path / "classes", "gqa", kind=AutoModelForSequenceClassification)
    for folder, draft in ((checkpoint(), classes), (classes, checkpoint())):
        with pytest.raises(ValueError, match=r"draft_model guesses tokens, and .* makes none"):
            drafting(folder, draft)
    ours, theirs = (write_checkpoint(tmp_path / name, window=256) for name in ("ours", "theirs"))
    path = theirs / "tokenizer.json"
    changed = json.loads(path.read_text())
    first, second = [*changed["model"]["vocab"]][:2]
    vocabulary = changed["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(changed))
    with pytest.raises(ValueError, match=r"draft_model .* the same ids are other tokens"):
        drafting(ours, theirs)


@pytest.mark.usefixtures("eager")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, at infinities
def test_on_triton(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its interpreter: both models."""
    for module in (engine_module, draft_model):
        monkeypatch.setattr(module, "warm_up", lambda *_: None)
    folder = checkpoint()
    few: dict[str, Any] = {"max_tokens": 5, "ignore_eos": True}
    asked = [
        Request("0", [7, 8, 9], Sampling(seed=1, **few)),
        Request("1", [9] * 7, Sampling(seed=2, temperature=0.9, logprobs=1, **few)),
    ]
    small = {"max_running": 2, "num_blocks": 12, "max_batched_tokens": 12}
    want = drive(make_engine(folder, kernels="reference", **small), asked)
    found = drive(drafting(folder, folder, kernels="triton", **small), asked)
    assert found.tokens == want.tokens
    assert sum(step.accepted_tokens for step in found.steps) >= 3


@pytest.mark.skipif(not supported(), reason="no kernels for this processor")
@pytest.mark.usefixtures("eager")
def test_its_weights_are_rounded_as_the_models_are(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint()
    asked = requests_of([{"temperature": 0.0}, {"temperature": 1.0}])
    want = drive(make_engine(folder, quantization="int8"), asked)
    found = drive(drafting(folder, folder, quantization="int8"), asked)
    assert told(found) == told(want)
    assert accepted(found) > 0.97
    narrow = make(tmp_path, "gqa", intermediate_size=98)
    with pytest.raises(ValueError, match="draft_model: quantization 'int8': intermediate_size 98"):
        drafting(folder, narrow, quantization="int8")
