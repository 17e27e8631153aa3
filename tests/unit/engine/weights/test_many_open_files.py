"""Where a worker has more than 1,024 files open: its engine gets sockets of such numbers."""

import fcntl
import os
import resource
import socket
import threading
from collections.abc import Iterator

import pytest

from services.worker.engine.grammar import grammars
from services.worker.engine.grammar.grammars import Grammars
from services.worker.engine.process import loop as process
from services.worker.engine.process import wire

PAST = 1100


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= PAST + 1:
        pytest.skip("so many are not allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, PAST + 100), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def moved(descriptor: int) -> int:
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, PAST)
    os.close(descriptor)
    return high


def test_a_channel_waits_for_messages_and_for_their_rest() -> None:
    low, parent = socket.socketpair()
    whole = b"".join(wire.encode("one"))
    with socket.socket(fileno=moved(low.detach())) as high, parent:
        channel = process.Channel(high)
        late = threading.Timer(0.05, parent.sendall, [whole])
        late.start()
        assert channel.receive() == "one"
        parent.sendall(whole[:-1])
        assert channel.take() is None
        assert not channel.more(0)
        parent.sendall(whole[-1:])
        assert channel.more(60)
        late.join()


def test_grammars_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.eventfd
    monkeypatch.setattr(grammars.os, "eventfd", lambda *asked: moved(real(*asked)))
    made = Grammars("/", 100, [])
    assert made.news >= PAST
    os.eventfd_write(made.news, 1)
    made.wait(60)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(made.news)
    made.close(0.0)


def test_grammars_leave_no_file_open_that_are_closed_or_forgotten() -> None:
    closed, forgotten = Grammars("/", 100, []), Grammars("/", 100, [])
    files = [closed.news, forgotten.news]
    for _ in range(2):
        closed.close(0.0)
        assert not os.path.exists(f"/proc/self/fd/{files[0]}")
    del forgotten
    assert not os.path.exists(f"/proc/self/fd/{files[1]}")
