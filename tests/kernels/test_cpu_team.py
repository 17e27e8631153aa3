"""How a team's threads divide work (native/board.h), by a job whose pieces are the test's."""

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.cpu import build

NATIVE = Path(build.__file__).parent / "native"
ANSWER_S = 30.0

Computed = Callable[[int, int, int, int], None]
"""thread, phase, task, piece."""
_Computed = ctypes.CFUNCTYPE(None, *[ctypes.c_int] * 4)
_Called = ctypes.CFUNCTYPE(None)


class Team:
    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._library = library
        self._team = library.start(threads)
        assert self._team

    def run(
        self, shape: tuple[int, int, int], computed: Computed, *, apart: bool = True
    ) -> NDArray[np.int32]:
        """`shape`: phases, tasks of each, pieces of each. How often each piece was written."""
        written, called = np.zeros(shape, np.int32), _Computed(computed)
        arguments = (self._team, apart, *shape, called, written.ctypes.data)
        self.job = threading.Thread(target=self._library.run, args=arguments, daemon=True)
        self.job.start()
        self.job.join(2 * ANSWER_S)
        assert not self.job.is_alive(), "the job does not end"
        return written

    def end(self) -> None:
        self._library.end(self._team)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return built(tmp_path_factory)


def built(tmp_path_factory: pytest.TempPathFactory, *more: str) -> ctypes.CDLL:
    command = build.compiler()
    if sys.platform != "linux" or command is None:
        pytest.skip("no C++ compiler")
    path = tmp_path_factory.mktemp("phases") / "phases.so"
    sources = [Path(__file__).parent / "native" / "phases.cc", NATIVE / "team.cc"]
    options = ["-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", f"-I{NATIVE}", *more]
    subprocess.run([*command, *options, *map(str, sources), "-o", str(path)], check=True)
    found = ctypes.CDLL(str(path))
    integer, pointer = ctypes.c_int, ctypes.c_void_p
    found.start.restype, found.start.argtypes = pointer, [integer]
    found.end.argtypes = [pointer]
    found.run.argtypes = [pointer, *[integer] * 4, _Computed, pointer]
    found.call_between.argtypes = [_Called]
    return found


@contextmanager
def team(library: ctypes.CDLL, threads: int) -> Iterator[Team]:
    found = Team(library, threads)
    yield found  # one whose job does not end is left alone
    found.end()


@pytest.mark.parametrize("pieces", [1, 3])
def test_what_a_thread_is_at_that_has_lost_its_core_is_done_for_it(
    library: ctypes.CDLL, pieces: int
) -> None:
    """The other one goes through all phases meanwhile. What the first one computed is written by
    nobody else later, though it ends only then."""
    last = 5
    stuck, over = threading.Event(), threading.Event()
    late: list[bool] = []

    def computed(thread: int, phase: int, task: int, piece: int) -> None:
        if thread == 1 and not stuck.is_set():
            stuck.set()
            late.append(over.wait(ANSWER_S))
        elif not stuck.is_set():
            assert stuck.wait(ANSWER_S)
        elif phase == last and thread == 0:
            over.set()

    with team(library, 2) as both:
        written = both.run((last + 1, 6, pieces), computed)
    assert late == [True]
    assert (written == 1).all()


def test_what_may_be_done_once_is_waited_for(library: ctypes.CDLL) -> None:
    stuck, others = threading.Event(), threading.Event()
    began: list[int] = []

    def computed(thread: int, phase: int, task: int, piece: int) -> None:
        began.append(phase)
        if thread == 1 and not stuck.is_set():
            stuck.set()
            while began.count(0) < 6:  # all the others of the phase
                assert not others.wait(0.001)
            others.wait(0.05)
            assert 1 not in began
        elif not stuck.is_set():
            assert stuck.wait(ANSWER_S)

    with team(library, 2) as both:
        written = both.run((2, 6, 1), computed, apart=False)
    assert sorted(began) == [0] * 6 + [1] * 6
    assert (written == 1).all()


@pytest.mark.parametrize("shape", [(40, 5, 1), (7, 40, 4), (3, 1, 2), (5, 0, 1)])
@pytest.mark.parametrize("apart", [True, False])
def test_every_piece_is_written_once_and_in_order(
    library: ctypes.CDLL, shape: tuple[int, int, int], apart: bool
) -> None:
    """By more threads than processors: some come late, or when all is over."""
    phases: list[int] = []

    def computed(thread: int, phase: int, task: int, piece: int) -> None:
        phases.append(phase)

    with team(library, 9) as nine:
        for _ in range(10):
            phases.clear()
            assert (nine.run(shape, computed, apart=apart) == 1).all()
            if not apart:
                assert phases == sorted(phases)


@pytest.mark.parametrize("threads", [1, 2])
def test_who_looks_too_late_does_not_sleep_for_ever(
    tmp_path_factory: pytest.TempPathFactory, threads: int
) -> None:
    """As if each lost its core before it looked whether the phase is over."""
    team = Team(built(tmp_path_factory, "-DSPIN_CYCLES=0"), threads)
    for _ in range(20):
        written = team.run((20, 4, 2), lambda *_: None)
        assert (written == 1).all()
    team.end()


def test_who_sleeps_while_tasks_change_hands_is_woken_for_them(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Thread 0 takes over the last task, which nobody has in between; it then loses its core. The
    other one slept, as there was nothing to see."""
    library = built(tmp_path_factory, "-DSPIN_CYCLES=0")
    both, late = Team(library, 2), list[bool]()
    begun, taken, over = threading.Event(), threading.Event(), threading.Event()

    def computed(thread: int, phase: int, task: int, piece: int) -> None:
        if phase == 1:
            over.set()
        elif task == 0:  # thread 0's own
            assert begun.wait(ANSWER_S)
        elif task == 2:  # of thread 1, which begins with it
            begun.set()
            assert taken.wait(ANSWER_S)
        elif task == 3 and thread == 0:
            late.append(over.wait(ANSWER_S))

    @_Called
    def between() -> None:
        if not taken.is_set():
            taken.set()
            over.wait(0.05)  # for the other one to find nothing

    library.call_between(between)
    written = both.run((2, 4, 1), computed)
    both.end()
    assert False not in late  # nothing, if the other one was through before it began
    assert (written == 1).all()


def test_what_is_alone_is_the_callers(library: ctypes.CDLL) -> None:
    def begin(tasks: int) -> list[int]:
        return [library.begin(tasks, thread, 4) for thread in range(5)]

    assert begin(1) == [0, 1, 1, 1, 1]
    assert begin(6) == [0, 2, 3, 5, 6]
    assert begin(0) == [0] * 5
