"""`penstock drain` on a real Redis, with hosts whose service does what a test says."""

import asyncio
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from services.cli.command_line import parser
from services.cli.commands import drain
from services.cli.main import main
from services.common.config import Settings
from services.common.discovery import Registration, Replica
from services.common.locks import callers
from services.common.redis import connect
from services.common.service import Host, Service
from tests.support.authority import Authority


class Busy(Service):
    """Runs something until it is told that it is over."""

    grpc_services = ()
    names: list[str]  # of all, in the order in which they began to drain

    async def start(self, server: grpc.aio.Server) -> None:
        self.over = asyncio.Event()

    async def drain(self, grace_s: float) -> None:
        self.names.append(self.name)
        await self.over.wait()


class Hosts:
    """In a loop of their own: a command runs one itself."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.began: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._hosts: list[Host] = []
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def start(self, service: str, bind_host: str = "127.0.0.1") -> Host:
        kind = type("Kind", (Busy,), {"name": service, "names": self.began})
        settings = self.settings.model_copy(update={"bind_host": bind_host})

        async def started() -> Host:
            host = Host(kind, settings)
            await host.start()
            return host

        host = asyncio.run_coroutine_threadsafe(started(), self._loop).result(30)
        self._hosts.append(host)
        return host

    def end_of_work(self, *hosts: Host) -> None:
        for host in hosts:
            self._loop.call_soon_threadsafe(host.service.over.set)  # type: ignore[attr-defined]

    def stop(self) -> None:
        self.end_of_work(*self._hosts)
        for host in self._hosts:
            asyncio.run_coroutine_threadsafe(host.stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()


@pytest.fixture
def hosts(redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.setenv("REDIS_URL", redis_url)
    monkeypatch.setenv("PENSTOCK_NAMESPACE", namespace)
    hosts = Hosts(Settings())
    yield hosts
    hosts.stop()


def test_all_of_this_host_drain_and_stay_up_until_they_are_stopped(
    hosts: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    router, gateway = hosts.start("router"), hosts.start("gateway")
    assert main(["drain"]) == 0
    said = capsys.readouterr().out
    for host in (router, gateway):
        assert host.replica is not None
        assert f"{host.id} at {host.replica.address}: drains\n" in said
    hosts.end_of_work(router, gateway)
    assert main(["drain", "--wait"]) == 0, "asked again, they are found"
    assert capsys.readouterr().out.count(": is drained\n") == 2
    assert sorted(hosts.began) == ["gateway", "router"], "they go on with the same"


def test_waiting_goes_from_the_door_to_the_workers(
    hosts: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    order = ["gateway", "tokenizer", "router", "worker"]
    running = {service: hosts.start(service) for service in reversed(order)}
    with ThreadPoolExecutor(1) as pool:
        drained = pool.submit(drain.main, parser().parse_args(["drain", "--wait"]))
        for number, service in enumerate(order, start=1):
            while len(hosts.began) < number:
                assert not drained.done()
            assert hosts.began == order[:number], "the next ones go on as long as it runs something"
            hosts.end_of_work(running[service])
        assert drained.result(30) == 0
    assert capsys.readouterr().out.count(": is drained\n") == len(order)


@pytest.mark.parametrize("node", ["::1", "[::1]"])
def test_an_address_of_ip_6_is_named_as_people_write_it(node: str) -> None:
    here, other = (Replica("worker", f"w{n}", f"[::{n}]:9", "h", 1) for n in (1, 2))
    named = parser().parse_args(["drain", "--node", node])
    assert drain._chosen([here, other], named) == [here]


def test_one_replica_or_those_at_one_address(
    hosts: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = hosts.start("router"), hosts.start("router")
    far = hosts.start("worker", bind_host="127.0.0.2")
    hosts.end_of_work(first, second, far)
    assert main(["drain", "--wait", "--replica", second.id]) == 0
    said = capsys.readouterr().out
    assert f"{second.id} at" in said
    assert first.id not in said
    assert main(["drain", "--wait", "--node", "127.0.0.2"]) == 0
    said = capsys.readouterr().out
    assert f"{far.id} at" in said
    assert first.id not in said
    assert hosts.began == ["router", "worker"]
    assert main(["status"]) == 0
    said = "".join(capsys.readouterr().out.split())
    assert f"{second.id}(drains)" in said
    assert f"{first.id}(drains)" not in said


async def listed(replica: Replica) -> None:
    redis = connect(Settings().redis_dsn)
    await Registration(redis, Settings().namespace, replica, 60)._once()
    await redis.aclose()


def test_nothing_here_is_drained_and_nothing_of_that_name_is_an_error(
    hosts: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drain", "--wait"]) == 1
    assert "nothing is drained" in capsys.readouterr().err, "nothing is registered anywhere"
    elsewhere = Replica("router", "router-1", "10.0.0.9:1", "another machine", 1)
    asyncio.run(listed(elsewhere))
    assert main(["drain", "--wait"]) == 0
    said = capsys.readouterr().out
    assert "no replica of Penstock is registered on this host; they are at 10.0.0.9" in said
    for wrong in (["--replica", "router-00000000"], ["--node", "127.0.0.3"]):
        assert main(["drain", *wrong]) == 1
        assert f"{wrong[1]} is registered" in capsys.readouterr().err
    with pytest.raises(SystemExit) as error:
        main(["drain", "--replica", "router-00000000", "--node", "127.0.0.3"])
    assert error.value.code == 2


def test_one_that_does_not_answer_is_an_error_and_the_others_drain(
    hosts: Hosts, capsys: pytest.CaptureFixture[str], redis_url: str, namespace: str
) -> None:
    from dataclasses import replace

    from services.common.discovery import Registration
    from services.common.redis import connect

    host = hosts.start("router")
    hosts.end_of_work(host)
    assert host.replica is not None
    lost = replace(host.replica, id="router-00000000", address="127.0.0.1:1")

    async def register() -> None:
        redis = connect(redis_url)
        await Registration(redis, namespace, lost, 60)._once()
        await redis.aclose()

    asyncio.run(register())
    assert main(["drain", "--wait"]) == 1
    out, err = capsys.readouterr()
    assert f"{host.id} at {host.replica.address}: is drained" in out
    assert "router-00000000 at 127.0.0.1:1 does not answer: UNAVAILABLE" in err


@pytest.fixture
def with_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = Authority().identities(tmp_path / "tls", "gateway", "router", "worker", "cli")
    monkeypatch.setenv("PENSTOCK_TLS_DIR", str(folder))
    return folder


def of_pod(folder: Path, monkeypatch: pytest.MonkeyPatch, *identities: str) -> None:
    """From now on commands run where there are these certificates alone."""
    pod = folder.parent / "-".join(identities)
    for identity in identities:
        shutil.copytree(folder / identity, pod / identity)
    monkeypatch.setenv("PENSTOCK_TLS_DIR", str(pod))


def test_a_pod_drains_what_runs_in_it_by_its_own_certificates(
    with_certificates: Path,
    hosts: Hosts,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router, worker = hosts.start("router"), hosts.start("worker")
    hosts.end_of_work(router, worker)
    of_pod(with_certificates, monkeypatch, "router", "worker")
    assert main(["drain", "--wait"]) == 0
    assert capsys.readouterr().out.count(": is drained\n") == 2


def test_a_pod_drains_no_other_service(
    with_certificates: Path,
    hosts: Hosts,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway, worker = hosts.start("gateway"), hosts.start("worker")
    hosts.end_of_work(gateway, worker)
    of_pod(with_certificates, monkeypatch, "worker")
    assert main(["drain", "--wait"]) == 1
    out, err = capsys.readouterr()
    assert f"{worker.id} at" in out, "its own all the same"
    assert gateway.id not in out
    assert f"{gateway.id} at" in err
    assert "is not drained: internal cli: [Errno 2]" in err, "whose certificate is missing"
    assert hosts.began == ["worker"]


def test_the_commands_own_certificate_drains_all(
    with_certificates: Path,
    hosts: Hosts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway, worker = hosts.start("gateway"), hosts.start("worker")
    hosts.end_of_work(gateway, worker)
    monkeypatch.setattr(callers, "is_here", lambda _: False)  # wherever they are
    of_pod(with_certificates, monkeypatch, "cli", "worker")
    assert main(["drain", "--wait"]) == 0
    assert sorted(hosts.began) == ["gateway", "worker"]
