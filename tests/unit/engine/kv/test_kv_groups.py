"""Layers that look back equally far share block tables: what they hold, find again and hand over,
and that it changes no token."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernels.cpu.library import built
from services.worker.engine import Request
from services.worker.engine.engine import Engine
from services.worker.engine.kv.block_pool import BlockPool
from services.worker.engine.kv.groups import KvGroup, blocks_of, kv_groups, most_tokens
from services.worker.engine.kv.tables import Tables
from services.worker.engine.models.registry import read_config
from services.worker.engine.plan import StepPlan
from services.worker.engine.runners.runner import Ticket
from services.worker.engine.scheduling.prompt_room import PromptRoom
from services.worker.engine.sequence import Sequence
from tests.unit.engine.checkpoints import make
from tests.unit.engine.driving import (
    drive,
    fail_when,
    generate,
    greedy,
    make_engine,
    make_prompts,
)
from tests.unit.engine.guessing import KINDS, guessing_engine, requests_of, told
from tests.unit.engine.published import PUBLISHED
from tests.unit.engine.speculation.test_draft_model import eager  # noqa: F401
from tests.unit.engine.test_engine_parity import check_against_transformers
from tests.unit.engine.test_engine_split import Pair, folder  # noqa: F401

Checkpoint = Callable[..., Path]
WINDOWED = ["mistral", "qwen2", "gemma2", "gemma3"]
"""One group with a window; one without and 1, 2 and 3 with one."""
each_variant = pytest.mark.parametrize("variant", WINDOWED)
LONG = [
    (prompt * 90)[:count]
    for prompt, count in zip(make_prompts(3, seed=8), (190, 97, 40), strict=True)
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_layer_is_in_a_group_of_its_window(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    model = read_config(tmp_path)
    groups = kv_groups(model)
    layers = [layer for group in groups for layer in group.layers]
    assert sorted(layers) == list(range(model.num_layers))
    for group in groups:
        sees = {model.layers[layer].window for layer in group.layers}
        assert {window % model.context for window in sees} == {group.window}
    width = len(groups[0].layers)
    assert all(len(group.layers) <= width for group in groups)
    assert len(groups) <= 16
    assert width * len(groups) <= model.num_layers * 1.06
    furthest = [group.window or model.context for group in groups]
    assert furthest == sorted(furthest, reverse=True)


def test_what_a_sequence_holds_is_what_its_groups_look_at() -> None:
    groups = KvGroup((0,)), KvGroup((1,), 33), KvGroup((2,), 33)
    assert [groups[1].first_seen(at, 16) for at in (0, 31, 32, 47, 48, 63, 64)] == [
        0, 0, 0, 0, 1, 1, 2,
    ]  # fmt: skip
    # Beside 62 of all tokens at most (32 + 64) / 16 of a window, and one that is not begun with.
    assert blocks_of(groups, 992, 16, at_once=64) == 62 + 2 * 7
    assert most_tokens(groups, 62 + 2 * 7, 16, 64, most=5000) == 992
    assert most_tokens(groups[1:], 14, 16, 64, most=5000) == 5000
    assert most_tokens(groups[1:], 13, 16, 64, most=5000) == 6 * 16


@each_variant
@pytest.mark.parametrize("kernels", ["reference", *built()])
def test_far_beyond_the_window_tokens_are_those_of_transformers(
    checkpoint: Checkpoint, variant: str, kernels: str
) -> None:
    """Also from the prefix cache, and where blocks are so few that all is given back and taken
    anew all the time."""
    engine = make_engine(checkpoint(variant), kernels=kernels, max_batched_tokens=24)
    outputs = generate(engine, LONG, greedy(40))
    check_against_transformers(checkpoint(variant), LONG, outputs)
    assert generate(engine, LONG, greedy(40)) == outputs
    few = blocks_of(engine.info.kv_groups, 240, 16, 24)
    engine = make_engine(
        checkpoint(variant), kernels=kernels, max_batched_tokens=24, num_blocks=few
    )
    assert engine.info.max_model_len >= 240
    assert generate(engine, LONG, greedy(40)) == outputs


def held_at_most(engine: Engine, requests: list[Request]) -> int:
    run, most = engine, 0
    for request in requests:
        engine.add(request)
    while run.has_work:
        run.step()
        most = max(most, run.pool.num_blocks - run.pool.num_free)
    return most


@each_variant
def test_memory_is_what_the_windows_need(checkpoint: Checkpoint, variant: str) -> None:
    """Counted in blocks that are held: of 230 tokens 15 of a group that sees all; of a window no
    more than lie in it and in a step."""
    engine = make_engine(checkpoint(variant), max_batched_tokens=32)
    groups = engine.info.kv_groups
    assert len(groups) == {"mistral": 1, "qwen2": 2, "gemma2": 3, "gemma3": 4}[variant]
    most = held_at_most(engine, [Request("a", LONG[0], greedy(40))])
    full = sum(not group.window for group in groups)
    bounds = [-(-(group.window + 31) // 16) + 1 for group in groups if group.window]
    assert 15 * full < most <= 15 * full + sum(bounds)
    # And so many go beside one another, where all that they compute would not.
    work = [Request(str(i), [3 + i, *LONG[0]], greedy(30)) for i in range(4)]
    few = make_engine(checkpoint(variant), max_batched_tokens=32, num_blocks=4 * most + 4)
    assert not drive(few, work).num_preempted
    assert 4 * most + 4 < 4 * 14 * len(groups)


@each_variant
def test_a_prefix_is_found_by_what_lies_in_the_windows(
    checkpoint: Checkpoint, variant: str
) -> None:
    """Behind a question's beginning, and behind an answer, whose first blocks nobody needs."""
    engine = make_engine(checkpoint(variant), max_batched_tokens=64)
    size, groups = 16, engine.info.kv_groups

    def cached(name: str, prompt: list[int]) -> tuple[int | None, list[int]]:
        run = drive(engine, [Request(name, prompt, greedy(20))])
        usage = run.last[name].usage
        return usage and usage.cached_tokens, run.tokens[name]

    _, answer = cached("first", LONG[0])
    assert cached("other end", [*LONG[0][:150], 9, 9])[0] == 150 // size * size
    told = LONG[0] + answer
    assert cached("next turn", [*told, 5, 6])[0] == (len(told) - 1) // size * size
    # What windows passed was freed first, so it is evicted first.
    passed = sum(group.first_seen(len(told), size) for group in groups)
    taken = [engine.pool.allocate(1)[0] for _ in range(len(engine.pool._empty) + passed // 2)]
    engine.pool.free(taken)
    assert cached("evicted", [*told, 7, 8])[0] == (len(told) - 1) // size * size
    if groups[0].window:
        assert cached("from its middle", [*LONG[0][:70], 9, 9])[0] == 0


FEW = {"mistral": 10, "qwen2": 22, "gemma2": 31, "gemma3": 43}
"""Blocks, which preempt, but for Gemma 2's: one too few there, and nobody is admitted."""


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"num_blocks": FEW},
        {"max_batched_tokens": 16},
        {"overlap": True, "max_batched_tokens": 16},
        {"threads": 3},
        {"kernels": "reference"},
        {"kv_format": "int8"},
        {"kv_format": "int4"},
        {"prefix_caching": False},
    ],
    ids=[
        *("together", "preempted", "chunked", "overlapped", "threads", "torch", "int8", "int4"),
        "uncached",
    ],
)
@each_variant
def test_ways_through_the_engine_change_nothing(
    checkpoint: Checkpoint, variant: str, how: dict[str, Any]
) -> None:
    work = [*requests_of(KINDS), *(Request(f"long {i}", p, greedy(30)) for i, p in enumerate(LONG))]
    of_values = {name: how[name] for name in ("kernels", "kv_format") if name in how}
    alone = make_engine(checkpoint(variant), prefix_caching=False, **of_values)
    want = {one.request_id: drive(alone, [one]).tokens[one.request_id] for one in work}
    preempts = "num_blocks" in how
    how = how | ({"num_blocks": FEW[variant]} if preempts else {})
    engine = make_engine(checkpoint(variant), **how)
    first = drive(engine, work)
    assert first.tokens == want
    assert drive(engine, work).tokens == want  # from the prefix cache
    assert bool(first.num_preempted) == (preempts and variant != "gemma2")


@each_variant
def test_guesses_change_nothing(
    checkpoint: Checkpoint, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = [*requests_of(KINDS), *(Request(f"long {i}", p, greedy(30)) for i, p in enumerate(LONG))]
    plain = drive(make_engine(checkpoint(variant)), work)
    found = drive(guessing_engine(checkpoint(variant), monkeypatch, plain.tokens), work)
    assert told(found) == told(plain)
    assert sum(step.accepted_tokens for step in found.steps)


@pytest.mark.usefixtures("eager")
@each_variant
def test_a_draft_model_has_all_of_a_sequence(checkpoint: Checkpoint, variant: str) -> None:
    """It is the model itself, so that it is right as long as its own keys and values are there."""
    work = [Request(f"long {i}", p, greedy(50)) for i, p in enumerate(LONG)]
    plain = drive(make_engine(checkpoint(variant)), work)
    how = {"speculation": "draft", "draft_model": str(checkpoint(variant))}
    engine = make_engine(checkpoint(variant), **how)
    for _ in range(2):
        found = drive(engine, work)
        assert found.tokens == plain.tokens
        guessed = sum(step.draft_tokens for step in found.steps)
        assert sum(step.accepted_tokens for step in found.steps) > 0.9 * guessed > 0


@pytest.mark.usefixtures("eager")
def test_beside_a_draft_model_no_request_is_taken_that_has_no_room(checkpoint: Checkpoint) -> None:
    """The first table gives nothing back there: who needs more than there is would wait for ever,
    and whoever comes behind him. Without one the windows have room for the whole context."""
    how: dict[str, Any] = {"max_batched_tokens": 16, "num_blocks": 8}
    assert make_engine(checkpoint("mistral"), **how).info.max_model_len > 8 * 16
    how |= {"speculation": "draft", "draft_model": str(checkpoint("mistral"))}
    engine = make_engine(checkpoint("mistral"), **how)
    assert engine.info.max_model_len == 8 * 16
    assert len(generate(engine, [LONG[1]], greedy(128 - len(LONG[1])))[0]) == 128 - len(LONG[1])


@each_variant
def test_of_what_failed_nothing_is_found_again(
    checkpoint: Checkpoint, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor what the windows have passed: a prompt whose numbers are bad would fail ever again."""
    engine = make_engine(checkpoint(variant), max_batched_tokens=32)
    want = generate(engine, [LONG[1]], greedy(9))
    held = [len(names) for names in engine.pool._block_of]
    with monkeypatch.context() as broken:
        fail_when(lambda plan: plan.lengths[0] == len(LONG[0]), engine, "collect", broken)
        failed = drive(engine, [Request("a", LONG[0], greedy(9))])
    assert failed.last["a"].error is not None
    assert [len(names) for names in engine.pool._block_of] == held
    usage = drive(engine, [Request("b", LONG[0], greedy(9))]).last["b"].usage
    assert usage is not None
    assert usage.cached_tokens == 0
    assert generate(engine, [LONG[1]], greedy(9)) == want  # of others all


def test_a_step_of_any_length_has_its_blocks(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind single tokens of a prompt, where neither step nor window are whole blocks."""
    model = make(tmp_path, "mistral", sliding_window=25)
    want = generate(make_engine(model), LONG[:1], greedy(9))
    counts = iter([24, 24, *[1] * 15])

    def take(room: PromptRoom, start: int, remaining: int) -> int:
        room.seconds = 0.0
        return min(next(counts, 24), remaining)

    monkeypatch.setattr(PromptRoom, "take", take)
    engine = make_engine(model, max_batched_tokens=24)
    launch = engine._runner.launch

    def watched(plan: StepPlan) -> Ticket:
        assert plan.block_tables.shape[2] * 16 >= max(plan.lengths)
        return launch(plan)

    monkeypatch.setattr(engine._runner, "launch", watched)
    assert generate(engine, LONG[:1], greedy(9)) == want


@pytest.mark.usefixtures("folder", "eager")
@pytest.mark.parametrize("drafts", [False, True], ids=["", "a draft model decodes"])
@each_variant
def test_a_split_hands_over_what_the_windows_need(
    checkpoint: Checkpoint, variant: str, drafts: bool
) -> None:
    work = [Request(f"long {i}", p, greedy(30)) for i, p in enumerate(LONG)]
    work += [Request(f"again {i}", [*p[:-5], 9, 9], greedy(30)) for i, p in enumerate(LONG)]
    want = drive(make_engine(checkpoint(variant)), work).tokens
    how = {"speculation": "draft", "draft_model": str(checkpoint(variant))} if drafts else {}
    ends = (
        make_engine(checkpoint(variant), max_batched_tokens=24),
        make_engine(checkpoint(variant), **how),
    )
    pair = Pair(*ends)
    pair.add(work[0])
    assert pair.run() == {"long 0": want["long 0"]}
    groups, size = pair.decode.info.kv_groups, pair.decode.info.kv_bytes_per_block
    blocks = -(-len(LONG[0]) // 16)
    handed = sum(blocks - group.first_seen(len(LONG[0]), 16) for group in groups)
    assert sum(len(part.data) for part in pair.exported["long 0"]) == handed * size  # type: ignore[arg-type]
    assert handed < blocks * len(groups)
    for request in work[1:]:
        pair.add(request)
    assert pair.run() == want
    # What did not come is nobody's prefix.
    middle = [*LONG[0][:90], 9, 9]
    assert generate(pair.decode, [middle], greedy(20)) == generate(ends[0], [middle], greedy(20))


@each_variant
def test_who_goes_on_elsewhere_goes_on_the_same(checkpoint: Checkpoint, variant: str) -> None:
    engine = make_engine(checkpoint(variant))
    (whole,) = generate(engine, LONG[:1], greedy(40))
    rest = Request("rest", LONG[0] + whole[:17], greedy(23), generated_prefix=17)
    assert drive(make_engine(checkpoint(variant)), [rest]).tokens["rest"] == whole[17:]


def test_kv_of_groups_is_of_another_format(checkpoint: Checkpoint) -> None:
    formats = [
        make_engine(checkpoint(name)).info.kv_format for name in ("gqa", "mistral", "gemma2")
    ]
    assert [name.endswith(" in groups") for name in formats] == [False, True, True]


def test_what_one_window_shortens_the_others_are_asked_for_again() -> None:
    """Each has its last blocks behind another end; behind 32 tokens all have."""
    groups = KvGroup((0,)), KvGroup((1,), 17), KvGroup((2,), 33)
    pool = BlockPool(40, 16, len(groups))
    tables = Tables(pool, True, groups, at_once=16)
    request = Request("it", list(range(97)), greedy(1))
    sequence = Sequence(request, 0, 16, frozenset(), 1000, 0, num_groups=len(groups))
    hashes = sequence.hash_blocks(6)
    for number, held in enumerate((range(6), (1, 5), (0, 1, 2, 3))):
        for index in held:
            (block,) = pool.allocate(1)
            pool.publish(block, hashes[index], number)
            pool.free([block])
    assert tables.to_compute(sequence) == 97 - 32


def test_room_for_guesses_goes_back_in_all_tables() -> None:
    groups = KvGroup((0,)), KvGroup((1,), 40)
    pool = BlockPool(40, 16, len(groups))
    tables = Tables(pool, True, groups, at_once=16)
    request = Request("it", [3] * 30, greedy(9))
    sequence = Sequence(request, 0, 16, frozenset(), 1000, 0, num_groups=len(groups))
    assert tables.fill(sequence, tables.find(sequence), headroom=0)
    assert tables.stretch(sequence, 30) == 30
    assert [len(table) for table in sequence.tables] == [4, 4]
    tables.trim(sequence)
    assert [len(table) for table in sequence.tables] == [2, 2]
    assert pool.num_free == 36


def test_events_are_of_the_group_that_sees_furthest(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint("gemma2"), num_blocks=40)
    known: set[bytes] = set()
    work = [Request(str(number), prompt, greedy(9)) for number, prompt in enumerate(LONG)]
    for step in drive(engine, work).steps:
        for event in step.kv_events:
            hashes = set(event.hashes)
            assert len(hashes) == len(event.hashes)
            assert hashes.isdisjoint(known) if event.stored else hashes <= known
            known = known | hashes if event.stored else known - hashes
    assert known == set(engine.snapshot())
