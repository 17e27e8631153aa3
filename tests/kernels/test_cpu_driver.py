"""Steps on their way: whose end is whose, when it was, and signals that come meanwhile."""

import gc
import itertools
import os
import re
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from kernels.cpu.driver import Driver
from kernels.cpu.library import Library, supported
from kernels.cpu.program import Geometry, Launched, Limits, Program
from kernels.cpu.recorder import Recorder
from kernels.sampling import SAMPLING
from tests.support import programs
from tests.support.programs import packed
from tests.support.waiting import until_so

WIDTH = 512
COUNT = np.arange(WIDTH, dtype=np.int32)


@pytest.fixture
def program() -> Iterator[Program]:
    """After each token it samples just that token; a step takes about a millisecond."""
    library, recorder = Library(supported()[0]), Recorder()
    one_hot = packed(library, np.eye(WIDTH, dtype=np.float32))
    logits = recorder.linear(recorder.wanted(recorder.embed(one_hot)), one_hot)
    found = Program(
        library,
        recorder,
        logits,
        Geometry(1, 1, 16, 1, 16),
        Limits(tokens=WIDTH, sampled=WIDTH, context=WIDTH),
        [],
        "float32",
        1,
        2,
    )
    yield found
    found.close()


def tokens_of(step: int) -> list[int]:
    return ((COUNT + step) % WIDTH).tolist()


def launch(program: Program, step: int) -> Launched:
    tokens, ends = np.array(tokens_of(step), np.int32), np.array([0, WIDTH], np.int32)
    blocks, samplings = np.zeros((1, 1), np.int32), np.zeros(WIDTH, SAMPLING)
    return programs.launch(program, tokens, COUNT, ends, ends[1:], blocks, COUNT, samplings)


@contextmanager
def signals(while_waiting: Callable[[], None]) -> Iterator[None]:
    """Each millisecond one; calls `while_waiting` in the handlers of those that meet a wait."""

    def handle(_: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code is Driver.wait.__code__:
            while_waiting()

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_signal_that_is_handled_ends_no_wait(program: Program) -> None:
    handled: list[None] = []
    with signals(lambda: handled.append(None)):
        for step in itertools.count():
            assert program.collect(launch(program, step)).tolist() == tokens_of(step)
            if len(handled) >= 5:
                break


def test_a_wait_that_a_handler_leaves_harms_no_step_after(program: Program) -> None:
    """And what the kernels still write to stays until they have."""

    class Interrupt(Exception):
        pass

    def interrupt() -> None:
        raise Interrupt

    def given_up(step: int) -> "weakref.ref[Launched] | None":
        launched = launch(program, step)
        try:
            with signals(interrupt):
                program.collect(launched)
        except Interrupt:
            return weakref.ref(launched)
        return None

    left = next(filter(None, map(given_up, itertools.count())))
    gc.collect()
    assert left() is not None
    for step in (3, 1, 4):
        assert program.collect(launch(program, step)).tolist() == tokens_of(step)
    assert left() is None


def test_steps_may_be_collected_in_any_order(program: Program) -> None:
    first, second = launch(program, 1), launch(program, 2)
    assert program.collect(second).tolist() == tokens_of(2)
    assert program.collect(first).tolist() == tokens_of(1)
    assert program.collect(first).tolist() == tokens_of(1)
    third = launch(program, 3)
    assert program.collect(third).tolist() == tokens_of(3)


def test_a_step_tells_when_it_ran(program: Program) -> None:
    before = time.monotonic_ns()
    first, second = launch(program, 1), launch(program, 2)
    program.collect(first)
    program.collect(second)
    assert before <= first.started_ns < first.ended_ns
    assert first.ended_ns <= second.started_ns < second.ended_ns <= time.monotonic_ns()


def blocked(thread: str) -> set[int]:
    """The signals that a thread of this process does not take."""
    status = Path(f"/proc/self/task/{thread}/status").read_text()
    found = re.search(r"^SigBlk:\s*(\w+)", status, re.MULTILINE)
    assert found
    return {one for one in signal.valid_signals() if int(found[1], 16) >> (one - 1) & 1}


def test_a_programs_threads_take_no_signals(request: pytest.FixtureRequest) -> None:
    """Their handlers would end what the threads wait for; the interpreter's take them all. What a
    thread's own fault raises would end the process without a word if it were blocked."""
    faults = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
    others, mask = set(os.listdir("/proc/self/task")), signal.pthread_sigmask(signal.SIG_BLOCK, [])
    request.getfixturevalue("program")
    threads = set(os.listdir("/proc/self/task")) - others
    assert len(threads) == 2
    until_so(lambda: not any(faults & blocked(one) for one in threads))  # not begun: it blocks all
    for thread in threads:
        assert blocked(thread) == signal.valid_signals() - faults - {signal.SIGKILL, signal.SIGSTOP}
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
