"""What is asked of a Ray cluster before its token goes there, with servers in its place."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import ray
from ray import serve

from services.cli.ground import cluster as cluster_ground
from services.cli.ground.cluster import ClusterGround
from services.cli.ground.joined_ray import JoinedRay
from services.common.config import GatewaySettings, Settings
from tests.support.authority import Authority

_TLS = ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY")


class Locked(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Refuses everybody who shows no token; knows no method."""

    def service(self, call: Any) -> Any:
        def refuse(_: bytes, context: grpc.ServicerContext) -> bytes:
            if "authorization" not in dict(call.invocation_metadata):
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")
            return b""

        return grpc.unary_unary_rpc_method_handler(refuse)


def server(*handlers: Locked, tls: grpc.ServerCredentials | None = None) -> tuple[Any, str]:
    made = grpc.server(ThreadPoolExecutor(1), handlers=handlers)
    where = "127.0.0.2:0"  # 127.0.0.1 Ray takes for an address that others reach
    port = made.add_secure_port(where, tls) if tls else made.add_insecure_port(where)
    made.start()
    return made, f"127.0.0.2:{port}"


@pytest.fixture
def joins(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that Ray went to, which would have shown its token there."""
    found: list[str] = []

    def init(address: str, **_: object) -> None:
        found.append(address)
        raise ConnectionError("no Ray here")

    monkeypatch.setattr(ray, "init", init)
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_USAGE_STATS_ENABLED", "RAY_USE_TLS", *_TLS)
    for name in (*names, "RAY_COLOR_PREFIX"):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("RAY_COLOR_PREFIX")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("RAY_USE_TLS", "0")
    return found


SETTINGS = Settings(ray_token="a token")


@pytest.mark.parametrize("given", ["address", "auto"])
def test_no_token_goes_to_a_cluster_that_asks_nobody_for_one(
    joins: list[str], given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, address = server()
    monkeypatch.setenv("RAY_ADDRESS", address if given == "auto" else "")
    with pytest.raises(RuntimeError, match=f"{address} asks nobody for a token"):
        JoinedRay("auto" if given == "auto" else address, SETTINGS).start()
    made.stop(None)
    assert not joins


@pytest.mark.parametrize("given", ["address", "auto"])
def test_one_that_asks_is_joined(
    joins: list[str], given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, address = server(Locked())
    monkeypatch.setenv("RAY_ADDRESS", address if given == "auto" else "")
    with pytest.raises(RuntimeError, match="no Ray here"):
        JoinedRay("auto" if given == "auto" else address, SETTINGS).start()
    made.stop(None)
    assert joins == [address]
    assert os.environ["RAY_AUTH_TOKEN"] == "a token"
    assert os.environ["RAY_COLOR_PREFIX"] == "0"


def test_auto_without_a_cluster_is_told(joins: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: str) -> str:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr("ray._private.services.canonicalize_bootstrap_address", none)
    with pytest.raises(RuntimeError, match="--address auto: Could not find any"):
        JoinedRay("auto", SETTINGS).start()


def test_ray_s_own_tls_is_used(
    joins: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority()
    own = authority.issue(tmp_path / "own", address="127.0.0.2")
    pems = [(own / name).read_bytes() for name in ("tls.key", "tls.crt")]
    tls = grpc.ssl_server_credentials([tuple(pems)], authority.pem, require_client_auth=True)
    made, address = server(Locked(), tls=tls)
    with pytest.raises(RuntimeError, match=r"(?s)does not answer.*Is RAY_USE_TLS set here"):
        JoinedRay(address, SETTINGS).start()

    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.delenv("RAY_TLS_CA_CERT")
    with pytest.raises(RuntimeError, match="RAY_USE_TLS is set and needs RAY_TLS_CA_CERT"):
        JoinedRay(address, SETTINGS).start()
    for name, file in zip(_TLS, ("ca.crt", "tls.crt", "none.key"), strict=True):
        monkeypatch.setenv(name, str(own / file))
    with pytest.raises(RuntimeError, match=r"none\.key"):
        JoinedRay(address, SETTINGS).start()
    assert not joins
    monkeypatch.setenv("RAY_TLS_SERVER_KEY", str(own / "tls.key"))
    with pytest.raises(RuntimeError, match="no Ray here"):
        JoinedRay(address, SETTINGS).start()
    made.stop(None)
    assert joins == [address]


class Joined:
    """Ray after it was joined."""

    exceptions = ray.exceptions

    def __init__(self) -> None:
        self.left: list[str] = []

    def shutdown(self) -> None:
        self.left.append("ray")


@pytest.mark.parametrize(
    ("answer", "runs", "left"),
    [
        (["mine", "other"], True, ["ray"]),
        (["other"], False, ["ray"]),
        ([], False, ["serve", "ray"]),
        (ray.exceptions.ActorDiedError(), False, ["ray"]),  # Serve was shut down
        (ray.exceptions.ActorUnavailableError("it restarts", b"1" * 16), True, ["ray"]),
        (ray.exceptions.GetTimeoutError(), True, ["ray"]),
    ],
)
def test_what_serve_runs_no_more_is_told_from_what_cannot_be_asked(
    answer: Any, runs: bool, left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    joined, cluster = Joined(), JoinedRay("auto", SETTINGS)
    cluster._ray = joined

    def status() -> SimpleNamespace:
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(applications=dict.fromkeys(answer))

    monkeypatch.setattr(serve, "status", status)
    monkeypatch.setattr(serve, "shutdown", lambda: joined.left.append("serve"))
    assert cluster.runs("mine") is runs
    cluster.stop()
    assert joined.left == left


def test_while_serve_does_not_answer_its_ground_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the signals that ask to end are heard."""
    answers, asked = threading.Event(), threading.Event()
    monkeypatch.setattr(cluster_ground, "_LOOK_EVERY_S", 0.0)
    ground = ClusterGround("auto", print)

    def runs(_: str) -> bool:
        asked.set()
        assert answers.wait(10)
        return False

    monkeypatch.setattr(ClusterGround, "_joined", SimpleNamespace(runs=runs))
    assert ground.tend()
    assert asked.wait(10)
    assert ground.tend(), "not known yet"
    answers.set()
    ground._looks.shutdown()
    assert not ground.tend()


@pytest.mark.parametrize(
    ("address", "tls", "told"),
    [
        ("10.0.0.1:6379", "0", True),
        ("ray.example:6379", "", True),
        ("auto", "0", True),
        ("10.0.0.1:6379", "1", False),
        ("10.0.0.1:6379", "true", False),
        ("127.0.0.2:6379", "0", False),
        ("[::1]:6379", "0", False),
        ("localhost:6379", "0", False),
    ],
)
def test_what_travels_in_the_clear_is_told(
    address: str, tls: str, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_USE_TLS", tls)
    said: list[str] = []
    settings = Settings.model_validate(
        {
            "PENSTOCK_REDIS_URL": "redis://10.0.0.9:6379/0",
            "PENSTOCK_QDRANT_URL": "http://10.0.0.9:6333",
            "internal_secret": "of an install, long enough",
        }
    )
    ClusterGround(address, said.append).checked(settings)
    assert [line for line in said if "no TLS between Ray's nodes" in line] == said[2:]
    assert (len(said) == 3) is told
    assert "PENSTOCK_GATEWAY__TLS_CERT" in said[0]
    assert "PENSTOCK_TLS_DIR" in said[1]
    said.clear()
    door = GatewaySettings(tls_cert=Path("/d/tls.crt"), tls_key=Path("/d/tls.key"))
    locked = settings.model_copy(update={"tls_dir": Path("/t"), "gateway": door})
    ClusterGround(address, said.append).checked(locked)
    assert len(said) == told
