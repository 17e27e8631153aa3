"""Strangers who connect to an inner port and say nothing, thousands of them, real sockets: they
have so many descriptors, are closed in time, and who is one of us is answered all the while."""

import asyncio
import contextlib
import os
import resource
import select
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common import grpc_options
from services.common.config import Settings
from services.common.grpc_options import HEALTH_CONNECTIONS
from services.common.open_files import allow_connections
from services.common.service import Host, Service
from services.common.transport import Transport
from tests.support.authority import Authority
from tests.support.waiting import until

_, FILES = resource.getrlimit(resource.RLIMIT_NOFILE)
STRANGERS = 5_000 if FILES == resource.RLIM_INFINITY else min(5_000, FILES // 2 - 1_000)
BOUND = 300
_LOOK_EVERY = 250
OWN_FILES = 100  # that a host may open meanwhile: links, Redis, event loops
HANDSHAKE_MS = 1_500
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])

asked = health_pb2.HealthCheckRequest()


class Quiet(Service):
    name = "worker"
    grpc_services = ()

    async def start(self, server: grpc.aio.Server) -> None: ...


class Strangers:
    """Open connections of this process; those that the other end has closed are told by `left`."""

    def __init__(self, port: int, first: bytes) -> None:
        self._port, self._first = port, first
        self._sockets: dict[int, socket.socket] = {}
        self._poll = select.poll()

    def come(self, number: int) -> int:
        """Returns how many files the other end, this process too, had open for them at most."""
        most, before = 0, open_files()
        for arrived in range(number):
            if arrived % _LOOK_EVERY == 0:
                most = max(most, open_files() - before - len(self._sockets))
            stranger = socket.socket()
            stranger.settimeout(10)
            self._sockets[stranger.fileno()] = stranger
            self._poll.register(stranger, select.POLLIN)
            with contextlib.suppress(OSError):  # closed already
                stranger.connect(("127.0.0.1", self._port))
                stranger.sendall(self._first)
        return most

    def left(self) -> int:
        """How many are held."""
        for number, _ in self._poll.poll(0):
            with contextlib.suppress(OSError):
                if self._sockets[number].recv(4096):
                    continue  # it was told something
            self._close(number)
        return len(self._sockets)

    def go(self) -> None:
        for number in list(self._sockets):
            self._close(number)

    def _close(self, number: int) -> None:
        self._poll.unregister(number)
        self._sockets.pop(number).close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_options, "_HANDSHAKE_MS", HANDSHAKE_MS)
    monkeypatch.setattr(grpc_options, "_IDLE_MS", HANDSHAKE_MS)


@pytest.fixture(params=["secret", "certificates"])
def settings(
    request: pytest.FixtureRequest, redis_url: str, namespace: str, tmp_path: Path
) -> Settings:
    with socket.create_server(("127.0.0.1", 0)) as free:
        health_port = free.getsockname()[1]
    tls = request.param == "certificates"
    return Settings(
        redis_url=redis_url,
        namespace=namespace,
        tls_dir=Authority().identities(tmp_path, "worker", "router") if tls else None,
        worker={"internal_connections": BOUND, "health_port": health_port},
    )


@contextlib.asynccontextmanager
async def hosted(settings: Settings) -> AsyncIterator[str]:
    host = Host(Quiet, settings)
    replica = await host.start()
    try:
        yield replica.address
    finally:
        await host.stop(grace_s=0)


@contextlib.contextmanager
def strangers(port: int, first: bytes = b"") -> Iterator[Strangers]:
    made = Strangers(port, first)
    try:
        yield made
    finally:
        made.go()


async def well(channel: grpc.aio.Channel) -> bool:
    """Asked as others ask: as long as it takes until there is a connection."""
    answer = await health_pb2_grpc.HealthStub(channel).Check(asked, timeout=60, wait_for_ready=True)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def test_thousands_of_silent_ones_hold_what_they_may_for_as_long_as_they_may(
    settings: Settings, short_times: None
) -> None:
    allow_connections(2 * STRANGERS)
    one_of_us = Transport.of(settings, "router")
    async with hosted(settings) as address, one_of_us.dial(address, "worker") as standing:
        assert await well(standing)
        before = open_files()
        with strangers(int(address.rpartition(":")[2])) as many:
            assert await asyncio.to_thread(many.come, STRANGERS) <= BOUND + OWN_FILES
            await until(lambda: many.left() <= BOUND, 30)
            assert await well(standing), "who was there before does not notice"
            fresh = [("grpc.use_local_subchannel_pool", 1)]
            async with one_of_us.dial(address, "worker", fresh) as later:
                assert await well(later), "who comes now is answered once they are closed"
            await until(lambda: many.left() == 0, 30)
            assert await well(standing)
        await until(lambda: open_files() - before <= OWN_FILES, 30)


@pytest.mark.parametrize("first", [PREFACE, PREFACE + SETTINGS], ids=["half", "whole"])
async def test_who_says_hello_and_no_more_is_closed_too(
    settings: Settings, short_times: None, first: bytes
) -> None:
    async with hosted(settings) as address:
        with strangers(int(address.rpartition(":")[2]), first) as few:
            await asyncio.to_thread(few.come, 20)
            await until(lambda: few.left() == 0, 30)


@pytest.mark.parametrize("settings", ["secret"], indirect=True)
async def test_a_health_port_has_a_bound_of_its_own(settings: Settings, short_times: None) -> None:
    port = settings.worker.health_port
    assert port is not None
    allow_connections(2 * STRANGERS)
    async with hosted(settings):
        with strangers(port) as many:
            most = await asyncio.to_thread(many.come, STRANGERS)
            assert most <= HEALTH_CONNECTIONS + OWN_FILES
            await until(lambda: many.left() <= HEALTH_CONNECTIONS, 30)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as probe:
                assert await well(probe)
            await until(lambda: many.left() == 0, 30)
