"""What all services share: the metrics port, stages, bounded names."""

import asyncio
import errno
import json
import socket
import struct
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, generate_latest

from services.common.telemetry import metrics_server
from services.common.telemetry.metrics import BoundedNames, from_zero
from services.common.telemetry.metrics_server import MetricsServer, Page
from services.common.telemetry.telemetry import Telemetry
from tests.support.waiting import until


async def asked(
    port: int, path: str, method: str = "GET", host: str = "127.0.0.1"
) -> tuple[int, str, str]:
    """Status, content type and body."""

    def ask() -> tuple[int, str, str]:
        request = urllib.request.Request(f"http://{host}:{port}{path}", method=method)
        try:
            with urllib.request.urlopen(request, timeout=10) as page:
                return page.status, page.headers["content-type"], page.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.headers["content-type"], error.read().decode()

    return await asyncio.to_thread(ask)


async def serving(**pages: Page) -> tuple[MetricsServer, int]:
    made = {f"/{name}": page for name, page in pages.items()}
    server = MetricsServer(made, asyncio.get_running_loop())
    return server, server.start("127.0.0.1", 0)


async def test_metrics_and_pages_have_their_paths_and_nothing_else_has_one() -> None:
    loop = asyncio.get_running_loop()

    async def targets() -> Any:
        assert asyncio.get_running_loop() is loop
        return [{"targets": ["a:1"]}]

    async def broken() -> Any:
        raise RuntimeError("of the inside")

    server, port = await serving(targets=targets, broken=broken)
    try:
        status, kind, body = await asked(port, "/metrics")
        assert (status, kind.partition(";")[0]) == (200, "text/plain")
        assert "python_info" in body
        status, kind, body = await asked(port, "/targets")
        assert (status, kind) == (200, "application/json")
        assert json.loads(body) == [{"targets": ["a:1"]}]
        status, _, body = await asked(port, "/broken")
        assert status == 503
        assert "inside" not in body
        for path in ("/", "/metrics/", "/favicon.ico"):
            status, _, body = await asked(port, path)
            assert (status, body) == (404, "there is /metrics, /targets, /broken\n")
        for method in ("POST", "PUT", "HEAD"):
            for path in ("/metrics", "/targets"):
                assert (await asked(port, path, method))[0] == 405
    finally:
        await asyncio.to_thread(server.close)
    with pytest.raises(urllib.error.URLError):
        await asked(port, "/metrics")


async def test_a_loop_that_hangs_holds_no_scrape_up() -> None:
    """Just then the metrics are wanted."""
    server, port = await serving()
    try:
        scrape = asyncio.create_task(asked(port, "/metrics"))
        await asyncio.sleep(0)
        import concurrent.futures

        with concurrent.futures.ThreadPoolExecutor() as pool:

            def ask() -> int:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
                    return int(page.status)

            assert pool.submit(ask).result(10) == 200, "this thread, the loop's, waits meanwhile"
        await scrape
    finally:
        await asyncio.to_thread(server.close)


def test_a_taken_port_is_an_error() -> None:
    async def both() -> None:
        server, port = await serving()
        try:
            with pytest.raises(OSError, match="in use"):
                MetricsServer({}, asyncio.get_running_loop()).start("127.0.0.1", port)
        finally:
            await asyncio.to_thread(server.close)

    asyncio.run(both())


def silent(port: int, count: int) -> list[socket.socket]:
    """Connections of another address, that say nothing."""
    there = ("127.0.0.1", port)
    return [socket.create_connection(there, 10, ("127.0.0.2", 0)) for _ in range(count)]


async def test_silent_strangers_have_their_share_for_a_while_and_no_word(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whoever asks from elsewhere is answered, without waiting: whether a gateway lives, too."""
    monkeypatch.setattr(metrics_server._Handler, "timeout", 60.0)
    monkeypatch.setattr(metrics_server, "_CONNECTION_S", 60.0)
    server, port = await serving()
    strangers = silent(port, 40)
    try:
        for stranger in strangers[8:]:
            assert await asyncio.to_thread(stranger.recv, 1) == b"", "it has half of them already"
        strangers[0].sendall(b"GET /metrics HTTP/1.0\r\n")  # and never an end of it
        strangers[1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        strangers[1].close()
        for _ in range(20):
            assert (await asked(port, "/metrics"))[0] == 200
        assert server._server is not None
        since = server._server._since
        since.update({one: at - 61.0 for one, at in since.copy().items()})
        for stranger in strangers[2:8]:
            assert await asyncio.to_thread(stranger.recv, 1) == b"", "its time was up"
        await until(lambda: not server._server._places.taken)  # type: ignore[union-attr]
    finally:
        for stranger in strangers:
            stranger.close()
        await asyncio.to_thread(server.close)
    assert capfd.readouterr().err == ""


def test_it_keeps_no_process_that_ends_otherwise() -> None:
    """A start that fails behind it must not look like a replica that serves."""
    script = """
import asyncio
from services.common.telemetry.metrics_server import MetricsServer
async def fails():
    MetricsServer({}, asyncio.get_running_loop()).start("127.0.0.1", 0)
    raise RuntimeError("the model is missing")
asyncio.run(fails())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "the model is missing" in done.stderr


async def test_one_with_silent_connections_can_be_closed() -> None:
    before = threading.active_count()
    server, port = await serving()
    strangers = silent(port, 20)
    await until(lambda: threading.active_count() - before >= 8)
    await asyncio.wait_for(asyncio.to_thread(server.close), 5)
    for stranger in strangers:
        stranger.close()


async def test_a_page_that_is_late_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "_PAGE_S", 0.1)
    ended: list[BaseException] = []

    async def late() -> Any:
        try:
            await asyncio.sleep(60)
        except BaseException as end:
            ended.append(end)
            raise

    server, port = await serving(late=late)
    try:
        assert (await asked(port, "/late"))[0] == 503
        await until(lambda: len(ended) == 1)
    finally:
        await asyncio.to_thread(server.close)


async def test_it_listens_on_ipv6() -> None:
    server = MetricsServer({}, asyncio.get_running_loop())
    try:
        port = server.start("::1", 0)
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            pytest.skip("no IPv6 here")
        raise
    try:
        assert (await asked(port, "/metrics", host="[::1]"))[0] == 200
    finally:
        await asyncio.to_thread(server.close)


def test_every_span_is_timed_as_its_services_stage() -> None:
    def stage(service: str, name: str, what: str) -> float:
        labels = {"service": service, "stage": name}
        return REGISTRY.get_sample_value(f"penstock_stage_seconds_{what}", labels) or 0.0

    router, worker = Telemetry("router", "r1"), Telemetry("worker", "w1")
    before = [stage("router", "place", "count"), stage("worker", "queue", "sum")]
    of_another = stage("router", "queue", "count")
    with router.span("router") as span:
        with router.span("place", span):
            pass
        worker.past_span("queue", span, 10**9, 3 * 10**9)
    assert stage("router", "place", "count") == before[0] + 1
    assert stage("worker", "queue", "sum") == before[1] + 2.0
    assert stage("router", "queue", "count") == of_another


def test_names_past_the_bound_are_one() -> None:
    names = BoundedNames(2)
    assert [names.of(n) for n in ("a", "b", "c", "a", "d")] == ["a", "b", "other", "a", "other"]
    assert BoundedNames(0).of("a") == "other"


def test_known_values_are_shown_before_anything_happened() -> None:
    registry = CollectorRegistry()
    from_zero(Counter("lost_total", "x", ["why"], registry=registry), ("here", "there"))
    assert 'lost_total{why="there"} 0.0' in generate_latest(registry).decode()
