"""The processes of a model's ranks, as the engine's process sees them.

Whoever waits here, to tell a rank something or to be answered, watches all of them meanwhile: one
that ended, or that does not count, ends all. So nobody waits for a rank that waits, in a
collective, for one that is gone.
"""

import select
import shutil
import signal
import socket
import tempfile
from time import monotonic, sleep
from typing import Any, NoReturn

from services.worker.engine.config import EngineConfig
from services.worker.engine.parallel.board import Board
from services.worker.engine.parallel.seating import AnyMember, seated
from services.worker.engine.process import wire
from services.worker.engine.process.channel import Closed
from services.worker.engine.process.how_it_ended import how_it_ended
from services.worker.engine.runners.runner import RunnerLost

SILENT_S = 5.0
"""A rank that shows no life for so long is lost."""
LOADING_SILENT_S = 60.0
"""Likewise, while it imports and reads: some of that lets no other thread run."""
_LOOK_S = 0.25


class Team:
    """Raises RunnerLost once a rank is lost; then all are ended."""

    def __init__(self, config: EngineConfig) -> None:
        """Starts the processes, or has them started. Raises ValueError where one cannot be."""
        self.size = config.tensor_parallel
        self._board = Board()
        self._silent_s = LOADING_SILENT_S
        self._lost: RunnerLost | None = None
        self._meeting = tempfile.mkdtemp(prefix="penstock-ranks-")
        try:
            self._members = seated(config, self._board, f"{self._meeting}/ranks")
        except BaseException:
            self._board.close()
            shutil.rmtree(self._meeting, ignore_errors=True)
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

    def name(self, rank: int) -> str:
        """In words."""
        return f"rank {rank} of {self.size}{self._members[rank].place}"

    @property
    def alarms(self) -> list[int]:
        """Descriptors of which none can be read for long while nobody asks, unless a rank is
        lost."""
        return [member.alarm for member in self._members]

    def check(self) -> None:
        """While nobody asks: raises RunnerLost if a rank is gone."""
        self._raise_if_lost()
        for member in self._look(0.0, select.POLLIN, self._members):
            self._take(member)

    def tell(self, rank: int, *command: object) -> None:
        self._raise_if_lost()
        self._send(self._members[rank], wire.encode(command))

    def tell_all(self, *command: object) -> None:
        self._raise_if_lost()
        frame = wire.encode(command)
        for member in self._members:
            self._send(member, frame)

    def show_all(self, operation: str, message: object) -> None:
        """As `tell_all`; ranks of this host read the message, which may be large, where it is
        written once."""
        self._raise_if_lost()
        here = wire.encode((operation, self._board.write(message)))
        there = None
        for member in self._members:
            if member.is_distant:
                there = there or wire.encode((operation, message))
            self._send(member, there if member.is_distant and there else here)

    def ask_all(self, *command: object) -> list[Any]:
        """What each rank answers."""
        self.tell_all(*command)
        return self.answers()

    def answers(self) -> list[Any]:
        """One of each rank."""
        self._raise_if_lost()
        found: dict[int, Any] = {}
        while len(found) < self.size:
            waited_for = [member for member in self._members if member.rank not in found]
            for member in self._look(_LOOK_S, select.POLLIN, waited_for):
                if (answer := self._take(member)) is not None:
                    found[member.rank] = answer
        return [found[rank] for rank in range(self.size)]

    def end(self) -> None:
        """Ends all, and returns when those of this host have."""
        self._lost = self._lost or RunnerLost("the ranks have been ended")
        for member in self._members:
            member.end()
        for member in self._members:
            member.close()
        if self._members:
            self._board.close()
        self._members = []
        shutil.rmtree(self._meeting, ignore_errors=True)

    def _send(self, member: AnyMember, frame: list[bytes | memoryview]) -> None:
        self._raise_if_lost()
        for piece in frame:
            rest = memoryview(piece).cast("B")
            while rest:
                try:
                    rest = rest[member.connection.send(rest, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    self._look(_LOOK_S, select.POLLOUT, [member])
                except OSError:
                    self._lose(member)

    def _take(self, member: AnyMember) -> Any | None:
        try:
            answer = member.channel.take()
        except Closed:
            self._lose(member)
        if isinstance(answer, wire.Failure):
            self._lose(member, answer.message)
        return answer

    def _look(self, within_s: float, events: int, at: list[AnyMember]) -> list[AnyMember]:
        """Which of them are ready. Raises RunnerLost."""
        poll = select.poll()
        for member in self._members:
            poll.register(member.alarm, select.POLLIN if member.is_distant else 0)
            poll.register(member.connection, events if member in at else 0)
        began = monotonic()
        ready = dict(poll.poll(within_s * 1000))
        # A pause of this process, too, is no silence of theirs.
        waited_s = min(monotonic() - began, 2 * _LOOK_S)
        for member in self._members:
            beats = member.beats()
            member.silent_s = 0.0 if beats != member.seen_beats else member.silent_s + waited_s
            member.seen_beats = beats
            if member.silent_s > self._silent_s:
                self._lose(member, f"shows no life for {self._silent_s:.0f} s")
            closed = ready.get(member.connection.fileno(), 0) & select.POLLHUP
            if member.lost or (closed and member not in at):
                self._lose(member, member.last_words())
        return [member for member in at if member.connection.fileno() in ready]

    def _lose(self, member: AnyMember, why: str = "") -> NoReturn:
        """Ends all. `why`: what is known of it; else that its process has ended is."""
        if why and (killed := self._killed()):  # what the others tell came of that
            member, why = killed, ""
        status = member.status(SILENT_S if not why else 0.0)
        if not why:
            gone = "is lost with its host" if member.lost else "has closed its connection"
            why = gone if status is None else how_it_ended(status)
        # Of a host that is lost nothing says that the rank's work was the reason.
        killed_it = status == -signal.SIGKILL or (status is None and member.lost)
        self._lost = RunnerLost(f"{self.name(member.rank)} {why}", killed_it)
        self.end()
        raise self._lost

    def _killed(self) -> AnyMember | None:
        """One that a signal has just ended, or that is lost with its host."""
        until = monotonic() + _LOOK_S
        while monotonic() < until:
            for member in self._members:
                status = member.status()
                if (status or 0) < 0 or (status is None and member.lost):
                    return member
            sleep(_LOOK_S / 10)
        return None

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise self._lost
