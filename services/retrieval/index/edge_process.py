"""`python -m services.retrieval.index.edge_process FD '<layouts>'`: the embedded store's process.

The library holds the interpreter for the whole of each call, so it has one of its own. It answers
the calls of `Points`, one after the other, as they come through the pipe FD: a pickled (method,
arguments) there, a pickled (outcome, value) back. It ends with the pipe. What it has acknowledged
is in the store's write-ahead log, so it may be killed at any moment.
"""

import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from services.retrieval.index.layout import Layout
from services.retrieval.index.points import StoreUnusableError
from services.retrieval.index.shards import Shards

log = logging.getLogger(__name__)

_IDLE_S = 2.0  # after which what was written leaves the log, for a quick start
_LONG_IDLE_S = 20.0  # after which room is given back
_WRITES = 256  # and after so many in any case
_CHANGES = ("put", "delete", "change")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which closes the pipe
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    os.set_inheritable(pipe.fileno(), False)
    layouts = [Layout(**one) for one in json.loads(sys.argv[2])]
    try:
        shards = Shards(*layouts)
    except StoreUnusableError as error:
        pipe.send(("unusable", (error.text, error.reason)))
        return
    pipe.send(("ready", shards.moved))
    try:
        _serve(pipe, shards)
    except (EOFError, ConnectionError):  # the service has ended, or has no more use for it
        shards.close()


def _serve(pipe: "Connection[Any, Any]", shards: Shards) -> None:
    unflushed, unvacuumed = 0, False
    while True:
        if unflushed and (unflushed >= _WRITES or not pipe.poll(_IDLE_S)):
            _try(shards.flush)
            unflushed, unvacuumed = 0, True
        if unvacuumed and not unflushed and not pipe.poll(_LONG_IDLE_S):
            _try(shards.vacuum)
            unvacuumed = False
        method, arguments = pipe.recv()
        try:
            answer = ("done", getattr(shards, method)(*arguments))
        except Exception as error:  # the library knows no other
            answer = ("failed", f"{method}: {error}")
        pipe.send(answer)
        unflushed += method in _CHANGES


def _try(work: Callable[[], None]) -> None:
    """What fails is done at a later time; until then the log has it."""
    try:
        work()
    except Exception as error:  # the library knows no other
        log.error("%s: %s", work.__name__, error)


if __name__ == "__main__":
    main()
