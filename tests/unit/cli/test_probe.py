"""`penstock probe`: what a container's health check hears of each service."""

import asyncio
import http.server
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio

from services.cli.commands import probe
from services.cli.main import main
from services.common.transport import health_server, listen


@contextmanager
def _door(status: int, body: bytes = b"") -> Iterator[int]:
    """A door whose /readyz answers so; anything else is 404."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/readyz" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def _probe(*arguments: str) -> int:
    return main(["probe", *arguments])


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_gateway_that_takes_requests_is_ready(
    host: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_GATEWAY__HOST", host)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # not for what is here
    with _door(200) as port:
        monkeypatch.setenv("PENSTOCK_GATEWAY__PORT", str(port))
        assert _probe() == 0
    assert capsys.readouterr().out == "gateway: ready\n"


def test_a_gateway_that_lacks_something_says_what(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with _door(503, b"no tokenizer is linked") as port:
        monkeypatch.setenv("PENSTOCK_GATEWAY__PORT", str(port))
        assert _probe("gateway") == 1
    assert capsys.readouterr().err == "gateway: HTTP 503 no tokenizer is linked\n"


def test_a_gateway_that_is_not_there_fails_its_probe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with _door(200) as port:
        pass
    monkeypatch.setenv("PENSTOCK_GATEWAY__PORT", str(port))
    assert _probe() == 1
    assert f"127.0.0.1:{port}/readyz" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [
        (health_pb2.HealthCheckResponse.SERVING, 0, "router: ready\n"),
        (health_pb2.HealthCheckResponse.NOT_SERVING, 1, "router: NOT_SERVING\n"),
    ],
)
async def test_a_service_behind_the_door_is_asked_at_its_health_port(
    status: int,
    code: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    health = health_aio.HealthServicer()
    await health.set("", status)
    server = health_server(health)
    port = listen(server, "127.0.0.1", 0)
    await server.start()
    monkeypatch.setenv("PENSTOCK_ROUTER__HEALTH_PORT", str(port))
    try:
        assert await asyncio.to_thread(_in_thread, "router") == code
    finally:
        await server.stop(None)
    said = capsys.readouterr()
    assert (said.out or said.err) == told


def _in_thread(service: str) -> int:
    """`main` sets a signal handler, which only the first thread may."""
    return probe.main(Namespace(service=service))


def test_a_service_without_a_health_port_cannot_be_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _probe("worker") == 1
    assert "PENSTOCK_WORKER__HEALTH_PORT is not set" in capsys.readouterr().err


def test_a_door_on_any_free_port_cannot_be_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_GATEWAY__PORT", "0")
    assert _probe() == 1
    assert "PENSTOCK_GATEWAY__PORT is 0" in capsys.readouterr().err


async def test_a_service_that_is_not_there_fails_its_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = health_server(health_aio.HealthServicer())
    port = listen(server, "127.0.0.1", 0)
    await server.stop(None)
    monkeypatch.setenv("PENSTOCK_WORKER__HEALTH_PORT", str(port))
    monkeypatch.setattr(probe, "_TIMEOUT_S", 0.2)
    with pytest.raises(grpc.RpcError):
        await asyncio.to_thread(_in_thread, "worker")
