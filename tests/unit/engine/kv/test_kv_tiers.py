"""Prefixes that the cache evicts go to disk and come from there again: it changes no token, and no
disk, however slow or broken, stops anybody."""

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.common.block_hash import block_hashes
from services.common.checkpoints.checkpoint import digest
from services.worker.engine import EngineConfig, Pooling, Request, Sampling
from services.worker.engine.engine import Engine
from services.worker.engine.kv.groups import kv_groups
from services.worker.engine.kv.tiers import loader
from services.worker.engine.kv.tiers.folder import Folder, Name
from services.worker.engine.models.registry import read_config
from services.worker.engine.outputs import TierCounts
from services.worker.engine.sequence import Status
from tests.unit.engine import checkpoints
from tests.unit.engine.driving import Run, drive, greedy, make_engine, make_prompts
from tests.unit.engine.guessing import KINDS, guessing_engine, requests_of
from tests.unit.engine.speculation.test_draft_model import eager  # noqa: F401
from tests.unit.engine.test_engine_split import Pair
from tests.unit.engine.test_engine_split import folder as segments  # noqa: F401

pytestmark = pytest.mark.usefixtures("loading_pays")
Checkpoint = Callable[..., Path]
SIZE = 16
VARIANTS = ["gqa", "mistral", "gemma2", "gemma3"]
"""Without windows; with nothing else; one group without and 2 and 3 with one."""
each_variant = pytest.mark.parametrize("variant", VARIANTS)
LONG = [
    (prompt * 90)[:count]
    for prompt, count in zip(make_prompts(4, seed=8), (190, 97, 150, 120), strict=True)
]


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def tiered(path: Path, disk: Path, **settings: Any) -> Engine:
    """Of so few blocks that two prompts do not find room for what they leave."""
    groups = len(kv_groups(read_config(path)))
    how = {"num_blocks": 16 * groups, "kv_disk_dir": str(disk), "checkpoint": digest(path)}
    return make_engine(path, **(how | settings))


def counts(engine: Engine) -> TierCounts:
    assert engine.loader
    return engine.loader.tier.counts


def settle(engine: Engine) -> None:
    """What was evicted is on disk, and known to be."""
    assert engine.loader
    tier = engine.loader.tier
    while tier.num_on_way:
        tier.wait(1)
        assert not list(tier.take())


def evict(engine: Engine) -> None:
    """All that is cached on the device goes to disk."""
    pool, assert_loader = engine.pool, engine.loader
    assert assert_loader
    blocks = pool.allocate(pool.num_free)
    assert_loader.copy_out(pool.take_evicted())
    pool.free(blocks)
    settle(engine)


def ask(engine: Engine, prompt: list[int], count: int = 20, **fields: Any) -> tuple[list[int], int]:
    """Its answer, and how much of the prompt was cached."""
    run = drive(engine, [Request("it", prompt, greedy(count), **fields)])
    usage = run.last["it"].usage
    assert usage
    return run.tokens["it"], usage.cached_tokens


def full(tokens: list[int]) -> int:
    """What of them is in the cache once they are known: of the last one nothing is computed."""
    return (len(tokens) - 1) // SIZE * SIZE


@each_variant
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_an_evicted_prefix_comes_back_from_disk(
    checkpoint: Checkpoint, variant: str, kernels: str, disk: Path
) -> None:
    """Behind an answer, too."""
    alone = make_engine(checkpoint(variant), kernels=kernels)
    engine = tiered(checkpoint(variant), disk, kernels=kernels)
    answers = [ask(engine, prompt)[0] for prompt in LONG]
    assert answers == [ask(alone, prompt)[0] for prompt in LONG]
    evict(engine)
    for prompt, answer in zip(LONG, answers, strict=True):
        before = counts(engine).loaded
        turn = [*prompt, *answer, 5, 6]
        assert ask(engine, turn) == ask(alone, turn)
        assert ask(alone, turn)[1] == full(turn)
        assert counts(engine).loaded > before
        evict(engine)
    assert counts(engine).missed == counts(engine).failed == 0


def test_what_is_on_disk_is_for_all_engines_of_the_host(checkpoint: Checkpoint, disk: Path) -> None:
    """Also for those that begin when others have ended, and not for what is of another kind."""
    first = tiered(checkpoint("gqa"), disk)
    answer, _ = ask(first, LONG[0])
    evict(first)
    first.close()
    turn = [*LONG[0], *answer, 5]
    other = tiered(checkpoint("gqa"), disk)
    learn(other)
    assert ask(other, turn, salt=b"another tenant")[1] == 0
    assert ask(other, turn)[1] == full(turn)
    for how in ({"kernels": "reference"}, {"kv_format": "int8"}, {"block_size": 32}):
        unlike = tiered(checkpoint("gqa"), disk, **how)
        learn(unlike)
        assert ask(unlike, turn)[1] == 0
    path = checkpoint("gqa")
    rounded = {"quantization": "int8", "checkpoint": digest(path, "int8")}
    for unlike in (
        tiered(path, disk, **rounded),
        tiered(checkpoints.make(disk.parent / "unlike", "gqa", seed=7), disk),
    ):
        learn(unlike)
        assert ask(unlike, turn)[1] == 0


def learn(engine: Engine) -> None:
    """What is on disk when it begins."""
    assert engine.loader
    tier = engine.loader.tier
    tier._writes.put((((b"0" * 16), 9), memoryview(bytes(engine.info.kv_bytes_per_block))))
    tier._on_way.add(((b"0" * 16), 9))
    settle(engine)


def files(disk: Path) -> list[Path]:
    return sorted(path for path in disk.rglob("*-*") if path.is_file())


@each_variant
def test_a_torn_file_is_computed_anew(checkpoint: Checkpoint, variant: str, disk: Path) -> None:
    """With all that lies behind it; what lies before comes."""
    alone, engine = make_engine(checkpoint(variant)), tiered(checkpoint(variant), disk)
    answer, _ = ask(engine, LONG[0])
    evict(engine)
    turn = [*LONG[0], *answer, 5]
    for path in files(disk)[::3]:
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
    found, reused = ask(engine, turn)
    assert found == ask(alone, turn)[0]
    assert reused < full(turn)
    assert counts(engine).missed
    evict(engine)
    before = counts(engine).missed
    assert ask(engine, turn) == (found, full(turn))
    assert counts(engine).missed == before, "it was removed, and written again"


def test_what_lies_before_and_behind_a_torn_file_is_loaded_once(
    checkpoint: Checkpoint, disk: Path
) -> None:
    alone, engine = make_engine(checkpoint("gqa")), tiered(checkpoint("gqa"), disk)
    ask(engine, LONG[0])
    evict(engine)
    hashes = block_hashes(LONG[0], SIZE, b"")
    (torn,) = [path for path in files(disk) if path.name.startswith(hashes[4].hex())]
    torn.write_bytes(b"")
    assert ask(engine, LONG[0]) == (ask(alone, LONG[0])[0], 4 * SIZE)
    assert (counts(engine).loaded, counts(engine).missed) == (full(LONG[0]) // SIZE - 1, 1)


@pytest.mark.parametrize("variant", ["gqa", "gemma2", "gemma3"])
def test_who_fails_by_what_came_from_disk_fails_alone(
    checkpoint: Checkpoint, variant: str, disk: Path
) -> None:
    """A file may hold what was bad before it was written: it is not read for the next one, too. Of
    a model with nothing but a window those that were not read stay."""
    alone, engine = make_engine(checkpoint(variant)), tiered(checkpoint(variant), disk)
    answer, _ = ask(engine, LONG[0])
    evict(engine)
    assert engine.loader
    folder, size = engine.loader.tier._folder, engine.info.kv_bytes_per_block
    for path in files(disk):
        path.unlink()
        block_hash, _, group = path.name.partition("-")
        folder.write((bytes.fromhex(block_hash), int(group)), b"\xff" * size)  # NaN
    turn = [*LONG[0], *answer, 5]
    error = drive(engine, [Request("it", turn, greedy(20))]).last["it"].error
    assert error
    assert counts(engine).loaded
    settle(engine)
    assert ask(engine, turn)[0] == ask(alone, turn)[0]


@each_variant
def test_a_disk_that_fails_costs_nothing_but_its_use(
    checkpoint: Checkpoint, variant: str, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object) -> bool:
        raise OSError(errno.ENOSPC, "no space left")

    def broken(*_: object) -> bytearray:
        raise OSError(errno.EIO, "i/o error")

    alone, engine = make_engine(checkpoint(variant)), tiered(checkpoint(variant), disk)
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "write", full_disk)
        answer, _ = ask(engine, LONG[0])
        evict(engine)
    turn = [*LONG[0], *answer, 5]
    assert counts(engine).failed > 0 == counts(engine).stored
    assert ask(engine, turn) == (ask(alone, turn)[0], 0)
    evict(engine)
    assert counts(engine).stored
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "read", broken)
        assert ask(engine, turn) == (ask(alone, turn)[0], 0)
    assert counts(engine).missed


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The disk answers once it is set."""
    gate, real = threading.Event(), Folder.read

    def read(folder: Folder, name: Name) -> bytearray | None:
        gate.wait()
        return real(folder, name)

    monkeypatch.setattr(Folder, "read", read)
    yield gate
    gate.set()


def waiting(engine: Engine, prompt: list[int], name: str = "waits") -> None:
    engine.add(Request(name, prompt, greedy(20)))
    engine.step()
    assert engine.scheduler.sequences[name].status is Status.AWAITING_KV


def test_while_one_waits_for_a_slow_disk_others_go_on(
    checkpoint: Checkpoint, disk: Path, gate: threading.Event
) -> None:
    engine = tiered(checkpoint("gqa"), disk, num_blocks=40)
    answer, _ = ask(engine, LONG[0])
    evict(engine)
    waiting(engine, LONG[0])
    engine.add(Request("other", LONG[1], greedy(20)))
    run = Run()
    while "other" not in run.last:
        run.add(engine.step())
    assert "waits" not in run.tokens
    gate.set()
    while "waits" not in run.last:
        run.add(engine.step())
    assert run.tokens["waits"] == answer
    usage = run.last["waits"].usage
    assert usage
    assert usage.cached_tokens == full(LONG[0])
    engine.check()


def test_who_waits_too_long_computes_and_the_disk_is_left_alone_until_it_answers(
    checkpoint: Checkpoint, disk: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiered(checkpoint("gqa"), disk, num_blocks=40)
    answer, _ = ask(engine, LONG[0])
    ask(engine, LONG[1])
    evict(engine)
    waiting(engine, LONG[0])
    run = Run()
    with monkeypatch.context() as patch:
        patch.setattr(loader, "LATE_S", -1e6)
        while "waits" not in run.last:
            run.add(engine.step())
    assert run.tokens["waits"] == answer
    usage = run.last["waits"].usage
    assert usage
    assert usage.cached_tokens == 0
    missed = counts(engine).missed
    assert missed == full(LONG[0]) // SIZE
    assert ask(engine, LONG[1])[1] == 0, "and is not waited for"
    gate.set()
    evict(engine)
    while engine.loader and engine.loader.tier._hangs:
        engine.loader.tier.wait(1)
        engine.loader.come_back(idle=False)
    assert ask(engine, LONG[1])[1] == full(LONG[1])
    assert counts(engine).missed == missed


def test_a_cancel_while_it_waits_frees_what_it_holds(
    checkpoint: Checkpoint, disk: Path, gate: threading.Event
) -> None:
    engine = tiered(checkpoint("gqa"), disk)
    answer, _ = ask(engine, LONG[0])
    evict(engine)
    waiting(engine, LONG[0])
    engine.cancel("waits")
    assert drive(engine, []).last["waits"].finish_reason == "cancelled"
    assert engine.pool.num_free == engine.pool.num_blocks
    assert engine.load().running == 0
    gate.set()
    found, reused = ask(engine, LONG[0])
    assert (found, reused) == (answer, full(LONG[0]))


def test_two_who_want_the_same_wait_for_one_loading(
    checkpoint: Checkpoint, disk: Path, gate: threading.Event
) -> None:
    engine = tiered(checkpoint("gqa"), disk, num_blocks=40)
    answer, _ = ask(engine, LONG[0])
    evict(engine)
    waiting(engine, LONG[0])
    engine.add(Request("too", LONG[0], greedy(20)))
    for _ in range(3):
        engine.step()
    assert engine.scheduler.sequences["too"].status is Status.WAITING
    gate.set()
    run = drive(engine, [])
    assert run.tokens == {"waits": answer, "too": answer}
    assert counts(engine).loaded == full(LONG[0]) // SIZE


def test_who_waits_for_what_another_loads_holds_up_nobody_and_keeps_his_turn(
    checkpoint: Checkpoint, disk: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever becomes of the loading: it comes, or its request is cancelled."""
    monkeypatch.setattr(loader, "LATE_S", 1e6)
    engine = tiered(checkpoint("gqa"), disk, num_blocks=60, max_running=2)
    assert engine.loader
    answer, _ = ask(engine, LONG[0])
    evict(engine)
    for cancels, unknown in ((False, LONG[1]), (True, LONG[3])):
        gate.clear()
        waiting(engine, LONG[0])
        for name, prompt in {"too": LONG[0], "and": LONG[0], "other": unknown}.items():
            engine.add(Request(name, prompt, greedy(20)))
        run = Run()
        while "other" not in run.last and len(run.steps) < 500:
            run.add(engine.step())
        assert "other" in run.last
        assert not run.tokens.keys() & {"waits", "too", "and"}
        assert engine.load().waiting == 2
        engine.add(Request("last", LONG[2], greedy(1)))
        if cancels:
            engine.cancel("waits")
        gate.set()
        while engine.scheduler.places.loading:
            engine.loader.come_back(idle=True)
        while engine.has_work and len(run.steps) < 1000:
            run.add(engine.step())
        assert not engine.has_work
        assert run.tokens["too"] == run.tokens["and"] == answer
        assert run.tokens["waits"] == ([] if cancels else answer)
        told = (output for step in run.steps for output in step.outputs)
        began = {one.request_id: one.timeline.scheduled_ns for one in told if one.timeline}
        assert began["too"] <= began["and"]
        assert cancels or began["and"] <= began["last"], "else it waits for what the first loads"
        assert engine.load().queued_prefill_tokens == 0
        evict(engine)


def test_of_what_a_window_has_passed_is_stored_where_requests_go_on(
    checkpoint: Checkpoint, disk: Path
) -> None:
    """Behind the answer, behind the prompt, and behind what prompts have in common."""
    engine = tiered(checkpoint("gemma2"), disk, num_blocks=300)
    groups = engine.info.kv_groups
    answer, _ = ask(engine, LONG[0], count=90)
    end = len(LONG[0]) + len(answer) - 1
    other = [*LONG[0][:80], *LONG[1]]
    assert ask(engine, other, count=60)[1] == 80
    evict(engine)
    ends = {"first": [end, full(LONG[0])], "other": [len(other) + 59, full(other), 80]}
    wanted = {
        ("shared" if at < 80 // SIZE else name, number, at)
        for name, points in ends.items()
        for number, group in enumerate(groups)
        for point in points
        for at in range(group.first_seen(point, SIZE), point // SIZE)
    }
    assert counts(engine).stored == len(wanted) == len(files(disk))
    made = end // SIZE + (len(other) + 59) // SIZE - 80 // SIZE
    assert len(wanted) < made * len(groups)
    again = [*other[:80], 9, 9]
    assert ask(engine, again) == (ask(make_engine(checkpoint("gemma2")), again)[0], 80)
    assert ask(engine, LONG[0])[1] == full(LONG[0])


def test_what_nobody_is_likely_to_ask_for_is_not_stored(checkpoint: Checkpoint, disk: Path) -> None:
    engine = tiered(checkpoint("gqa"), disk)
    drive(engine, [Request("numbers", LONG[0], Sampling(1), pooling=Pooling("last"))])
    evict(engine)
    assert not files(disk)


def test_a_slow_disk_drops_what_is_too_much(
    checkpoint: Checkpoint, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, real = threading.Event(), Folder.write

    def write(folder: Folder, name: Name, content: memoryview) -> bool:
        gate.wait()
        return real(folder, name, content)

    monkeypatch.setattr(Folder, "write", write)
    engine = tiered(checkpoint("gqa"), disk)
    assert engine.loader
    engine.loader.tier._most = 3
    ask(engine, LONG[0])
    blocks = engine.pool.allocate(engine.pool.num_free)
    engine.loader.copy_out(engine.pool.take_evicted())
    engine.pool.free(blocks)
    gate.set()
    settle(engine)
    assert (counts(engine).stored, counts(engine).dropped) == (
        3,
        full(LONG[0] + [0] * 20) // 16 - 3,
    )


HOWS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunked": {"max_batched_tokens": 16},
    "overlapped": {"overlap": True, "max_batched_tokens": 16},
    "threads": {"threads": 3},
    "int8": {"kv_format": "int8"},
    "int4": {"kv_format": "int4"},
}


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
@each_variant
def test_ways_through_the_engine_change_nothing(
    checkpoint: Checkpoint, variant: str, how: dict[str, Any], disk: Path
) -> None:
    """Of so few blocks that some are preempted, and come back from disk."""
    work = [*requests_of(KINDS), *(Request(f"long {i}", p, greedy(30)) for i, p in enumerate(LONG))]
    of_values = {name: how[name] for name in ("kv_format",) if name in how}
    alone = make_engine(checkpoint(variant), prefix_caching=False, **of_values)
    want = {one.request_id: drive(alone, [one]).tokens[one.request_id] for one in work}
    engine = tiered(checkpoint(variant), disk, **how)
    for _ in range(3):
        assert drive(engine, work, max_steps=200_000).tokens == want
        evict(engine)
    assert counts(engine).loaded


@each_variant
def test_guesses_change_nothing(
    checkpoint: Checkpoint, variant: str, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = [*requests_of(KINDS), *(Request(f"long {i}", p, greedy(30)) for i, p in enumerate(LONG))]
    plain = drive(make_engine(checkpoint(variant)), work)
    engine = guessing_engine(
        checkpoint(variant), monkeypatch, plain.tokens, kv_disk_dir=str(disk), checkpoint="it"
    )
    for _ in range(2):
        found = drive(engine, work, max_steps=200_000)
        assert found.tokens == plain.tokens
        evict(engine)
    assert counts(engine).loaded
    assert sum(step.accepted_tokens for step in found.steps)


@pytest.mark.usefixtures("eager")
@each_variant
def test_a_draft_model_computes_what_came_from_disk(
    checkpoint: Checkpoint, variant: str, disk: Path
) -> None:
    """On disk are the served model's keys and values alone."""
    work = [Request(f"long {i}", p, greedy(50)) for i, p in enumerate(LONG)]
    plain = drive(make_engine(checkpoint(variant)), work)
    how = {"speculation": "draft", "draft_model": str(checkpoint(variant)), "num_blocks": 200}
    engine = tiered(checkpoint(variant), disk, **how)
    for _ in range(2):
        found = drive(engine, work, max_steps=200_000)
        assert found.tokens == plain.tokens
        guessed = sum(step.draft_tokens for step in found.steps)
        assert sum(step.accepted_tokens for step in found.steps) > 0.9 * guessed > 0
        evict(engine)
    assert counts(engine).loaded


@pytest.mark.usefixtures("segments")
@each_variant
def test_a_split_hands_over_what_came_from_disk(
    checkpoint: Checkpoint, variant: str, disk: Path
) -> None:
    """Who decodes takes what it has in its cache, and all else from the other side."""
    work = [Request(f"long {i}", p, greedy(30)) for i, p in enumerate(LONG)]
    want = drive(make_engine(checkpoint(variant)), work).tokens
    ends = [tiered(checkpoint(variant), disk), tiered(checkpoint(variant), disk, num_blocks=200)]
    for _ in range(2):
        pair = Pair(*ends)
        for request in work:
            pair.add(request)
        assert pair.run() == want
        for engine in ends:
            evict(engine)
    assert counts(ends[0]).loaded
    assert not counts(ends[1]).loaded


def test_what_does_not_go_together_is_refused(checkpoint: Checkpoint, disk: Path) -> None:
    path = str(checkpoint("gqa"))
    with pytest.raises(ValueError, match="prefix_caching is off"):
        EngineConfig(path, kv_disk_dir=str(disk), prefix_caching=False)
    with pytest.raises(ValueError, match="kv_disk_bytes must be at least 1"):
        EngineConfig(path, kv_disk_bytes=0)
    with pytest.raises(ValueError, match="kv_disk_bytes 9 is less than one block"):
        tiered(checkpoint("gqa"), disk, kv_disk_bytes=9)
    with pytest.raises(ValueError, match="kv_disk_dir needs checkpoint"):
        tiered(checkpoint("gqa"), disk, checkpoint="")
    disk.write_text("a file")
    with pytest.raises(ValueError, match=r"kv_disk_dir '.*kv'"):
        tiered(checkpoint("gqa"), disk)
