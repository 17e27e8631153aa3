"""The engine loop as a process of its own: `python -m services.worker.engine.process FD FD`.

The FDs are inherited sockets to the `EngineClient` that started it (frames: wire.py). On the first,
the first message in is the EngineConfig, the first out ModelInfo or Failure. Then commands come in
and one StepOutput goes out for each step. The second takes the KV blocks of other engines and
`start_decode`, which must not overtake them. The process ends on `shutdown`, and when a socket
closes: its parent is gone.

Between steps all commands that have arrived are carried out, so that a cancel takes effect at once
whatever else comes in; of KV blocks, which may be gigabytes, only as many as TRANSFER_S allows, so
that a burst of them does not hold up those who decode. That holds for the rest of a frame, too:
what of it does not come in this time is read after the step. With nothing to do the engine checks
that no block leaked, which would end it with a Failure, and sleeps on the sockets. While requests
are pending that cannot be moved (all blocks are held by sequences that wait for the other side of a
split), it steps once a second to show that it lives.
"""

import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from time import monotonic
from typing import Any, NoReturn

from services.worker.engine import kv_payload, wire
from services.worker.engine.config import EngineConfig
from services.worker.engine.engine import Engine
from services.worker.engine.log_lines import JsonLines

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
IDLE_S = 0.2
"""Idle for so long, the engine checks that no block leaked."""
TRANSFER_S = 0.005
"""Taking KV blocks delays a step by so much at most, and by the last one's writing; a step that
follows a shorter one, by as long as that one took: those who decode wait for two steps, not more.
"""


class Closed(Exception):
    """The other end is gone, or asked to end."""


class Channel:
    """Frames on a socket, taken as they come: what there is of one is kept until the rest is."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._taken = self._frames()
        self._amid = False  # a frame has come in part

    def fileno(self) -> int:
        return self._socket.fileno()

    def take(self) -> Any | None:
        """The next message, or None if not all of it has come. Never waits.

        Raises Closed at the end.
        """
        return next(self._taken)

    def more(self, within_s: float) -> bool:
        """Whether more comes of a frame that has come in part; waits so long for it."""
        return self._amid and self._readable(max(0.0, within_s))

    def receive(self) -> Any:
        """The next message, waited for. Raises Closed at the end."""
        while (message := self.take()) is None:
            self._readable(None)
        return message

    def send(self, message: object) -> None:
        """Waits for the other end to take it. Raises Closed at the end."""
        try:
            for piece in wire.encode(message):
                self._socket.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            raise Closed from None

    def _readable(self, within_s: float | None) -> bool:
        poll = select.poll()  # select knows no descriptors past 1,024, and a worker may have more
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(None if within_s is None else within_s * 1000))

    def _frames(self) -> Iterator[Any | None]:
        """Each message, and None whenever there is nothing more to read."""
        while True:
            (count,) = wire.COUNT.unpack((yield from self._read(wire.COUNT.size)))
            self._amid = True
            sizes = wire.decode_sizes(bytes((yield from self._read(8 * count))))
            parts = []
            for size in sizes:
                parts.append((yield from self._read(size)))
            self._amid = False
            yield wire.decode(parts)

    def _read(self, size: int) -> Generator[None, None, bytearray]:
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            try:
                count = self._socket.recv_into(rest, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                yield None
                continue
            except ConnectionResetError:
                raise Closed from None
            if count == 0:
                raise Closed
            rest = rest[count:]
        return data


def serve(channel: Channel, transfers: Channel, engine: Engine) -> None:
    """Carries out commands and steps until a channel closes. Raises what the engine raises."""
    commands: dict[str, Callable[..., None]] = {
        "add": engine.add,
        "cancel": engine.cancel,
        "write_kv": engine.write_kv,
        "start_decode": engine.start_decode,
        "snapshot": lambda number: channel.send(wire.Snapshot(number, engine.snapshot())),
        "shutdown": _shut_down,
    }

    def carry_out(operation: str, *arguments: Any) -> None:
        commands[operation](*arguments)

    engine.on_long_step = lambda expected_s: channel.send(wire.LongStep(expected_s))
    poll = select.poll()
    for source in (channel, transfers, engine.aside.news):
        poll.register(source, select.POLLIN)
    timeout: float | None = None
    transfer_s = TRANSFER_S
    while True:
        if poll.poll(None if timeout is None else timeout * 1000):
            timeout = 0
            engine.aside.hear()
        while (command := channel.take()) is not None:
            carry_out(*command)
        until = monotonic() + transfer_s
        while (transfer := transfers.take()) is not None or transfers.more(until - monotonic()):
            if transfer is not None:
                carry_out(*transfer)
            if engine.has_work and monotonic() >= until:
                break
        if not engine.has_work and timeout == IDLE_S:
            engine.check()
        if engine.has_work:
            output = engine.step()
            channel.send(output)
            timeout = HEARTBEAT_S if engine.stuck else 0
            step_s = output.duration_ns / 1e9
            transfer_s = TRANSFER_S if engine.stuck else min(TRANSFER_S, step_s)
        else:
            timeout = IDLE_S if timeout == 0 else None


def _shut_down() -> None:
    raise Closed


def main() -> int:
    # Ctrl-C reaches the whole process group; the parent decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel, transfers = (Channel(socket.socket(fileno=int(fd))) for fd in sys.argv[1:])
    engine: Engine | None = None
    try:
        config: EngineConfig = channel.receive()
        kv_payload.sweep()
        try:
            engine = Engine(config)
            channel.send(engine.info)
            serve(channel, transfers, engine)
        except Closed:
            raise
        except Exception as error:
            log.exception("the engine fails")
            channel.send(wire.Failure(f"{type(error).__name__}: {error}"))
            return 1
    except Closed:
        return 0
    finally:
        if engine is not None:
            engine.close()
    return 0


def end(status: int) -> NoReturn:
    """Threads that are left are in the grammar library, which nothing ends: an interpreter that
    comes to its end would end them there, and that the process with a signal."""
    if threading.active_count() > 1:
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    end(main())
