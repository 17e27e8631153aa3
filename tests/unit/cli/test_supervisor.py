"""Whatever dies of a small stack of processes: nothing stays, and what was up comes back."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from services.cli.stack import supervisor
from services.common.children import dying_with_parent
from tests.support.waiting import until

# A main process with a child, a grandchild in a session of its own, and one whose parent has ended.
# Each writes its pid into the folder; `up` and what SIGTERM does are told by the arguments.
STACK = """
import os, signal, subprocess, sys, time
from pathlib import Path
from services.cli.stack import supervisor
from services.cli.stack.supervisor import LOST, supervise

supervisor._PAUSES_S = (0.0, 0.1, 600.0 if "pauses" in sys.argv[2] else 0.2)
folder, mode = Path(sys.argv[1]), sys.argv[2]
if "no margin" in mode:
    supervisor._END_MARGIN_S = 0.0
above = os.getpid()
leash = supervise(lambda line: print(line, flush=True))
starts = len(list(folder.glob("start-*")))
(folder / f"start-{starts}").write_text(str(above))
sleeper = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", sleeper])
orphans = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleeper!r}])"
if "killed from above" not in mode:  # orphans before that are out of its reach
    subprocess.run([sys.executable, "-c", orphans], start_new_session=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as if deep in somebody's C code
if "never up" not in mode:
    def end(*_):
        if "deaf" in mode:
            return
        (folder / "asked").touch()
        while "patient" in mode and not (folder / "go").exists():
            time.sleep(0.01)
        (folder / "drained").touch()
        sys.exit(0)
    signal.signal(signal.SIGTERM, end)
    if "not again" in mode and starts:
        sys.exit(1)
    leash.up(600.0 if "patient" in mode else 0.5, folder / "the logs")
(folder / f"up-{starts}").write_text(str(os.getpid()))
if "loses" in mode:
    time.sleep(0.5)
    os._exit(LOST)
if mode == "ends":
    sys.exit(3)
while True:
    time.sleep(600)
"""


class Stack:
    def __init__(self, folder: Path, mode: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [*dying_with_parent("KILL"), sys.executable, "-c", STACK, str(folder), mode],
            stdout=(folder / "said").open("w"),
            start_new_session=True,
        )
        self._seen: set[psutil.Process] = set()

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()

    async def up(self, start: int = 0) -> psutil.Process:
        """The process below at its n-th start, once it and all its children run."""
        path = self.folder / f"up-{start}"
        await until(lambda: path.exists() and bool(path.read_text()), 20, f"start {start}")
        below = psutil.Process(int(path.read_text()))
        self._seen |= {below, *psutil.Process(self.process.pid).children(recursive=True)}
        return below

    async def ended(self, timeout_s: float = 12) -> int:
        """The exit code; fails if anything that was seen outlives it. Not in time is what is killed
        only 15 s after its grace."""
        await until(lambda: self.process.poll() is not None, timeout_s, "the end")
        assert len(self._seen) >= 2
        await until(lambda: not any(map(alive, self._seen)), timeout_s, "nothing is left")
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for process in filter(alive, self._seen):
            process.kill()


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    stacks: list[Stack] = []

    def one(mode: str) -> Stack:
        stacks.append(Stack(tmp_path, mode))
        return stacks[-1]

    yield one
    for stack in stacks:
        stack.close()


async def test_its_end_is_the_end_of_all_and_its_exit_code_is_told(start) -> None:
    stack = start("ends")
    await until(lambda: stack.process.poll() is not None, 20)
    assert stack.process.returncode == 3
    assert len(list(stack.folder.glob("start-*"))) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_asked_to_stop_it_drains_and_leaves_nothing(start, number) -> None:
    stack = start("stays")
    await stack.up()
    stack.process.send_signal(number)
    assert await stack.ended() == 0
    assert (stack.folder / "drained").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_before_it_is_up_it_is_ended_at_once(start, number) -> None:
    stack = start("never up")
    await stack.up()
    stack.process.send_signal(number)
    assert await stack.ended() == 128 + number
    assert "stopped" in stack.said


def test_one_that_comes_up_in_the_moment_it_is_asked_to_stop_drains(monkeypatch) -> None:
    asked: list[int] = []
    kills: list[int] = []
    looks = 0

    def recv(size: int) -> bytes:
        nonlocal looks
        looks += 1
        if looks == 2:
            return b"0.5 the logs"
        if looks == 1:  # behind this look it comes up, and somebody who sees that asks
            asked.append(signal.SIGTERM)
        raise BlockingIOError

    leash = cast(Any, SimpleNamespace(setblocking=lambda blocking: None, recv=recv))
    monkeypatch.setattr(supervisor, "_reaped", lambda pid: 0 if kills else None)
    monkeypatch.setattr(supervisor.os, "kill", lambda pid, number: kills.append(number))
    code, up = supervisor._watch(1, leash, asked, print)
    assert (code, kills) == (0, [signal.SIGTERM])
    assert up is not None
    assert up.logs == "the logs"


async def test_what_does_not_end_is_killed(start) -> None:
    stack = start("deaf")
    below = await stack.up()
    stack.process.send_signal(signal.SIGINT)
    stack.process.send_signal(signal.SIGTERM)  # the second time is in earnest
    assert await stack.ended() == 128 + signal.SIGTERM
    assert not alive(below)


async def test_what_does_not_end_in_its_time_is_killed_and_that_is_told(start) -> None:
    stack = start("deaf, no margin")
    below = await stack.up()
    stack.process.send_signal(signal.SIGINT)
    assert await stack.ended() == 130
    assert not alive(below)
    assert "not ended 0 s after it was asked to: killed" in stack.said


async def test_what_drains_has_all_the_time_that_it_said(start) -> None:
    stack = start("patient, no margin")
    await stack.up()
    stack.process.send_signal(signal.SIGTERM)
    await until((stack.folder / "asked").exists, 20)
    (stack.folder / "go").touch()
    assert await stack.ended() == 0
    assert (stack.folder / "drained").exists()
    assert "killed" not in stack.said


async def test_killed_from_above_it_drains_and_leaves_nothing(start) -> None:
    stack = start("killed from above")
    await stack.up()
    stack.process.kill()
    await stack.ended()
    assert (stack.folder / "drained").exists()


async def test_killed_from_above_before_it_is_up_nothing_is_left(start) -> None:
    stack = start("killed from above, never up")
    await stack.up()
    stack.process.kill()
    await stack.ended()


async def test_a_killed_stack_comes_back(start) -> None:
    stack = start("stays")
    first = await stack.up()
    children = first.children(recursive=True)
    first.kill()
    second = await stack.up(1)
    assert second.pid != first.pid
    assert not any(map(alive, children)), "of the first nothing is left"
    stack.process.send_signal(signal.SIGINT)
    assert await stack.ended() == 0


async def test_a_stack_killed_before_it_was_up_is_not_started_again(start) -> None:
    stack = start("never up")
    (await stack.up()).kill()
    assert await stack.ended() == 128 + signal.SIGKILL


async def test_a_stack_that_is_lost_again_and_again_is_given_up_and_says_so(start) -> None:
    stack = start("loses")
    await stack.up()
    assert await stack.ended(20) == 75
    assert len(list(stack.folder.glob("start-*"))) == 4
    *news, last = stack.said.splitlines()
    assert [line.partition(": ")[2] for line in news] == [
        "starting anew",
        "starting anew in 0.1 s",
        "starting anew in 0.2 s",
    ]
    assert "have not held for 30 s: not started anew" in last
    assert last.endswith(f"logs: {stack.folder / 'the logs'}")


async def test_a_new_start_that_fails_is_tried_again_and_given_up_with_words(start) -> None:
    stack = start("loses, not again")
    await stack.up()
    assert await stack.ended(20) == 1
    assert len(list(stack.folder.glob("start-*"))) == 4
    assert "did not start again (exit code 1): starting anew in 0.1 s" in stack.said
    assert "not started anew; logs: " in stack.said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_asked_to_stop_in_a_pause_it_stops_at_once(start, number) -> None:
    stack = start("loses and pauses")
    await stack.up()
    await until(lambda: "in 600 s" in stack.said, 20)
    stack.process.send_signal(number)
    assert await stack.ended() == 128 + number
