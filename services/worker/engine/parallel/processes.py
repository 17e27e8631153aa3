"""How a rank's process is started, by the engine's or by a keeper."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from services.worker.engine.parallel.board import Board

_ROOT = Path(__file__).resolve().parents[4]


def start(
    how: Literal["inherits", "accepts"],
    sock: socket.socket,
    board: Board,
    *,
    told: bytes = b"",
    fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    """`sock`: its connection to the engine, or what it accepts that on. `told`: on its standard
    input. `fds`: more that it has, under the same numbers. `environment`: added to this one."""
    path = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = [sock.fileno(), board.fd]
    process = subprocess.Popen(
        [sys.executable, "-m", "services.worker.engine.parallel.rank", how, *map(str, own)],
        pass_fds=[*own, *fds],
        stdin=subprocess.PIPE if told else subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **(environment or {})},
    )
    if process.stdin is not None:
        process.stdin.write(told)  # a pipe holds it
        process.stdin.close()
    return process
