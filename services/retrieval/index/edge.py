"""The embedded store as this process sees it: a pipe to the process that has it (edge_process.py).

That process is started at the first call and again after it has ended, whatever ended it; nothing
that it had acknowledged is lost.
"""

import json
import logging
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from services.common.children import plain_environment
from services.common.locks.secrets import private_folder
from services.retrieval.index.layout import Layout
from services.retrieval.index.points import (
    Condition,
    Found,
    Point,
    Question,
    StoreAwayError,
    StoreFailedError,
    StoreUnusableError,
)

log = logging.getLogger(__name__)

_STANDS_STILL_S = 60.0  # a call that takes longer never ends
_READY_S = 3600.0  # reading a log, or a store of an earlier version
_END_S = 10.0


class EdgePoints:
    """See `Points`."""

    kind = "embedded"
    threads = 1

    def __init__(self, layout: Layout, *others: Layout) -> None:
        """`others`: of further models."""
        self._layouts = [layout, *others]
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[Any, Any] | None = None

    def open(self) -> None:
        if self._pipe is None:
            self._start()

    def search(self, question: Question, model: str = "") -> Found:
        found: Found = self._ask("search", question, model)
        return found

    def put(self, points: Sequence[Point], model: str = "") -> None:
        self._ask("put", points, model)

    def change(self, where: Condition, payload: Mapping[str, Any]) -> None:
        self._ask("change", where, payload)

    def delete(self, ids: Sequence[str]) -> None:
        self._ask("delete", ids)

    def ids(self, where: Condition, limit: int) -> list[str]:
        ids: list[str] = self._ask("ids", where, limit)
        return ids

    def payloads(
        self, where: Condition, limit: int, keys: Sequence[str], model: str = ""
    ) -> list[dict[str, Any]]:
        payloads: list[dict[str, Any]] = self._ask("payloads", where, limit, keys, model)
        return payloads

    def count(self, where: Condition, model: str = "") -> int:
        number: int = self._ask("count", where, model)
        return number

    def close(self) -> None:
        """Waits until all is on disk."""
        if self._pipe is not None and self._process is not None:
            self._pipe.close()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                log.warning("the embedded vector store's process did not end, it is killed")
            self._end()

    def _ask(self, method: str, *arguments: Any) -> Any:
        self.open()
        outcome, value = self._exchange((method, arguments), _STANDS_STILL_S)
        if outcome == "failed":
            raise StoreFailedError(value)
        return value

    def _start(self) -> None:
        private_folder(Path(self._layouts[0].data_dir))
        ours, theirs = Pipe()
        command = ["-m", "services.retrieval.index.edge_process", str(theirs.fileno())]
        self._process = subprocess.Popen(
            [sys.executable, *command, json.dumps([layout._asdict() for layout in self._layouts])],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=plain_environment(),
        )
        theirs.close()
        _bound(ours, _STANDS_STILL_S)
        self._pipe = ours
        outcome, value = self._exchange(None, _READY_S)
        if outcome == "unusable":
            self._end()
            raise StoreUnusableError(*value)
        if value:
            log.warning("%d passages of an earlier version moved to the embedded store", value)

    def _exchange(self, question: Any, timeout_s: float) -> tuple[str, Any]:
        """After an exception the process has ended."""
        assert self._pipe is not None
        try:
            if question is not None:
                self._pipe.send(question)
            if self._pipe.poll(timeout_s):
                answer: tuple[str, Any] = self._pipe.recv()
                return answer
            log.error("the embedded vector store's process stands still, it is killed")
        except (EOFError, OSError):
            pass
        status = self._end()
        raise StoreAwayError(f"the embedded vector store's process ended with status {status}")

    def _end(self) -> int:
        assert self._process is not None
        assert self._pipe is not None
        self._pipe.close()
        self._process.kill()
        status = self._process.wait()
        self._process = self._pipe = None
        return status


def _bound(pipe: "Connection[Any, Any]", within_s: float) -> None:
    """Of a message that has begun no part takes longer, there or back; else OSError: what does not
    fit the pipe would wait for ever for a process that does not read."""
    seconds = int(within_s)
    limit = struct.pack("ll", seconds, int((within_s - seconds) * 1e6))  # a C timeval
    with socket.socket(fileno=os.dup(pipe.fileno())) as ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
