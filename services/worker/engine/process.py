"""The engine loop as a process of its own: `python -m services.worker.engine.process FD`.

FD is an inherited socket to the `EngineClient` that started it (frames: wire.py). The first message
in is the EngineConfig, the first out ModelInfo or Failure. Then commands come in and one StepOutput
goes out for each step. The process ends on `shutdown`, and when the socket closes: its parent is
gone.

Between steps all commands that have arrived are carried out. With nothing to do it checks that no
block leaked, which would end it with a Failure, and sleeps on the socket. While requests are
pending that cannot be moved (all blocks are held by sequences that wait for the other side of a
split), it steps once a second to show that it lives.
"""

import logging
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from services.worker.engine import kv_payload, wire
from services.worker.engine.config import EngineConfig
from services.worker.engine.engine import Engine
from services.worker.engine.messages import StepOutput

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
IDLE_S = 0.2
"""Idle for so long, the engine checks that no block leaked."""


class Closed(Exception):
    """The other end is gone, or asked to end."""


class Channel:
    """Blocking frames on a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def wait(self, timeout_s: float | None) -> bool:
        """Whether a message, or the end, is there within the time; None: waits for it."""
        return bool(self._poll.poll(None if timeout_s is None else timeout_s * 1000))

    def receive(self) -> Any:
        """Raises Closed at the end."""
        (count,) = wire.COUNT.unpack(self._read(wire.COUNT.size))
        sizes = wire.decode_sizes(bytes(self._read(8 * count)))
        return wire.decode([self._read(size) for size in sizes])

    def send(self, message: object) -> None:
        try:
            for piece in wire.encode(message):
                self._socket.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            raise Closed from None

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            try:
                count = self._socket.recv_into(rest)
            except ConnectionResetError:
                raise Closed from None
            if count == 0:
                raise Closed
            rest = rest[count:]
        return data


def serve(channel: Channel, engine: Engine) -> None:
    """Carries out commands and steps until the channel closes. Raises what the engine raises."""
    commands: dict[str, Callable[..., None]] = {
        "add": engine.add,
        "cancel": engine.cancel,
        "write_kv": engine.write_kv,
        "start_decode": engine.start_decode,
        "snapshot": lambda number: channel.send(wire.Snapshot(number, engine.snapshot())),
        "shutdown": _shut_down,
    }
    timeout: float | None = None
    while True:
        while channel.wait(timeout):
            operation, *arguments = channel.receive()
            commands[operation](*arguments)
            timeout = 0
        if not engine.has_work and timeout == IDLE_S:
            engine.check()
        if engine.has_work:
            output = engine.step()
            channel.send(output)
            timeout = 0 if _moved(output) else HEARTBEAT_S
        else:
            timeout = IDLE_S if timeout == 0 else None


def _moved(output: StepOutput) -> bool:
    """False: stepping again makes no sense before a command changes something."""
    return bool(
        output.prefill_tokens or output.decode_tokens or output.outputs or output.kv_reserved
    )


def _shut_down() -> None:
    raise Closed


def main() -> int:
    # Ctrl-C reaches the whole process group; the parent decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    try:
        config: EngineConfig = channel.receive()
        kv_payload.sweep()
        try:
            engine = Engine(config)
            channel.send(engine.info)
            serve(channel, engine)
        except Closed:
            raise
        except Exception as error:
            log.exception("the engine fails")
            channel.send(wire.Failure(f"{type(error).__name__}: {error}"))
            return 1
    except Closed:
        return 0
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    sys.exit(main())
