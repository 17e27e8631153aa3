"""Two processes for one stack, so that nothing of it is left behind, whatever dies.

    leash = supervise(report)    # returns in a process below; the caller's own stays and watches
    ...                          # start the stack
    leash.up(20, logs)           # from now on it is worth a new start

The process above is small and does nothing that could fail. All that the stack starts descends from
it, orphans too (Linux gives them to it), so that it finds and ends them when the process below has
ended, in order or not; then it exits likewise, or starts the stack anew if that one was up and was
lost: at once, then after growing pauses, until `_PAUSES_S` is used up. If it is killed itself, the
process below notices and ends everything in its place.
"""

import atexit
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import psutil

LOST = 75  # exit code of a stack that lost what only a new start brings back

_LOOK_EVERY_S = 0.1
_END_MARGIN_S = 15.0  # after the drain's grace, for the rest of an orderly end
_TERM_S = 1.0  # for what is left over, to end by itself
_PAUSES_S = (0.0, 2.0, 10.0)  # before each of the new starts in a row
_HELD_S = 30.0  # a new start that is up for this long has held: the next loss is a first one
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux's prctl

Report = Callable[[str], None]


class Leash:
    """What the process below holds of the one above."""

    def __init__(self, end: socket.socket, *, again: bool) -> None:
        self.again = again  # this stack is started in place of one that was lost
        self._end = end
        self._grace_s: float | None = None
        threading.Thread(target=self._wait, name="leash", daemon=True).start()

    def up(self, grace_s: float, logs: object) -> None:
        """The stack is up: what is to stop it comes as SIGTERM now, to be obeyed within `grace_s`
        (before, it is killed); and should it be lost, it is started again. `logs` is where to look
        for why, should it be lost too often."""
        self._grace_s = grace_s
        self._end.sendall(f"{grace_s} {logs}".encode())

    def _wait(self) -> None:
        with suppress(OSError):
            while self._end.recv(1):
                pass
        # The process above was killed. What it would do is done here.
        _adopt_orphans()
        if self._grace_s is not None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(self._grace_s + _END_MARGIN_S)
        _end_descendants()
        os._exit(1)


def supervise(report: Report) -> Leash:
    """Returns in a new process, whose children and further descendants will end with it. The
    calling process, which must have no threads, exits in here, as the new one does."""
    _adopt_orphans()
    asked: list[int] = []  # signals to stop
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: asked.append(number))
    ups: list[_Up] = []
    failed = 0  # new starts in a row that have not held
    while True:
        here, there = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            here.close()
            return _below(there, again=bool(ups))
        there.close()
        code, up = _watch(pid, here, asked, report)
        here.close()
        _end_descendants()
        if asked and up is None:
            report("stopped before it was up")
        if up is not None:
            ups.append(up)
        ended = code >= 0 and code != LOST and (up is not None or not ups)
        if asked or ended or not ups:
            _exit(code, asked)
        failed = 0 if up is not None and up.seconds >= _HELD_S else failed
        what = f"the stack {'was lost' if up else 'did not start again'} ({_told(code)})"
        if failed == len(_PAUSES_S):
            report(
                f"{what}; {failed} new starts in a row have not held for {_HELD_S:.0f} s: "
                f"not started anew; logs: {ups[-1].logs}"
            )
            _exit(code, asked)
        pause_s = _PAUSES_S[failed]
        report(f"{what}: starting anew" + (f" in {pause_s:g} s" if pause_s else ""))
        failed += 1
        _pause(pause_s, asked)
        if asked:
            sys.exit(128 + asked[-1])


@dataclass
class _Up:
    """What is known of a stack that was up."""

    seconds: float  # for how long
    logs: str


def _pause(seconds: float, asked: list[int]) -> None:
    until = time.monotonic() + seconds
    while not asked and time.monotonic() < until:
        time.sleep(_LOOK_EVERY_S)


def _below(leash: socket.socket, *, again: bool) -> Leash:
    os.setsid()  # Ctrl-C in the terminal is for the process above
    atexit.register(_end_descendants)  # nobody else does when the process above was killed
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    return Leash(leash, again=again)


def _watch(
    pid: int, leash: socket.socket, asked: list[int], report: Report
) -> tuple[int, _Up | None]:
    """Waits for the process below, and hands on what is asked of this one. Returns its exit code
    (negative: the signal that killed it), and None where it never was up."""
    leash.setblocking(False)
    up_at: float | None = None
    logs = ""
    grace_s, deadline, told = 0.0, float("inf"), 0
    while True:
        now = time.monotonic()
        asks = len(asked)  # first: whoever saw it up and asked it to end, asked one that is up
        code = _reaped(pid)
        with suppress(BlockingIOError):
            if said := leash.recv(4096).decode():
                grace_text, logs = said.split(" ", 1)
                grace_s, up_at = float(grace_text), now
        if code is not None:
            return code, None if up_at is None else _Up(now - up_at, logs)
        if asks > told:
            told += 1
            patient = told == 1 and up_at is not None
            os.kill(pid, signal.SIGTERM if patient else signal.SIGKILL)
            deadline = now + grace_s + _END_MARGIN_S
        elif now > deadline:
            report(f"not ended {grace_s + _END_MARGIN_S:.0f} s after it was asked to: killed")
            deadline = float("inf")
            os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_EVERY_S)


def _reaped(pid: int) -> int | None:
    """The exit code of a child that has ended. Orphans that ended are reaped on the way."""
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == pid:
            return os.waitstatus_to_exitcode(status)
        if not ended:
            return None


def _end_descendants() -> None:
    """Ends all of them, and those that they start meanwhile."""
    patience = time.monotonic() + _TERM_S
    while found := psutil.Process().children(recursive=True):
        for process in found:
            try:
                if time.monotonic() < patience:
                    process.terminate()
                else:
                    process.kill()
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs(found, timeout=_LOOK_EVERY_S)


def _adopt_orphans() -> None:
    """A descendant whose parent dies becomes a child of this process, not of init."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def _told(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _exit(code: int, asked: list[int]) -> NoReturn:
    if code < 0:  # told as a shell tells it, and if it was asked for, as if of this process
        code = 128 + asked[-1] if asked else 128 - code
    sys.exit(code)
