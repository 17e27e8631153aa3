"""A rank as the engine's process has it: what is told and heard, whether it lives, how it ended."""

import logging
import select
import socket
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic

from services.worker.engine.parallel.board import Board
from services.worker.engine.parallel.keeper import ALIVE, ASK, ENDED
from services.worker.engine.parallel.links import Connection, dial, watched
from services.worker.engine.parallel.processes import start
from services.worker.engine.parallel.seats import Lock, Seat
from services.worker.engine.process import wire
from services.worker.engine.process.channel import Channel, Closed

log = logging.getLogger(__name__)

ASK_EVERY_S = 0.25
DIAL_S = 60.0
ENDS_S = 5.0


class Member:
    """What both kinds share."""

    def __init__(self, rank: int, connection: Connection) -> None:
        self.rank = rank
        self.connection = connection
        self.channel = Channel(connection)
        self.seen_beats = 0
        self.silent_s = 0.0

    def last_words(self) -> str:
        """The failure that it told, if that has come and nobody has read it."""
        with suppress(Closed):
            while (answer := self.channel.take()) is not None:
                if isinstance(answer, wire.Failure):
                    return answer.message
        return ""


class Child(Member):
    """A process of this host, that this one has started."""

    place = ""
    is_distant = False
    lost = False

    def __init__(
        self, rank: int, board: Board, environment: dict[str, str], fds: Sequence[int]
    ) -> None:
        own, their = socket.socketpair()
        self._board = board
        with their:
            self._process = start("inherits", their, board, fds=fds, environment=environment)
        super().__init__(rank, own)

    @property
    def alarm(self) -> int:
        """A descriptor that can be read, while nobody asks, once the rank is lost."""
        return self.connection.fileno()

    def beats(self) -> int:
        return self._board.beats(self.rank)

    def status(self, within_s: float = 0.0) -> int | None:
        """Of the process, once it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        return self._process.returncode

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    def close(self) -> None:
        """Behind `end`: returns when it has ended. One that the kernel does not let go, as a device
        that hangs may hold it, is left to end with this process."""
        if self.status(ENDS_S) is None:
            log.warning("rank %d (pid %d) does not end", self.rank, self._process.pid)
        self.connection.close()


class Distant(Member):
    """A process of another host, which has a keeper there."""

    is_distant = True

    def __init__(self, rank: int, seat: Seat, lock: Lock, own_host: str) -> None:
        """Raises OSError and Refused."""
        self.place = f" at {seat.host}"
        self.lost = False
        """Whether its keeper is gone, or has told the end."""
        self._beats, self._told, self._ask_at = 0, b"", 0.0
        self._life = watched(dial(seat.host, seat.port, lock, b"life", DIAL_S, own_host))
        try:
            if not self._wait(lambda: self._beats > 0, DIAL_S):
                raise ConnectionError("its keeper does not start it")
            connection = dial(seat.host, seat.port, lock, b"rank", DIAL_S, own_host)
        except BaseException:
            self._life.close()
            raise
        super().__init__(rank, connection)

    @property
    def alarm(self) -> int:
        return self._life.fileno()

    def beats(self) -> int:
        self._hear()
        if not self.lost and monotonic() >= self._ask_at:
            self._ask_at = monotonic() + ASK_EVERY_S
            with suppress(OSError):  # the next hearing tells
                self._life.send(ASK, socket.MSG_DONTWAIT)
        return self._beats

    def status(self, within_s: float = 0.0) -> int | None:
        """None: it lives, or its keeper is gone without a word."""
        self._wait(lambda: False, within_s)
        status = self._told.partition(ENDED)[2]
        return int(status) if status else None

    def end(self) -> None:
        """The keeper ends it."""
        self._life.close()
        self.lost = True

    def close(self) -> None:
        self.connection.close()

    def _wait(self, until: Callable[[], bool], within_s: float) -> bool:
        """Or until it is lost."""
        end = monotonic() + within_s
        readable = select.poll()
        readable.register(self._life, select.POLLIN)
        self._hear()
        while not self.lost and not until() and (left := end - monotonic()) > 0:
            readable.poll(left * 1000)
            self._hear()
        return until()

    def _hear(self) -> None:
        buffer = memoryview(bytearray(256))
        while not self.lost:
            try:
                count = self._life.recv_into(buffer, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                count = 0
            self.lost = not count
            self._beats += bytes(buffer[:count]).count(ALIVE)
            self._told += bytes(buffer[:count]).replace(ALIVE, b"")
