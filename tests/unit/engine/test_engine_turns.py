"""What the engine process does between two steps. The engine here only counts."""

import os
import select
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, cast

import pytest

from services.worker.engine import KvBlocks, Load, StepOutput
from services.worker.engine.executor import Local
from services.worker.engine.process import loop as process
from services.worker.engine.process import wire

WRITES = 40
WRITE_S = 0.002
LOAD = Load(0, 0, 0, 0, 0, 16, 0, 0.0, 0.0, 1.0)


class Engine:
    """Takes time for each write alone, and has work from an `add` to a `cancel`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.news = [os.eventfd(0, os.EFD_NONBLOCK)]
        self.executor = Local(runner=None)  # type: ignore[arg-type]
        self.has_work = False
        self.step_s = 1.0
        self.stuck = False  # each step only shows that it lives
        self.written = 0
        self.written_at: dict[str, list[int]] = {"step": [], "cancel": [], "idle": []}
        self.on_step: Callable[[], None] = lambda: None
        self.on_idle: Callable[[], None] = lambda: None

    def add(self, name: str) -> None:
        self.has_work = True

    def cancel(self, name: str) -> None:
        self.has_work = False
        self.written_at["cancel"].append(self.written)

    def write_kv(self, blocks: KvBlocks) -> None:
        self.now += WRITE_S
        self.written += 1

    def step(self) -> StepOutput:
        self.written_at["step"].append(self.written)
        self.on_step()
        return StepOutput(1, 0, round(self.step_s * 1e9), LOAD, 0)

    def hear(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self.news[0])

    def check(self) -> None:
        self.written_at["idle"].append(self.written)
        self.on_idle()

    start_decode = snapshot = drop_adapter = None


class Parent:
    """The client's end of both sockets, written before the process looks."""

    def __init__(self) -> None:
        self.commands, self._commands = socket.socketpair()
        self.transfers, self._transfers = socket.socketpair()

    def send(self, end: socket.socket, *message: object) -> None:
        for piece in wire.encode(message):
            end.sendall(piece)

    def serve(self, engine: Engine) -> None:
        with pytest.raises(process.Closed):
            process.serve(
                process.Channel(self._commands),
                process.Channel(self._transfers),
                cast(Any, engine),
            )

    def close(self) -> None:
        for end in (self.commands, self._commands, self.transfers, self._transfers):
            end.close()


@pytest.fixture
def parent() -> Iterator[Parent]:
    parent = Parent()
    yield parent
    parent.close()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    engine = Engine()
    monkeypatch.setattr(process, "monotonic", lambda: engine.now)
    yield engine
    os.close(engine.news[0])


def push(parent: Parent) -> None:
    for number in range(WRITES):
        parent.send(parent.transfers, "write_kv", KvBlocks("d", number, 1, b"kv"))


def written_between_steps(parent: Parent, engine: Engine) -> list[int]:
    """Of a burst that comes while there is work."""

    def end_after_all() -> None:
        if engine.written == WRITES:
            parent.send(parent.commands, "shutdown")

    engine.on_step = end_after_all
    parent.send(parent.commands, "add", "a")
    push(parent)
    parent.serve(engine)
    assert engine.written_at["step"][-1] == WRITES
    return [after - before for before, after in pairwise([0, *engine.written_at["step"]])]


def test_steps_go_on_during_a_burst_of_kv_blocks(parent: Parent, engine: Engine) -> None:
    between = written_between_steps(parent, engine)
    assert max(between) * WRITE_S < process.TRANSFER_S + WRITE_S
    assert max(between) > 1, "and the burst goes on as well"


def test_a_burst_takes_no_longer_between_steps_than_a_short_step(
    parent: Parent, engine: Engine
) -> None:
    engine.step_s = WRITE_S
    first, *then = written_between_steps(parent, engine)
    assert first * WRITE_S < process.TRANSFER_S + WRITE_S, "before a step was measured"
    assert set(then) == {1}


def test_steps_that_move_nobody_do_not_hold_up_a_burst(parent: Parent, engine: Engine) -> None:
    engine.step_s, engine.stuck = 0.0, True
    first, *then = written_between_steps(parent, engine)
    assert set(then[:-1]) <= {first}
    assert first > 1


def test_a_grammar_that_nobody_waits_for_lets_the_engine_rest(
    parent: Parent, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was made beside requests that ran, or its request was cancelled."""
    waits: list[float | None] = []
    real = select.poll

    class Poll:
        def __init__(self) -> None:
            self._real = real()
            self.register = self._real.register

        def poll(self, timeout_ms: float | None) -> list[tuple[int, int]]:
            waits.append(timeout_ms)
            if len(waits) == 5:
                parent.send(parent.commands, "shutdown")
            return self._real.poll(0)

    monkeypatch.setattr(process.select, "poll", Poll)
    os.eventfd_write(engine.news[0], 1)
    parent.serve(engine)
    assert waits[:4] == [None, process.IDLE_S * 1000, None, None]
    assert engine.written_at["idle"] == [0]


def test_a_cancel_overtakes_a_burst_of_kv_blocks(parent: Parent, engine: Engine) -> None:
    engine.on_step = lambda: parent.send(parent.commands, "cancel", "a")
    engine.on_idle = lambda: parent.send(parent.commands, "shutdown")
    parent.send(parent.commands, "add", "a")
    push(parent)
    parent.serve(engine)
    assert len(engine.written_at["step"]) == 1
    assert engine.written_at["cancel"] == engine.written_at["step"]


def test_an_engine_without_work_takes_all_at_once(parent: Parent, engine: Engine) -> None:
    engine.on_idle = lambda: parent.send(parent.commands, "shutdown")
    push(parent)
    parent.serve(engine)
    assert engine.written_at == {"step": [], "cancel": [], "idle": [WRITES]}


def test_steps_go_on_while_a_frame_has_come_in_part(parent: Parent, engine: Engine) -> None:
    """Of KV blocks or of a command: the rest may be long on its way."""
    halves = {
        end: split_in_two(wire.encode(message))
        for end, message in [
            (parent.transfers, ("write_kv", KvBlocks("d", 0, 1, bytes(100_000)))),
            (parent.commands, ("shutdown",)),
        ]
    }

    def rest_after_some_steps() -> None:
        steps = len(engine.written_at["step"])
        if steps == 5:
            parent.transfers.sendall(halves[parent.transfers][1])
        elif steps == 10:
            parent.commands.sendall(halves[parent.commands][1])

    engine.on_step = rest_after_some_steps
    parent.send(parent.commands, "add", "a")
    for end, (first, _) in halves.items():
        end.sendall(first)
    parent.serve(engine)
    assert engine.written_at["step"] == [0] * 5 + [1] * 5


def split_in_two(pieces: Sequence[bytes | memoryview]) -> tuple[bytes, bytes]:
    whole = b"".join(pieces)
    return whole[: len(whole) // 2], whole[len(whole) // 2 :]


def test_who_is_stuck_steps_only_to_show_that_he_lives(
    parent: Parent, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_step_moves() -> None:
        engine.stuck = len(engine.written_at["step"]) > 1

    engine.on_step = first_step_moves
    waits: list[float | None] = []

    class Poll:
        def register(self, *_: object) -> None: ...

        def poll(self, milliseconds: float | None) -> bool:
            waits.append(milliseconds)
            if len(waits) == 4:
                parent.send(parent.commands, "shutdown")
            return len(waits) == 1

    monkeypatch.setattr(process.select, "poll", Poll)
    parent.send(parent.commands, "add", "a")
    parent.serve(engine)
    beat = process.HEARTBEAT_S * 1000
    assert waits == [None, 0, beat, beat]


def test_an_engine_with_nothing_to_do_checks_itself_once_and_sleeps(
    parent: Parent, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float | None] = []

    class Poll:
        def register(self, *_: object) -> None: ...

        def poll(self, milliseconds: float | None) -> bool:
            waits.append(milliseconds)
            if len(waits) == 3:
                parent.send(parent.commands, "shutdown")
            return len(waits) in (1, 3)

    monkeypatch.setattr(process.select, "poll", Poll)
    parent.send(parent.commands, "cancel", "a")
    parent.serve(engine)
    assert waits == [None, process.IDLE_S * 1000, None]
    assert engine.written_at["idle"] == [0]


def test_it_says_that_a_step_is_long_before_it_makes_it(parent: Parent, engine: Engine) -> None:
    def long_step() -> None:
        engine.on_long_step(2.5)  # type: ignore[attr-defined]
        parent.send(parent.commands, "shutdown")

    engine.on_step = long_step
    parent.send(parent.commands, "add", "a")
    parent.serve(engine)
    heard = process.Channel(parent.commands)
    assert heard.take() == wire.LongStep(2.5)
    assert isinstance(heard.take(), StepOutput)
    assert heard.take() is None


def test_a_snapshot_is_answered_between_the_steps_around_it(parent: Parent, engine: Engine) -> None:
    engine.snapshot = lambda: [b"%d" % len(engine.written_at["step"])]  # type: ignore[assignment]

    def ask() -> None:
        if len(engine.written_at["step"]) == 2:
            parent.send(parent.commands, "snapshot", 17)
        elif len(engine.written_at["step"]) == 3:
            parent.send(parent.commands, "shutdown")

    engine.on_step = ask
    parent.send(parent.commands, "add", "a")
    parent.serve(engine)
    heard = process.Channel(parent.commands)
    told = [heard.take() for _ in range(4)]
    assert [type(one) for one in told] == [StepOutput, StepOutput, wire.Snapshot, StepOutput]
    assert told[2] == wire.Snapshot(17, [b"2"])


@pytest.mark.parametrize("end", ["commands", "transfers"])
def test_it_ends_when_either_socket_does(parent: Parent, engine: Engine, end: str) -> None:
    engine.on_step = lambda: getattr(parent, end).close()
    parent.send(parent.commands, "add", "a")
    parent.serve(engine)
    assert len(engine.written_at["step"]) == 1


def test_it_ends_when_nobody_hears_it(parent: Parent, engine: Engine) -> None:
    parent.send(parent.commands, "add", "a")
    engine.on_step = lambda: parent.commands.shutdown(socket.SHUT_RD)
    parent.serve(engine)
    assert len(engine.written_at["step"]) == 1


def test_only_the_rest_of_a_frame_is_waited_for(
    parent: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every step would be late by that wait."""
    waits: list[float | None] = []

    class Poll:
        def register(self, *_: object) -> None: ...

        def poll(self, milliseconds: float | None) -> list[tuple[int, int]]:
            waits.append(milliseconds)
            return []

    monkeypatch.setattr(process.select, "poll", Poll)
    channel = process.Channel(parent._transfers)
    assert not channel.more(1.0)
    parent.send(parent.transfers, "cancel", "a")
    assert channel.take() == ("cancel", "a")
    assert channel.take() is None
    assert not channel.more(1.0)
    assert waits == []
    first, _ = split_in_two(wire.encode(("cancel", "b")))
    parent.transfers.sendall(first)
    assert channel.take() is None
    assert not channel.more(1.0)
    assert waits == [1000.0]
