"""The engine loop as a process of its own: `python -m services.worker.engine.process.loop FD FD`.

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
from collections.abc import Callable
from time import monotonic
from typing import Any, NoReturn

from services.worker.engine.adapters import Adapter, PlaceInUse
from services.worker.engine.config import EngineConfig
from services.worker.engine.engine import Engine
from services.worker.engine.kv import payload as kv_payload
from services.worker.engine.process import wire
from services.worker.engine.process.channel import Channel, Closed
from services.worker.engine.process.log_lines import JsonLines
from services.worker.engine.runners.runner import RunnerLost
from services.worker.engine.steps import EngineBroken

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
IDLE_S = 0.2
"""Idle for so long, the engine checks that no block leaked."""
TRANSFER_S = 0.005
"""Taking KV blocks delays a step by so much at most, and by the last one's writing; a step that
follows a shorter one, by as long as that one took: those who decode wait for two steps, not more.
"""


def serve(channel: Channel, transfers: Channel, engine: Engine) -> None:
    """Carries out commands and steps until a channel closes. Raises what the engine raises."""
    commands: dict[str, Callable[..., None]] = {
        "add": engine.add,
        "cancel": engine.cancel,
        "write_kv": engine.write_kv,
        "start_decode": engine.start_decode,
        "load_adapter": lambda number, adapter: channel.send(_loaded(engine, number, adapter)),
        "drop_adapter": engine.drop_adapter,
        "snapshot": lambda number: channel.send(wire.Snapshot(number, engine.snapshot())),
        "shutdown": _shut_down,
    }

    def carry_out(operation: str, *arguments: Any) -> None:
        commands[operation](*arguments)

    engine.on_long_step = lambda expected_s: channel.send(wire.LongStep(expected_s))
    poll = select.poll()
    for source in (channel.fileno(), transfers.fileno(), *engine.news):
        poll.register(source, select.POLLIN)
    for alarm in engine.executor.alarms:
        poll.register(alarm, select.POLLIN)
    timeout: float | None = None
    transfer_s = TRANSFER_S
    while True:
        if poll.poll(None if timeout is None else timeout * 1000):
            timeout = 0
            engine.hear()
            engine.executor.check()
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


def _loaded(engine: Engine, number: int, adapter: Adapter) -> wire.Done:
    try:
        return wire.Done(number, engine.load_adapter(adapter))
    except PlaceInUse as error:
        return wire.Done(number, str(error), in_use=True)


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
            killed = isinstance(error, EngineBroken | RunnerLost) and error.killed
            channel.send(wire.Failure(f"{type(error).__name__}: {error}", killed))
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
