"""`penstock up --address`: how long it stays, and what ends it. The stack itself is another's."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from services.cli.commands import up
from services.cli.main import main
from services.cli.running import Running
from services.cli.stack import stack
from tests.support.transport import SECRET


class Stack:
    """Says when it is looked after, and whether it was left."""

    logs = None
    metrics_url = "http://h:3"
    admin_url = "http://h:4"

    def __init__(self, tend: Callable[[], bool]) -> None:
        self._tend = tend
        self.tended = 0
        self.detached = self.left = False

    def __enter__(self) -> Running:
        return Running("http://h:1", "h:2", "redis://h", "n", "psk", 1)

    def __exit__(self, *_: object) -> None:
        self.left = True

    def told_key(self, running: Running) -> str:
        return running.key

    def detach(self) -> None:
        self.detached = True

    def tend(self) -> bool:
        self.tended += 1
        assert self.tended < 100, "it does not hear that it is to stop"
        return self._tend()


@pytest.fixture(autouse=True)
def setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(up, "_TEND_EVERY_S", 0.01)
    for name, value in (("REDIS_URL", "redis://h:1"), ("QDRANT_URL", "http://h:2")):
        monkeypatch.setenv(f"PENSTOCK_{name}", value)
    monkeypatch.setenv("PENSTOCK_INTERNAL_SECRET", SECRET)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(monkeypatch: pytest.MonkeyPatch, tend: Callable[[], bool], *more: str) -> tuple[Stack, int]:
    made: list[Stack] = []

    def make(_settings: Any, ground: Any, **_: Any) -> Stack:
        assert ground._address == "ray.example:6379"
        made.append(Stack(tend))
        return made[0]

    monkeypatch.setattr(stack, "Stack", make)
    code = main(["up", "--address", "ray.example:6379", *more])
    return made[0], code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_looks_after_the_stack_until_it_is_asked_to_end(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = iter((False, False, True))

    def tend() -> bool:
        with suppress(StopIteration):
            if next(looks):
                os.kill(os.getpid(), number)
        return True

    there, code = run(monkeypatch, tend)
    assert (code, there.left, there.detached) == (0, True, False)
    assert there.tended >= 3
    said = capsys.readouterr()
    assert "http://h:1/v1" in said.out
    assert "Ctrl-C takes it down" in said.out
    assert "draining" in said.err


def test_it_ends_with_what_it_looks_after(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there, code = run(monkeypatch, lambda: False)
    assert (code, there.left, there.tended) == (0, True, 1)
    assert "draining" not in capsys.readouterr().err, "that is another's to do"


def test_what_is_detached_is_not_looked_after(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there, code = run(monkeypatch, lambda: False, "--detach")
    assert (code, there.detached, there.tended) == (0, True, 0)
    assert "`penstock down` takes it down" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_twice_it_leaves_at_once_what_does_not_end(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Serve's controller may hang, and its answers are waited for without a bound."""

    def asked() -> bool:
        os.kill(os.getpid(), number)
        return True

    def ends(_: Stack, *__: object) -> None:
        os.kill(os.getpid(), number)
        pytest.fail("it waits")

    def exits(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(Stack, "__exit__", ends)
    monkeypatch.setattr(up, "os", SimpleNamespace(_exit=exits))
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, asked)
    assert ended.value.code == 1
    assert "`penstock down` takes down what still runs" in capsys.readouterr().err


def test_a_line_that_cannot_be_written_ends_no_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said when Redis is started again, on a disk that is full, it took the stack down."""
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(up.sys, "stderr", full)
        up.report("redis ended: starting it again")
        monkeypatch.undo()
        with suppress(OSError):
            full.close()
