"""A rank's parent on another host than the engine's: it stands for the engine there.

Over the `life` connection the keeper says (one byte) that it has started the rank. Then the engine
asks (one byte) whether that lives; the keeper answers (one byte) if the rank has counted since,
says how it ended, and ends it when the connection is over: the engine is gone, its host, or the way
there.
"""

import logging
import os
import pickle
import select
import socket
import subprocess
from contextlib import suppress

from services.worker.engine.parallel.board import Board
from services.worker.engine.parallel.links import Connection, accept, watched
from services.worker.engine.parallel.processes import start
from services.worker.engine.parallel.seats import Lock

log = logging.getLogger(__name__)

ASK, ALIVE, ENDED = b"?", b".", b"!"
"""ENDED is followed by the process' status, and nothing."""
DIALLED_WITHIN_S = 120.0
"""Engine and ranks are started together; whoever has not come by then does not come."""


def keep(listener: socket.socket, lock: Lock, rank: int, engine: str) -> None:
    """Waits for the engine, which comes from that address, starts the rank, and returns once that
    has ended. The thread that calls it is the rank's parent: with it the rank ends, too."""
    with listener:
        try:
            life = watched(accept(listener, lock, b"life", DIALLED_WITHIN_S, engine))
        except (TimeoutError, OSError) as error:
            log.error("rank %d is not started: %s", rank, error)
            return
        board = Board()
        try:
            process = start("accepts", listener, board, told=pickle.dumps((lock, engine)))
        except BaseException:
            life.close()
            board.close()
            raise
    try:
        life.sendall(ALIVE)  # it is the rank that listens from now on
        _watch(life, process, board, rank)
    finally:
        process.kill()
        process.wait()
        life.close()
        board.close()


def _watch(life: Connection, process: "subprocess.Popen[bytes]", board: Board, rank: int) -> None:
    ended, beats = os.pidfd_open(process.pid), 0
    poll = select.poll()
    poll.register(life, select.POLLIN)
    poll.register(ended, select.POLLIN)
    asked = memoryview(bytearray(64))
    try:
        while True:
            ready = dict(poll.poll())
            if ended in ready:
                status = process.wait()
                log.info("rank %d has ended with status %d", rank, status)
                with suppress(OSError):
                    life.sendall(ENDED + str(status).encode())
                return
            try:
                if not life.recv_into(asked, 0, socket.MSG_DONTWAIT):
                    return
                if beats != (beats := board.beats(rank)):
                    life.sendall(ALIVE)
            except BlockingIOError:
                continue
            except OSError as error:
                log.warning("rank %d: the engine is lost: %s", rank, error)
                return
    finally:
        os.close(ended)
