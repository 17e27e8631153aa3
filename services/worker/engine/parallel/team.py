"""The processes of a model's ranks, as the engine's process sees them.

Whoever waits here, to tell a rank something or to be answered, watches all of them meanwhile: one
that ended, or whose board does not move, ends all. So nobody waits for a rank that waits, in a
collective, for one that is gone.
"""

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NoReturn

from services.worker.engine import wire
from services.worker.engine.channel import Channel, Closed
from services.worker.engine.config import EngineConfig
from services.worker.engine.cores import usable_cores
from services.worker.engine.how_it_ended import how_it_ended
from services.worker.engine.parallel.begin import Begin
from services.worker.engine.parallel.board import Board
from services.worker.engine.runner import RunnerLost

SILENT_S = 5.0
"""A rank that shows no life for so long is lost."""
LOADING_SILENT_S = 60.0
"""Likewise, while it imports and reads: some of that lets no other thread run."""
_LOOK_S = 0.25
_ROOT = Path(__file__).resolve().parents[4]


@dataclass(slots=True)
class _Member:
    process: subprocess.Popen[bytes]
    socket: socket.socket
    channel: Channel
    beats: int = 0
    silent_s: float = 0.0


class Team:
    """Raises RunnerLost once a rank is lost; then all are ended."""

    def __init__(self, config: EngineConfig) -> None:
        """Starts the processes."""
        self.size = config.tensor_parallel
        self.board = Board()
        self._silent_s = LOADING_SILENT_S
        self._lost: RunnerLost | None = None
        self._meeting = tempfile.mkdtemp(prefix="penstock-ranks-")
        threads = max(1, (config.threads or usable_cores()) // self.size)
        self._members: list[_Member] = []
        try:
            for rank in range(self.size):
                device = config.device if config.device == "cpu" else f"cuda:{rank}"
                own = replace(config, tensor_parallel=1, device=device, threads=threads)
                self._members.append(self._start(threads))
                self.tell(rank, Begin(own, rank, self.size, f"{self._meeting}/ranks"))
        except BaseException:
            self.end()
            raise

    def loaded(self) -> list[Any]:
        """What each rank tells of its part. Raises ValueError where one cannot load it."""
        try:
            return self.answers()
        except RunnerLost as error:
            raise ValueError(f"tensor_parallel {self.size}: {error}") from error
        finally:
            self._silent_s = SILENT_S
            shutil.rmtree(self._meeting, ignore_errors=True)

    @property
    def alarms(self) -> list[int]:
        """Descriptors of which none can be read while nobody asks, unless a rank is lost."""
        return [member.socket.fileno() for member in self._members]

    def check(self) -> None:
        """While nobody asks: raises RunnerLost if a rank is gone."""
        for member in self._look(0.0, select.POLLIN, self._members):
            self._take(member)

    def tell(self, rank: int, message: object) -> None:
        self._raise_if_lost()
        member = self._members[rank]
        for piece in wire.encode(message):
            rest = memoryview(piece).cast("B")
            while rest:
                try:
                    rest = rest[member.socket.send(rest, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    self._look(_LOOK_S, select.POLLOUT, [member])
                except OSError:
                    self._lose(member)

    def tell_all(self, message: object) -> None:
        for rank in range(self.size):
            self.tell(rank, message)

    def ask_all(self, message: object) -> list[Any]:
        """What each rank answers."""
        self.tell_all(message)
        return self.answers()

    def end(self) -> None:
        """Ends all, and returns when they have."""
        self._lost = self._lost or RunnerLost("the ranks have been ended")
        for member in self._members:
            with suppress(ProcessLookupError):
                member.process.kill()
        for member in self._members:
            member.process.wait()
            member.socket.close()
        if self._members:
            self.board.close()
        self._members = []
        shutil.rmtree(self._meeting, ignore_errors=True)

    def _start(self, threads: int) -> _Member:
        own, their = socket.socketpair()
        path = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            # Ranks of one host: nobody else hears of their ports.
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
        }
        with their:
            fds = [their.fileno(), self.board.fd]
            module = "services.worker.engine.parallel.rank"
            process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        return _Member(process, own, Channel(own))

    def answers(self) -> list[Any]:
        """One of each rank."""
        self._raise_if_lost()
        found: dict[int, Any] = {}
        while len(found) < self.size:
            waited_for = [m for rank, m in enumerate(self._members) if rank not in found]
            for member in self._look(_LOOK_S, select.POLLIN, waited_for):
                if (answer := self._take(member)) is not None:
                    found[self._members.index(member)] = answer
        return [found[rank] for rank in range(self.size)]

    def _take(self, member: _Member) -> Any | None:
        try:
            answer = member.channel.take()
        except Closed:
            self._lose(member)
        if isinstance(answer, wire.Failure):
            self._lose(member, answer.message)
        return answer

    def _look(self, within_s: float, events: int, at: list[_Member]) -> list[_Member]:
        """Which of them are ready. Raises RunnerLost."""
        poll = select.poll()
        for member in self._members:
            poll.register(member.socket, events if member in at else 0)
        began = monotonic()
        ready = dict(poll.poll(within_s * 1000))
        # A pause of this process, too, is no silence of theirs.
        waited_s = min(monotonic() - began, 2 * _LOOK_S)
        for rank, member in enumerate(self._members):
            beats = self.board.beats(rank)
            member.silent_s = 0.0 if beats != member.beats else member.silent_s + waited_s
            member.beats = beats
            if member.silent_s > self._silent_s:
                self._lose(member, f"shows no life for {self._silent_s:.0f} s")
            if member not in at and ready.get(member.socket.fileno(), 0) & select.POLLHUP:
                self._lose(member)
        return [member for member in at if member.socket.fileno() in ready]

    def _lose(self, member: _Member, why: str = "") -> NoReturn:
        """Ends all. `why`: what is known of it; else that its process has ended is."""
        if why and (killed := self._killed()):  # what the others tell came of that
            member, why = killed, ""
        if not why:
            with suppress(subprocess.TimeoutExpired):
                member.process.wait(SILENT_S)
            status = member.process.returncode
            why = "has closed its socket" if status is None else how_it_ended(status)
        rank, status = self._members.index(member), member.process.returncode
        self._lost = RunnerLost(f"rank {rank} of {self.size} {why}", status == -signal.SIGKILL)
        self.end()
        raise self._lost

    def _killed(self) -> _Member | None:
        """One that a signal has just ended."""
        until = monotonic() + _LOOK_S
        while monotonic() < until:
            for member in self._members:
                if (member.process.poll() or 0) < 0:
                    return member
            sleep(_LOOK_S / 10)
        return None

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise self._lost
