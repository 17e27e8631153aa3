"""A prefix is loaded from below the device only where that is expected to be sooner than computing
it; a disk that was slow is tried again."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from services.worker.engine.engine import Engine
from services.worker.engine.kv.tiers import loader
from services.worker.engine.kv.tiers.disk import DiskTier
from services.worker.engine.kv.tiers.pace import Pace
from tests.unit.engine.driving import make_engine
from tests.unit.engine.kv.test_kv_tiers import (
    LONG,
    SIZE,
    ask,
    counts,
    disk,
    evict,
    full,
    gate,
    tiered,
)

__all__ = ["disk", "gate"]
Checkpoint = Callable[..., Path]
TOKEN_S = 0.001


def learned(*loadings: tuple[int, float, float]) -> Pace:
    pace = Pace()
    for blocks, read_s, waited_s in loadings:
        pace.learn(blocks, read_s, waited_s)
    return pace


def test_what_was_never_tried_is_expected_to_take_nothing() -> None:
    assert Pace().expected_s(1000) == 0


def test_a_loading_is_expected_to_take_its_delay_and_its_reading() -> None:
    pace = learned((10, 0.05, 0.08))
    assert pace.expected_s(10) == pytest.approx(0.08)
    assert pace.expected_s(100) == pytest.approx(0.53)
    for _ in range(60):
        pace.learn(4, 0.04, 0.05)
    assert pace.expected_s(100) == pytest.approx(1.01, rel=1e-3)


def test_one_that_was_held_up_says_little() -> None:
    """A second for what takes 10 ms is as much as 40."""
    pace = learned((10, 0.01, 0.01), (10, 1.0, 1.0), (10, 0.01, 3.0))
    assert pace.expected_s(10) < 0.035


def test_a_disk_that_was_slow_is_believed_to_be_faster_with_each_that_passes_it_by() -> None:
    pace = learned((1, 1.0, 2.0))
    tries = 0
    while pace.expected_s(1) > 0.2:
        pace.decline()
        tries += 1
    assert 50 < tries < 200


@pytest.fixture
def engine(checkpoint: Checkpoint, disk: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """That believes each token of a prompt to take it as long."""
    engine = tiered(checkpoint("gqa"), disk)
    monkeypatch.setattr(engine._cost, "chunk_s", lambda start, count: count * TOKEN_S)
    ask(engine, LONG[0])
    evict(engine)
    return engine


def pace(engine: Engine) -> Pace:
    assert engine.loader
    return engine.loader.tier.pace


@pytest.mark.parametrize(("slower", "reused"), [(1.01, 0), (0.99, full(LONG[0]))])
def test_the_sooner_of_the_two_is_chosen(
    engine: Engine, checkpoint: Checkpoint, slower: float, reused: int
) -> None:
    pace(engine).block_s = slower * SIZE * TOKEN_S
    plain = ask(make_engine(checkpoint("gqa")), LONG[0])[0]
    assert ask(engine, LONG[0]) == (plain, reused)
    blocks = full(LONG[0]) // SIZE
    told = counts(engine)
    assert (told.loaded, told.passed) == ((blocks, 0) if reused else (0, blocks))
    assert told.missed == 0


def test_the_delay_counts_as_the_reading_does(engine: Engine) -> None:
    pace(engine).block_s, pace(engine).delay_s = 1e-9, full(LONG[0]) * TOKEN_S * 1.01
    assert ask(engine, LONG[0])[1] == 0


def test_what_is_on_the_device_is_weighed_against_nothing(engine: Engine) -> None:
    """Of a prompt whose beginning is there only the rest is to be computed, or loaded: six blocks,
    which take longer than to compute six, and less long than to compute all eleven."""
    pace(engine).block_s = 1.5 * SIZE * TOKEN_S
    ask(engine, LONG[0][: 5 * SIZE + 1], count=1)
    assert ask(engine, LONG[0])[1] == 5 * SIZE


def test_who_was_passed_by_is_tried_again(engine: Engine) -> None:
    pace(engine).block_s = 1.1 * SIZE * TOKEN_S
    for _ in range(5):
        assert ask(engine, LONG[0])[1] == 0
        evict(engine)
    assert ask(engine, LONG[0])[1] == full(LONG[0])
    assert counts(engine).loaded == full(LONG[0]) // SIZE


def test_what_loading_took_is_learned_and_told(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a disk that says of each block that it took half a second."""
    real = DiskTier._arrive
    monkeypatch.setattr(DiskTier, "_arrive", lambda *arrived: real(*arrived[:-1], 0.5))
    assert engine.load().load_tokens_per_s == 0
    ask(engine, LONG[0])
    assert pace(engine).block_s == pytest.approx(0.5)
    assert pace(engine).delay_s >= 0
    assert engine.load().load_tokens_per_s == pytest.approx(SIZE / 0.5)
    pace(engine).delay_s = 0.25
    assert engine.load().load_delay_s == 0.25


def test_where_one_waited_in_vain_the_next_does_not(
    engine: Engine, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk answers, only later than computing takes: to be tried is not to be tried by all."""
    monkeypatch.setattr(engine._cost, "chunk_s", lambda start, count: count * 1e-12)
    with monkeypatch.context() as patch:
        patch.setattr(loader, "LATE_S", 0)
        assert ask(engine, LONG[0])[1] == 0
    gate.set()
    assert engine.loader
    while engine.loader.tier._hangs:
        engine.loader.tier.wait(1)
        engine.loader.come_back(idle=False)
    evict(engine)
    assert ask(engine, LONG[0])[1] == 0
    told = counts(engine)
    assert (told.loaded, told.passed) == (0, full(LONG[0]) // SIZE)
