"""A process in which each new constraint is made first: `python -m …trial FD FOLDER VOCAB EOS…`.

llguidance has bounds of its own, and still some grammars overflow its stack or take all memory,
which ends the process that makes them. This one holds the checkpoint's tokenizer and nothing else,
and forks for each constraint. A child has so much processor time and memory, tells the grammar or
an error, and ends; what kills it says that it was too much.

FD is a socket. What comes on it are others, one for each constraint: a line of JSON in, one out.
"""

import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence as Seq
from contextlib import suppress
from typing import Any

import numpy as np

from services.worker.engine.grammar.compiler import Compiler, grammar_of, is_panic
from services.worker.engine.grammar.matcher import ConstraintError, TooSlow, Unavailable
from services.worker.engine.messages import Constraint

_STARTS_S = 60.0
"""It imports and reads the checkpoint's tokenizer; on a machine with work to do."""
_CPU_S = 3.0
"""Of processor time, for one constraint. A large schema takes a tenth of a second."""
_PATIENCE_S = 120.0
"""For that, whatever else the machine does."""
_MEMORY = 2 * 2**30  # bytes, of address space
_WALKS, _WALK = 3, 64  # of so many tokens


class Trial:
    """The process, seen from its engine's side threads."""

    def __init__(self, folder: str, vocab_size: int, eos_token_ids: Seq[int]) -> None:
        self._arguments = [folder, str(vocab_size), *map(str, eos_token_ids)]
        self._starting = threading.Lock()
        self._server: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def close(self) -> None:
        """Ends the process and its children, wherever they are, so that nobody waits for them."""
        self._closed = True
        self._kill()
        with self._starting:
            if self._server is not None:
                self._server.close()
                self._server = None

    def grammar(self, constraint: Constraint) -> str:
        """Blocking. Raises ConstraintError, and Unavailable if it could not be tried."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._hand_over(theirs)
            ours.settimeout(_PATIENCE_S)
            try:
                answer = _ask(ours, [constraint.kind, constraint.text, _CPU_S, _MEMORY])
            except TimeoutError:
                raise Unavailable("the machine has no time to make its grammar") from None
        if answer is None:
            raise ConstraintError("it takes too much time or memory to make its grammar")
        grammar, error, trouble = answer
        if trouble:
            raise Unavailable(trouble)
        if error:
            raise ConstraintError(error)
        return str(grammar)

    def _hand_over(self, end: socket.socket) -> None:
        with self._starting:
            if self._closed:
                raise Unavailable("the engine ends")
            try:
                if self._server is None:
                    self._server = self._start()
                socket.send_fds(self._server, [b"x"], [end.fileno()])
            except OSError as error:  # it was killed, or the machine has no process to give
                self._server = None
                raise Unavailable(f"grammars cannot be tried: {error}") from error

    def _start(self) -> socket.socket:
        """Raises OSError and Unavailable, and ConstraintError for a checkpoint that takes no
        constraints."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *self._arguments],
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        if self._closed:  # since it was looked at, by one who saw no process
            self._kill()
        ours.settimeout(_STARTS_S)
        ready = _line(ours)
        if ready is None:
            raise OSError("the process for it did not start")
        error, trouble = ready
        if trouble:
            raise Unavailable(trouble)
        if error:
            raise ConstraintError(error)
        return ours

    def _kill(self) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _ask(connection: socket.socket, question: Any) -> Any:
    """None: nobody is there any more."""
    with suppress(ConnectionError):
        connection.sendall(json.dumps(question).encode() + b"\n")
        return _line(connection)
    return None


def _line(connection: socket.socket) -> Any:
    """The other end's, as JSON; None if it has gone. Raises TimeoutError."""
    told = bytearray()
    with suppress(ConnectionError):
        while not told.endswith(b"\n"):
            if not (more := connection.recv(2**16)):
                return None
            told += more
        return json.loads(told)
    return None


def _walk(compiler: Compiler, grammar: str, eos_token_ids: Seq[int] = ()) -> None:
    """Some outputs' beginnings, which do not end if they need not: whom that ends, it ends here.
    Raises ConstraintError if there is no first token, or one takes long; a way that leads nowhere
    need not be the model's."""
    start, rng = compiler.matcher(grammar), random.Random(0)
    start.copy().go_on()
    for _ in range(_WALKS):
        matcher = start.copy()
        try:
            for _ in range(_WALK):
                matcher.go_on()
                if matcher.words is None:
                    break
                allowed = np.flatnonzero(
                    np.unpackbits(matcher.words.view(np.uint8), bitorder="little")
                )
                inner = np.setdiff1d(allowed, eos_token_ids)
                matcher.give([int(rng.choice(inner if len(inner) else allowed))])
        except TooSlow:
            raise
        except ConstraintError:
            continue


def _try(compiler: Compiler, constraint: Constraint, eos: Seq[int]) -> list[str]:
    """Its grammar, or the client's fault, or another."""
    try:
        grammar = grammar_of(constraint)
        _walk(compiler, grammar, eos)
    except ConstraintError as error:
        return ["", str(error), ""]
    except BaseException as error:
        if is_panic(error):
            return ["", f"the grammar library failed: {error}", ""]
        return ["", "", f"{type(error).__name__}: {error}"]
    return [grammar, "", ""]


def _child(connection: socket.socket, compiler: Compiler, eos: Seq[int]) -> None:
    kind, text, cpu_s, memory = _line(connection)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # its signal ends the process
    answer = _try(compiler, Constraint(kind, text), eos)
    connection.sendall(json.dumps(answer).encode() + b"\n")


def main() -> None:
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    fd, folder, vocab_size, *eos_token_ids = sys.argv[1:]
    eos = [*map(int, eos_token_ids)]
    server = socket.socket(fileno=int(fd))
    why = ["", ""]
    try:
        compiler = Compiler(folder, int(vocab_size), eos)
    except ConstraintError as error:
        why = [str(error), ""]
    except Unavailable as error:
        why = ["", str(error)]
    server.sendall(json.dumps(why).encode() + b"\n")
    if any(why):
        return
    while True:
        _, fds, _, _ = socket.recv_fds(server, 1, 1)
        if not fds:
            return  # the engine is gone
        with socket.socket(fileno=fds[0]) as connection:
            if os.fork() == 0:
                server.close()
                try:
                    _child(connection, compiler, eos)
                finally:
                    os._exit(0)


if __name__ == "__main__":
    main()
