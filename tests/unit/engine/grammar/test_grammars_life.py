"""What makes grammars: where it cannot start, where the library is not there, and how it ends."""

import gc
import os
import signal
import threading
import weakref
from collections import UserString
from contextlib import suppress
from pathlib import Path
from time import monotonic

import pytest

from services.worker.engine import FinishReason, Request
from services.worker.engine.grammar import compiler, library
from services.worker.engine.grammar.compiler import Compiler
from services.worker.engine.grammar.grammars import Grammars
from services.worker.engine.grammar.matcher import ConstraintError, Unavailable
from services.worker.engine.messages import Constraint
from tests.support.checkpoint import write_checkpoint
from tests.support.waiting import until_so
from tests.unit.engine.constraining import EOS, HOSTILE, PROMPT, VOCAB, sampling, schema
from tests.unit.engine.driving import drive, make_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("constrained"), window=2048)


def test_the_trial_that_cannot_be_had_is_the_engines_fault(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.engine.grammar.grammars._UNAVAILABLE_S", 0.0)
    engine = make_engine(folder)
    request = Request("a", PROMPT, sampling(Constraint("choice", '["x"]')))
    with monkeypatch.context() as broken:
        broken.setattr("sys.executable", "/bin/false")
        error = drive(engine, [request]).last["a"].error
    assert error is not None
    assert (error.code, error.param) == ("internal", "")
    assert drive(engine, [request]).last["a"].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("wheel", ["missing", "of another interface", "none"])
def test_an_engine_without_the_library_says_so_when_it_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wheel: str
) -> None:
    """And fails who asks for a form by the same words, whom it would otherwise have tried; others
    are answered."""
    if wheel == "missing":
        monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    elif wheel == "none":
        monkeypatch.setattr(library.Path, "glob", lambda *_: iter(()))
    else:
        monkeypatch.setitem(library._SIGNATURES, "llg_of_another", (None, []))
    engine = make_engine(folder)
    words = {"missing": "llguidance is not installed", "none": "lacks the C interface"}
    word = words.get(wheel, "llg_of_another")
    assert word in caplog.text
    free = Request("free", PROMPT, sampling(None, max_tokens=3))
    run = drive(engine, [Request("a", PROMPT, sampling(schema({"type": "boolean"}))), free])
    assert run.last["free"].finish_reason is FinishReason.LENGTH
    error = run.last["a"].error
    assert error is not None
    assert error.code == "internal"
    assert word in error.message
    assert not engine.aside._grammars._threads
    with pytest.raises(Unavailable, match=word):
        Compiler(str(folder), VOCAB, [EOS])


def test_of_a_vocabulary_that_cannot_be_read_only_the_reason_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text has tens of megabytes, and an engine lives for months."""
    texts: list[weakref.ref[UserString]] = []

    def read(text: str, *_: object) -> None:
        whole = UserString(text)
        texts.append(weakref.ref(whole))
        raise ValueError("no tokenizer")

    monkeypatch.setattr(compiler, "Vocabulary", read)
    made = Grammars(str(folder), VOCAB, [EOS])
    gc.collect()
    assert [text() for text in texts] == [None]
    with pytest.raises(ConstraintError, match="cannot be constrained: no tokenizer"):
        made.want(Constraint("choice", '["x"]'), b"")


@pytest.mark.parametrize("fault", [OSError("no descriptors are left"), MemoryError()])
def test_what_passes_is_not_said_of_the_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    """It ends the start, which is tried again: else all constraints would be refused until then."""

    def read(*_: object) -> None:
        raise fault

    monkeypatch.setattr(compiler, "Vocabulary", read)
    with pytest.raises(type(fault)):
        Grammars(str(folder), VOCAB, [EOS])


@pytest.mark.parametrize("at", ["start", "trial", "library"])
def test_closing_waits_for_nobody_long(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Neither for a process that does not start or tries for long, which ends then, nor for a
    thread that the library does not let go: it tells nobody when it is done."""
    inside, may_end = threading.Event(), threading.Event()
    constraint = HOSTILE["memory"] if at == "trial" else Constraint("choice", '["x"]')
    if at == "start":
        starts = tmp_path / "starts"
        starts.write_text("#!/bin/sh\nexec sleep 600\n")
        starts.chmod(0o755)
        monkeypatch.setattr("sys.executable", str(starts))
    if at == "library":
        monkeypatch.setattr(Compiler, "matcher", lambda *_: inside.set() or may_end.wait(600))
    made = Grammars(str(folder), VOCAB, [EOS])
    made.want(constraint, b"")
    trial = made._trial
    if at == "library":
        assert inside.wait(60)

    def stands() -> bool:
        it = trial._process
        return it is not None and (at != "trial" or bool(children(it.pid)))

    until_so(stands, 60)
    for child in children(trial._process.pid):
        with suppress(ProcessLookupError):  # that ended meanwhile
            os.kill(child, signal.SIGSTOP)
    began = monotonic()
    made.close(began + 0.1)
    until_so(lambda: not children(trial._process.pid), 20)
    assert trial._process.returncode is not None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made.news)
    other = os.eventfd(0, os.EFD_NONBLOCK)
    next_one = os.dup2(other, made.news)  # the same number, for something else
    may_end.set()
    for thread in made._threads:
        thread.join()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(next_one)
    for end in {other, next_one}:
        os.close(end)


def children(group: int) -> list[int]:
    """Processes of the group but its first."""
    found = []
    for one in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            state, _, its_group = one.read_text().rsplit(")", 1)[1].split()[:3]
            if its_group == str(group) and one.parent.name != its_group and state != "Z":
                found.append(int(one.parent.name))
    return found
