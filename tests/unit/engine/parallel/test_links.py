"""Links to ranks on other hosts: whose they are is proved both ways; a stranger gets nothing."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.common.locks.certificates import dns_name
from services.worker.engine.parallel import links
from services.worker.engine.parallel.links import Connection, Refused, accept, dial, listen
from services.worker.engine.parallel.seats import Lock
from services.worker.engine.process import wire
from services.worker.engine.process.channel import Channel, Closed
from tests.support.authority import Authority

HOST = "127.0.0.3"
OWN = "127.0.0.2"
"""Who dials."""
LOCK = Lock(b"s" * 32)
OTHER = Lock(b"t" * 32)


class Door:
    """Waits for the engine in a thread."""

    def __init__(self, lock: Lock, within_s: float) -> None:
        self.listener = listen(HOST)
        self.found: list[Any] = []
        self._thread = threading.Thread(target=self._wait, args=(lock, within_s))
        self._thread.start()

    def _wait(self, lock: Lock, within_s: float) -> None:
        try:
            self.found.append(accept(self.listener, lock, b"life", within_s, OWN))
        except TimeoutError as error:
            self.found.append(error)

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def end(self) -> Any:
        """Whom it has let in."""
        self._thread.join(20)
        self.listener.close()
        (found,) = self.found
        return found


@contextmanager
def met(lock: Lock) -> Iterator[tuple[Connection, Connection]]:
    door = Door(lock, 10)
    own = dial(HOST, door.port, lock, b"life", 10, OWN)
    their = door.end()
    yield own, their
    own.close()
    their.close()


@pytest.fixture(params=["without TLS", "with TLS"])
def lock(request: pytest.FixtureRequest, tmp_path: Path) -> Lock:
    if request.param == "without TLS":
        return LOCK
    folder = Authority().issue(tmp_path / "worker", dns_name("worker"))
    return Lock(LOCK.secret, str(folder), dns_name("worker"))


def test_who_knows_the_secret_is_let_in_and_frames_pass(lock: Lock) -> None:
    """Large ones, too, both ways, to the byte."""
    large = np.random.default_rng(0).integers(0, 256, 3_000_000, np.uint8)
    with met(lock) as (own, their):
        ends = Channel(own), Channel(their)
        for near, far in (ends, ends[::-1]):
            sending = threading.Thread(target=near.send, args=(("write", [1, 2], large),))
            sending.start()
            operation, blocks, data = far.receive()
            sending.join()
            assert (operation, blocks) == ("write", [1, 2])
            assert np.array_equal(data, large)
            assert far.take() is None


def silent(raw: socket.socket) -> None: ...


def torn(raw: socket.socket) -> None:
    raw.sendall(b"x" * 10)
    raw.close()


def guesses(raw: socket.socket) -> None:
    raw.sendall(os.urandom(32) + b"life" + os.urandom(32))


def unpickles(raw: socket.socket) -> None:
    raw.sendall(b"".join(wire.encode(("launch", "it"))) * 20)


@pytest.mark.parametrize("stranger", [silent, torn, guesses, unpickles])
def test_strangers_get_nothing_and_keep_nobody_out(
    lock: Lock, stranger: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them at once than are looked at."""
    monkeypatch.setattr(links, "SHAKEN_WITHIN_S", 0.3)
    door = Door(lock, 20)
    strangers = []
    for _ in range(links._AT_ONCE + 4):
        strangers.append(socket.create_connection((HOST, door.port), source_address=(OWN, 0)))
        stranger(strangers[-1])
    own = dial(HOST, door.port, lock, b"life", 20, OWN)
    their = door.end()
    own.sendall(b"it")
    told = memoryview(bytearray(2))
    assert Channel(their)._readable(5)
    assert (their.recv_into(told), bytes(told)) == (2, b"it")
    for raw in strangers:
        if raw.fileno() < 0:
            continue
        raw.settimeout(10)
        heard = b""
        try:
            while piece := raw.recv(100):
                heard += piece
        except ConnectionResetError:
            pass
        assert len(heard) <= 32, "a number at random, or TLS's refusal"
        raw.close()
    own.close()
    their.close()


def test_who_comes_from_another_address_takes_no_place(lock: Lock) -> None:
    """More of them than there are places, silent; none is told as much as a number."""
    door = Door(lock, 60)
    elsewhere = [
        socket.create_connection((HOST, door.port), 20, ("127.0.0.9", 0))
        for _ in range(links._AT_ONCE + 4)
    ]
    for raw in elsewhere:
        with suppress(ConnectionResetError):
            assert raw.recv(100) == b""
        raw.close()
    dial(HOST, door.port, lock, b"life", 20, OWN).close()
    door.end().close()


@pytest.mark.parametrize(
    ("other", "purpose"), [(OTHER, b"life"), (LOCK, b"rank")], ids=["secret", "purpose"]
)
def test_another_secret_or_purpose_is_refused(other: Lock, purpose: Any) -> None:
    door = Door(LOCK, 0.5)
    with pytest.raises((Refused, OSError)):
        dial(HOST, door.port, other, purpose, 5, OWN)
    assert isinstance(door.end(), TimeoutError)


def test_who_listens_proves_it_too() -> None:
    """One that lets in anybody is told nothing but a proof that is of no use."""
    with listen(HOST) as listener:

        def let_in() -> None:
            raw, _ = listener.accept()
            raw.sendall(b"n" * 32)
            while raw.recv(100) == b"":
                pass
            raw.sendall(b"p" * 32)
            raw.close()

        thread = threading.Thread(target=let_in)
        thread.start()
        with pytest.raises(Refused, match="does not know the secret"):
            dial(HOST, listener.getsockname()[1], LOCK, b"life", 5, OWN)
        thread.join()


def test_certificates_say_whose_an_end_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has the secret, and another service's certificate, or another authority's, or none."""
    monkeypatch.setattr(links, "SHAKEN_WITHIN_S", 0.4)
    authority, name = Authority(), dns_name("worker")
    worker = authority.issue(tmp_path / "worker", name)
    router = authority.issue(tmp_path / "router", dns_name("router"))
    forged = Authority().issue(tmp_path / "forged", name, authorities=authority.pem)
    good = Lock(LOCK.secret, str(worker), name)
    for bad in (LOCK, Lock(LOCK.secret, str(router), name), Lock(LOCK.secret, str(forged), name)):
        door = Door(good, 0.7)
        with pytest.raises((Refused, OSError)):
            dial(HOST, door.port, bad, b"life", 5, OWN)
        assert isinstance(door.end(), TimeoutError), "who dials"
        if bad is LOCK:
            continue
        door = Door(bad, 0.7)
        with pytest.raises((Refused, OSError)):
            dial(HOST, door.port, good, b"life", 5, OWN)
        assert isinstance(door.end(), TimeoutError), "who listens"


@contextmanager
def met_through_another() -> Iterator[tuple[Channel, socket.socket, socket.socket, Channel]]:
    """Who dials, both ends of one on the way who has passed the handshake on, and who listens."""
    door = Door(LOCK, 20)
    far = socket.create_connection((HOST, door.port), 20, (OWN, 0))
    with listen(HOST) as listener, far:

        def passes_on() -> None:
            near, _ = listener.accept()
            near.sendall(far.recv(32, socket.MSG_WAITALL))
            far.sendall(near.recv(32 + 4 + 32, socket.MSG_WAITALL))
            near.sendall(far.recv(32, socket.MSG_WAITALL))
            found.append(near)

        found: list[socket.socket] = []
        thread = threading.Thread(target=passes_on)
        thread.start()
        own = dial(HOST, listener.getsockname()[1], LOCK, b"life", 20, OWN)
        their = door.end()
        thread.join()
        with found[0] as near:
            yield Channel(own), near, far, Channel(their)
        own.close()
        their.close()


@pytest.mark.parametrize("does", ["makes up", "alters", "says twice", "leaves out", "sends back"])
def test_nothing_is_read_of_one_on_the_way(does: str) -> None:
    """Without TLS, behind a handshake that was right: frames are pickles."""
    with met_through_another() as (own, near, far, their):
        made_up = b"".join(wire.encode("made up")) * 20
        told = []
        for words in ("first", "second"):
            own.send(words)
            told.append(near.recv(1000))
        if does == "makes up":
            far.sendall(made_up)
            near.sendall(made_up)
        elif does == "alters":
            far.sendall(told[0].replace(b"first", b"worst"))
        elif does == "says twice":
            far.sendall(told[0] * 2)
            assert their.receive() == "first"
        elif does == "leaves out":
            far.sendall(told[1])
        else:
            near.sendall(told[0])
        for channel in {"makes up": [own, their], "sends back": [own]}.get(does, [their]):
            with pytest.raises(Closed):
                channel.receive()


def test_a_torn_frame_is_an_end(lock: Lock) -> None:
    with met(lock) as (own, their):
        whole = b"".join(wire.encode(("collect", list(range(1000)))))
        own.sendall(whole[:100])
        channel = Channel(their)
        assert channel.take() is None
        own.close()
        with pytest.raises(Closed):
            channel.receive()
