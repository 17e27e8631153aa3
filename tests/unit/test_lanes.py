"""Who gets which tests, and that none is left over."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.lanes import Lanes

STACKS = ["tests/e2e/test_a.py::test", "tests/chaos/test_b.py::test"]
SHORT = ["tests/unit/cli/test_c.py::test", "tests/unit/cli/test_d.py::test"]
COMPUTES = ["tests/models/test_e.py::test", "tests/kernels/test_f.py::test"]


class Process:
    """A worker of xdist's, that does what it is sent at once or never."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.shutting_down = False
        self.sent: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        assert not self.shutting_down
        self.sent += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def lanes(count: int, tests: list[str]) -> tuple[Lanes, list[Process]]:
    options = SimpleNamespace(numprocesses=count, loadscopereorder=False, maxworkerrestart=None)
    config: Any = SimpleNamespace(option=options, getvalue=lambda name: ["popen"] * count)
    made = Lanes(config, cast(Any, SimpleNamespace(loadscopesched=lambda *_: None)))
    made.numnodes = count
    processes = [Process(f"gw{n}") for n in range(count)]
    for process in processes:
        made.add_node(process)  # type: ignore[arg-type]
    for process in processes:
        made.add_node_collection(process, tests)  # type: ignore[arg-type]
    made.schedule()
    return made, processes


def rest(made: Lanes, processes: list[Process]) -> None:
    """All do what they have until nothing is left."""
    done = set[tuple[int, int]]()
    while todo := [
        (process, index)
        for process in processes
        for index in process.sent
        if (id(process), index) not in done
    ]:
        process, index = todo[0]
        done.add((id(process), index))
        made.mark_test_complete(process, index)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_test_is_run_once(count: int) -> None:
    tests = [*SHORT, *STACKS, *COMPUTES]
    made, processes = lanes(count, tests)
    rest(made, processes)
    assert sorted(index for one in processes for index in one.sent) == list(range(len(tests)))


def test_the_last_of_three_begins_no_stack() -> None:
    stacks = [f"tests/e2e/test_{n}.py::test" for n in range(6)]
    for others in ([], [*SHORT, *COMPUTES]):
        tests = [*stacks, *others]
        made, processes = lanes(3, tests)
        rest(made, processes)
        assert not {*stacks} & {tests[index] for index in processes[2].sent}
        assert sorted(index for one in processes for index in one.sent) == list(range(len(tests)))


def test_what_comes_in_place_of_one_that_crashed_takes_what_is_left() -> None:
    """The others are through by then, or nearly: they take nothing more."""
    stack = [f"{STACKS[0]}{n}" for n in range(4)]
    made, (computes, stacks, short) = lanes(3, [*stack, *SHORT, *COMPUTES])
    rest(made, [computes, short])
    assert computes.shutting_down
    assert short.shutting_down
    made.mark_test_complete(stacks, stacks.sent[0])  # type: ignore[arg-type]
    assert made.remove_node(stacks) == stack[1]  # type: ignore[arg-type]
    new = Process("gw3")
    made.add_node(new)  # type: ignore[arg-type]
    made.add_node_collection(new, made.collection or [])  # type: ignore[arg-type]
    made.schedule()
    assert new.sent == stacks.sent[1:]
