"""A rank's process: `python -m services.worker.engine.parallel.rank inherits FD FD`, of which the
first is a socket to the engine's process (frames: wire.py) and the second the board's memory. On
another host than the engine's: `rank accepts FD FD`. There the first is what it accepts the engine
on, the second the keeper's board, and standard input has the lock (links.py) and the engine's
address.

The first message in is `Begin`, the first out ModelInfo. Then commands are carried out in order;
some are answered. What goes wrong here may have left the others waiting for this rank, so it is
told, as a Failure, and ends the process; the engine ends the others. The kernel ends it with its
parent, the engine's process or the keeper, whatever that dies of.
"""

import ctypes
import logging
import os
import pickle
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from services.worker.engine.models.registry import read_config
from services.worker.engine.parallel.begin import Begin
from services.worker.engine.parallel.board import Board, Place
from services.worker.engine.parallel.keeper import DIALLED_WITHIN_S
from services.worker.engine.parallel.links import accept
from services.worker.engine.parallel.meeting import met
from services.worker.engine.parallel.seats import Lock
from services.worker.engine.parallel.shard import Shard
from services.worker.engine.process import wire
from services.worker.engine.process.channel import Channel, Closed
from services.worker.engine.process.log_lines import JsonLines
from services.worker.engine.runners.making import runner_of
from services.worker.engine.runners.runner import Runner, Ticket

log = logging.getLogger(__name__)

_PDEATHSIG = 1  # PR_SET_PDEATHSIG of Linux's prctl

BEAT_S = 0.25


class _Rank:
    """Carries out commands."""

    def __init__(self, shard: Shard, runner: Runner, channel: Channel, board: Board) -> None:
        self._shard, self._runner = shard, runner
        self._channel, self._board = channel, board
        self._running: deque[Ticket] = deque()
        self._commands: dict[str, Callable[..., None]] = {
            command.__name__: command
            for command in (
                *(self.launch, self.sample, self.collect, self.head_rows),
                *(self.adapt, self.read, self.write),
            )
        }

    def serve(self) -> NoReturn:
        """Raises Closed, and what goes wrong."""
        while True:
            operation, *arguments = self._channel.receive()
            self._commands[operation](*arguments)

    def launch(self, shown: Any) -> None:
        plan = self._read(shown)
        self._running.append(self._runner.launch(plan))

    def sample(self, shown: Any) -> None:
        allowed = self._read(shown)
        self._runner.sample(self._running[-1], allowed)

    def _read(self, shown: Any) -> Any:
        """Ranks of other hosts than the engine's are sent what others are shown."""
        return self._board.read(shown) if isinstance(shown, Place) else shown

    def collect(self) -> None:
        """All sample alike; what the first tells the others may be compared with."""
        collected = self._runner.collect(self._running.popleft())
        tokens = [result.tokens for result in collected.results]
        self._channel.send((tokens, collected if self._shard.rank == 0 else None))

    def head_rows(self, ids: list[int]) -> None:
        """Zeros where they are another rank's."""
        shard = self._shard
        own = range(0 if shard.rank else self._runner.info.num_logits)  # of classes all are whole
        if shard.model.head == "tokens":
            own = shard.vocabulary
        places = [at for at, id in enumerate(ids) if id in own]
        found = np.zeros((len(ids), shard.model.hidden_size), np.float32)
        if places:
            found[places] = self._runner.head_rows([ids[at] - own.start for at in places])
        self._channel.send(found)

    def adapt(self, place: int, adapter: Any) -> None:
        """Answers why not, or nothing."""
        try:
            self._runner.adapt(place, adapter)
            self._channel.send("")
        except MemoryError as error:
            self._channel.send(str(error) or "there is no memory for it")

    def read(self, blocks: list[int]) -> None:
        self._channel.send(np.frombuffer(self._runner.cache.read(blocks), np.uint8))

    def write(self, blocks: list[int], data: Any) -> None:
        self._runner.cache.write(blocks, np.asarray(data).data)


def _joined(begin: Begin) -> tuple[Shard, Runner]:
    """Once all ranks have met and this one's part is loaded."""
    config = replace(begin.config, model=begin.model)
    group = met(begin)
    shard = Shard(read_config(config.model), begin.rank, begin.ranks)
    return shard, runner_of(config, shard, group)


def _engine(how: str, fd: int) -> Channel:
    """Raises Closed where none comes."""
    sock = socket.socket(fileno=fd)
    if how == "inherits":
        return Channel(sock)
    lock: Lock
    engine: str
    lock, engine = pickle.load(sys.stdin.buffer)
    with sock:
        try:
            return Channel(accept(sock, lock, b"rank", DIALLED_WITHIN_S, engine))
        except TimeoutError:
            raise Closed from None


def _end_with_parent() -> None:
    """Also while it waits for others, or is stopped."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _show_life(board: Board, rank: int) -> None:
    pause = threading.Event()
    while not pause.wait(BEAT_S):
        board.beat(rank)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine decides when it ends
    _end_with_parent()
    how, *fds = sys.argv[1:]
    board = Board(int(fds[1]))
    try:
        channel = _engine(how, int(fds[0]))
        begin: Begin = channel.receive()
        beating = threading.Thread(target=_show_life, args=(board, begin.rank), daemon=True)
        beating.start()
        try:
            shard, runner = _joined(begin)
            channel.send(runner.info)
            _Rank(shard, runner, channel, board).serve()
        except Closed:
            raise
        except Exception as error:
            log.exception("rank %d fails", begin.rank)
            channel.send(wire.Failure(f"{type(error).__name__}: {error}"))
            return 1
    except Closed:
        return 0


def _end(status: int) -> NoReturn:
    """At once: threads of collectives may be waiting for ranks that are gone."""
    logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    _end(main())
