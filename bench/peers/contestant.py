"""A process that runs workloads when it is asked to, and stands still in between."""

import json
import os
import selectors
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

START_S = 900.0
RUN_S = 1800.0


class ContestantError(Exception):
    """It did not start, died or gave no answer; the message says where its log is."""


@dataclass
class Contestant:
    """Started by `start`, then asked by `run`, each time alone: all others are stopped."""

    name: str
    command: list[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    start_s: float = 0.0
    """From its first instruction to its being ready."""
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Raises ContestantError."""
        began = time.perf_counter()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | self.environment,
            )
        self._answer(START_S)
        self.start_s = time.perf_counter() - began

    def run(self, workload: Path) -> dict[str, Any]:
        """The answer as bench/peers/drivers/line.py tells it. Raises ContestantError."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{workload}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ContestantError(f"{self.name} has ended, see {self.log}") from None
        return self._answer(RUN_S)

    def freeze(self) -> None:
        """Takes no processor time until `thaw`, whatever its threads wait for."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """Ends it with all that it started; does nothing where it has ended."""
        tree = self._tree()
        for process in tree:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(tree, timeout=10)
        if self._process is not None:
            self._process.wait()

    def cpu_s(self) -> float:
        """Processor time of all its processes so far."""
        return sum(_cpu_s(process) for process in self._tree())

    def peak_rss(self) -> int:
        """Bytes: the peaks of all its processes, added."""
        return sum(_peak_rss(process.pid) for process in self._tree())

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        deadline, line = time.monotonic() + seconds, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(deadline - time.monotonic()):
                    raise ContestantError(
                        f"{self.name} gave no answer for {seconds:.0f} s, see {self.log}"
                    )
                piece = os.read(self._process.stdout.fileno(), 2**20)
                if not piece:
                    raise ContestantError(f"{self.name} ended, see {self.log}")
                line += piece
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: int) -> None:
        for process in self._tree():
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    def _tree(self) -> list[psutil.Process]:
        if self._process is None:
            return []
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _peak_rss(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    peaks = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return sum(int(line.split()[1]) * 1024 for line in peaks)
