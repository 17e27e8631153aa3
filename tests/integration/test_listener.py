"""Where clients connect: what an accept does to the loop, to the connection, and when it fails."""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from services.gateway.connections import listener as module
from services.gateway.connections.listener import Listener
from tests.support.waiting import leaving_no_task, until


class Failing:
    """A socket whose accepts fail as long as there are failures."""

    def __init__(self, own: socket.socket, *failures: OSError) -> None:
        self.own = own
        self.failures = list(failures)
        self.accepts = 0

    def accept(self) -> Any:
        self.accepts += 1
        if self.failures:
            raise self.failures.pop(0)
        return self.own.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


class Taken(list[tuple[socket.socket, str]]):
    def take(self, connection: socket.socket, peer: str) -> None:
        self.append((connection, peer))


@asynccontextmanager
async def listening(taken: Taken, *failures: OSError) -> AsyncIterator[tuple[Listener, Failing]]:
    listener = Listener("127.0.0.1", 0, taken.take)
    listener._socket = failing = Failing(listener._socket, *failures)  # type: ignore[assignment]
    async with leaving_no_task():
        listener.start()
        yield listener, failing
        listener.stop()
    assert not listener.listens
    for connection, _ in taken:
        connection.close()


def connect(listener: Listener) -> socket.socket:
    return socket.create_connection(("127.0.0.1", listener.port), 10)


async def test_an_accept_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many files may be open just then. The system tells of the connection all the time."""
    monkeypatch.setattr(module, "_PAUSE_S", 0.5)
    taken = Taken()
    full = OSError(errno.EMFILE, "Too many open files")
    async with listening(taken, full) as (listener, failing):
        with connect(listener) as one:
            await until(lambda: failing.accepts == 1)
            for _ in range(20):
                await asyncio.sleep(0)
            assert failing.accepts == 1, "not at once again"
            await until(lambda: len(taken) == 1)
            connection, peer = taken[0]
            assert (connection.getpeername(), peer) == (one.getsockname(), "127.0.0.1")


async def test_one_that_ends_while_nothing_can_be_accepted_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_PAUSE_S", 0.01)
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
    full = OSError(errno.EMFILE, "Too many open files")
    async with listening(Taken(), full) as (listener, failing):
        with connect(listener):
            while not failing.accepts:  # noqa: ASYNC110
                await asyncio.sleep(0)
            listener.stop()
            await asyncio.sleep(5 * module._PAUSE_S)
    assert (failing.accepts, faults) == (1, [])


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOBUFS, errno.EAGAIN])
async def test_it_closes_whatever_the_system_says_to_the_last_look(code: int) -> None:
    async with listening(Taken(), OSError(code, "not now")) as (listener, failing):
        listener.close()
        assert failing.accepts == 1
        assert not listener.listens
        listener.close()  # again


async def test_many_who_come_at_once_do_not_hold_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", 2)
    taken = Taken()
    had: list[int] = []
    async with listening(taken) as (listener, _):
        clients = [connect(listener) for _ in range(9)]
        while len(taken) < len(clients):
            await asyncio.sleep(0)
            had.append(len(taken))
        for client in clients:
            client.close()
    assert max(after - before for before, after in zip([0, *had], had, strict=False)) == 2


async def test_who_has_come_by_the_close_is_taken_in() -> None:
    taken = Taken()
    async with listening(taken) as (listener, _):
        clients = [connect(listener) for _ in range(module._AT_ONCE + 5)]
        listener.close()
        assert len(taken) == len(clients)
        assert not any(connection.getblocking() for connection, _ in taken)
        for client in clients:
            client.close()


async def test_no_event_waits_for_the_acknowledgement_of_another() -> None:
    delays: list[int] = []

    class Accepted(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            accepted = transport.get_extra_info("socket")
            delays.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    taken = Taken()
    async with listening(taken) as (listener, _):
        with connect(listener):
            await until(lambda: len(taken) == 1)
            loop = asyncio.get_running_loop()
            transport, _ = await loop.connect_accepted_socket(Accepted, taken[0][0])
            transport.close()
    assert delays[0] != 0


async def test_a_taken_port_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(OSError, match="in use"):
        Listener("127.0.0.1", other.getsockname()[1], Taken().take)
