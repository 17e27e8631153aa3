"""A process in which each new constraint is made first: `python -m …trial FOLDER VOCAB EOS…`.

llguidance has bounds of its own, and still some grammars overflow its stack or take all memory,
which ends the process that makes them. This one holds nothing. Lines of JSON: a constraint in, its
grammar or an error out.
"""

import json
import os
import random
import resource
import subprocess
import sys
from collections.abc import Sequence as Seq
from contextlib import suppress
from select import select
from time import monotonic

import numpy as np

from services.worker.engine.grammar.compiler import Compiler, ConstraintError, grammar_of
from services.worker.engine.messages import Constraint

_STARTS_S = 60.0
"""It imports and reads the checkpoint's tokenizer; on a machine with work to do."""
_DEADLINE_S = 5.0
"""A large schema takes a tenth of a second."""
_MEMORY = 2 * 2**30  # bytes, of address space
_WALK = 32  # tokens


class Trial:
    """The process, seen from its engine's side thread."""

    def __init__(self, folder: str, vocab_size: int, eos_token_ids: Seq[int]) -> None:
        self._arguments = [folder, str(vocab_size), *map(str, eos_token_ids)]
        self._process: subprocess.Popen[bytes] | None = None

    def grammar(self, constraint: Constraint) -> str:
        """Blocking, up to the deadline. Raises ConstraintError."""
        process = self._process or self._start()
        told = json.dumps([constraint.kind, constraint.text]).encode() + b"\n"
        answer = self._ask(process, told, _DEADLINE_S)
        if answer is None:
            raise ConstraintError("it takes too much time or memory to make its grammar")
        grammar, error = answer
        if error:
            raise ConstraintError(error)
        return str(grammar)

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self) -> "subprocess.Popen[bytes]":
        """Raises ConstraintError."""
        process = subprocess.Popen(
            [sys.executable, "-m", "services.worker.engine.grammar.trial", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._process = process
        ready = self._ask(process, b"", _STARTS_S)
        if ready is None:
            raise ConstraintError("the process that tries grammars did not start")
        if ready[1]:
            self.end()
            raise ConstraintError(ready[1])
        return process

    def _ask(
        self, process: "subprocess.Popen[bytes]", told: bytes, within_s: float
    ) -> list[str] | None:
        """Its answer, or None if it has died or is killed at the deadline."""
        assert process.stdin is not None
        assert process.stdout is not None
        until, answer = monotonic() + within_s, b""
        try:
            while told:
                told = told[process.stdin.write(told) or 0 :]
        except BrokenPipeError:
            pass
        while not answer.endswith(b"\n"):
            if not select([process.stdout], [], [], max(0.0, until - monotonic()))[0]:
                break
            if not (more := process.stdout.read(2**16)):
                break
            answer += more
        else:
            found: list[str] = json.loads(answer)
            return found
        self.end()
        return None


def _walk(compiler: Compiler, grammar: str, vocab_size: int) -> None:
    """Some tokens of an output: whom that ends, it ends here. Raises ConstraintError if there is no
    first one; a way that leads nowhere need not be the model's."""
    matcher = compiler.matcher(grammar)
    words, rng = np.zeros(-(-vocab_size // 32), np.int32), random.Random(0)
    matcher.fill(words)
    with suppress(ConstraintError):
        for _ in range(_WALK):
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            matcher.advance([int(rng.choice(allowed))])
            if matcher.ended:
                return
            matcher.fill(words)


def _try(compiler: Compiler, constraint: Constraint, vocab_size: int) -> list[str]:
    try:
        grammar = grammar_of(constraint)
        _walk(compiler, grammar, vocab_size)
    except ConstraintError as error:
        return ["", str(error)]
    return [grammar, ""]


def _bound_time() -> None:
    """From now on; it ends by itself then, should nobody be there to end it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    until = int(used.ru_utime + used.ru_stime + 2 * _DEADLINE_S)
    resource.setrlimit(resource.RLIMIT_CPU, (until, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def main() -> None:
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    folder, vocab_size, *eos_token_ids = sys.argv[1:]
    try:
        compiler = Compiler(folder, int(vocab_size), [*map(int, eos_token_ids)])
    except ConstraintError as error:
        print(json.dumps(["", str(error)]), flush=True)
        return
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    print(json.dumps(["", ""]), flush=True)
    for line in sys.stdin:
        _bound_time()
        constraint = Constraint(*json.loads(line))
        print(json.dumps(_try(compiler, constraint, int(vocab_size))), flush=True)


if __name__ == "__main__":
    main()
