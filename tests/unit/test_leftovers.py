"""The guard of the tests themselves: what a test file may leave in its process."""

import gc
import os
import subprocess
import threading
from contextlib import ExitStack

import pytest

from tests.support import leftovers
from tests.support.leftovers import AT_MOST, Held, left


@pytest.fixture(autouse=True)
def nothing_of_others_goes_meanwhile() -> None:
    """What earlier tests let go in a circle would be closed amid a test, and counted against it."""
    gc.collect()


class Pair:
    """Two that hold each other, and a file."""

    def __init__(self) -> None:
        self.itself = self
        self.file = open(os.devnull)  # noqa: SIM115


def test_a_few_may_stay_and_more_are_told_by_what_they_are() -> None:
    before = Held.now()
    with ExitStack() as stack:
        for _ in range(AT_MOST):
            stack.callback(os.close, os.eventfd(0))
        assert left(before) == []
        stack.callback(os.close, os.eventfd(0))
        (told,) = left(before)
        assert told.startswith(f"{AT_MOST + 1} files of ")
        assert "'anon_inode'" in told
    assert left(before) == []


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_nobody_holds_any_more_does_not_count() -> None:
    before = Held.now()
    pairs = [Pair() for _ in range(AT_MOST + 1)]
    assert left(before)
    del pairs
    assert left(before) == []


def test_threads_and_children_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "AT_MOST", 0)
    before, end = Held.now(), threading.Event()
    thread = threading.Thread(target=end.wait, name="waits")
    thread.start()
    with subprocess.Popen(["sleep", "600"]) as child:
        found = left(before)
        child.kill()
        end.set()
        thread.join()
    assert [one.partition(" of ")[0] for one in found] == ["1 threads", "1 children"]
    assert "waits" in found[0]
    assert "sleep 600" in found[1]


def test_many_in_all_may_not_become_more(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Held.now()
    monkeypatch.setattr(leftovers, "IN_ALL_AT_MOST", before.files.total())
    assert left(before) == []
    one = os.eventfd(0)
    assert left(before)
    os.close(one)
