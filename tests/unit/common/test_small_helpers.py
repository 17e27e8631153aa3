"""Children that end with their parent, and waiting for the first of several things."""

import asyncio
import os
import select
import shutil
import signal
import subprocess
import sys

import pytest

from services.common import children
from services.common.children import dying_with_parent
from services.common.waiting import first_done

# Says who it is and waits for ever; TERM it outlives.
CHILD = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: print("told", flush=True))
print(os.getpid(), flush=True)
while True:
    time.sleep(3600)
"""
PARENT = """
import subprocess, sys
from services.common.children import dying_with_parent
child, *asked = sys.argv[1:]
subprocess.Popen([*dying_with_parent(*asked), sys.executable, "-c", child]).wait()
"""


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs util-linux")
@pytest.mark.parametrize(("asked", "told"), [([], True), (["KILL"], False)])
def test_a_killed_parents_child_is_sent_the_signal(asked: list[str], told: bool) -> None:
    command = [sys.executable, "-c", PARENT, CHILD, *asked]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE)
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        watched = os.pidfd_open(child)
        try:
            parent.kill()
            if told:
                assert parent.stdout.readline() == b"told\n"
                os.kill(child, signal.SIGKILL)
            ended = select.poll()
            ended.register(watched, select.POLLIN)
            assert ended.poll(60_000), "it ends"
            assert parent.stdout.read() == b""
        finally:
            os.close(watched)


def test_where_it_cannot_be_asked_for_the_command_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(children.shutil, "which", lambda _: None)
    assert dying_with_parent() == []


@pytest.mark.parametrize("how", ["result", "error", "cancelled"])
async def test_the_first_that_is_done_ends_the_waiting_and_nothing_else(how: str) -> None:
    first, other = (asyncio.get_running_loop().create_future() for _ in range(2))
    waiting = asyncio.create_task(first_done(first, other))
    await asyncio.sleep(0)
    assert not waiting.done()
    if how == "result":
        first.set_result(1)
    elif how == "error":
        first.set_exception(ValueError())
    else:
        first.cancel()
    await asyncio.wait_for(waiting, 5)
    assert not other.done()
    if how == "error":
        assert isinstance(first.exception(), ValueError), "for who asks"
