"""`penstock up --address`, as far as it can be told without Ray: what is refused before anything
is deployed, and what the replicas are told."""

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from services import app
from services.app import build
from services.cli.ground import cluster as cluster_ground
from services.cli.ground import joined_ray, reached
from services.cli.main import main
from services.common.config import GatewaySettings, ModelSpec, RayOptions, Settings
from services.common.service import Host
from services.common.transport import listen, refuses_strangers
from services.placing import on_nodes
from services.router.server import RouterService
from tests.support.transport import SECRET, TRANSPORT

GIVEN = {
    "PENSTOCK_REDIS_URL": "redis://redis.example:6379/0",
    "PENSTOCK_QDRANT_URL": "http://qdrant.example:6333",
    "PENSTOCK_INTERNAL_SECRET": SECRET,
}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.delenv("REDIS_URL", raising=False)
    for name, value in GIVEN.items():
        monkeypatch.setenv(name, value)
    return GIVEN


@pytest.mark.parametrize("missing", list(GIVEN))
def test_what_hosts_share_has_to_be_given(
    missing: str,
    given: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv(missing)
    assert main(["up", "--address", "127.0.0.1:1"]) == 1
    assert f"--address needs {missing}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("PENSTOCK_REDIS_URL", "unix:///run/redis?db=0", "do not reach a socket"),
        ("PENSTOCK_REDIS_URL", "redis://127.0.0.1:1/0", "Redis at redis://127.0.0.1:1/0"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_deployed(
    name: str,
    value: str,
    told: str,
    given: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path))
    monkeypatch.setenv(name, value)
    assert main(["up", "--address", "127.0.0.1:1"]) == 1
    assert told in capsys.readouterr().err


def test_a_qdrant_that_is_away_is_told_before_anything_is_deployed(
    given: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("PENSTOCK_QDRANT_URL", "http://127.0.0.1:1")

    async def answers(settings: Settings) -> None:
        return None

    monkeypatch.setattr(cluster_ground, "check_redis", answers)
    assert main(["up", "--address", "127.0.0.1:1"]) == 1
    assert "Qdrant at http://127.0.0.1:1: " in capsys.readouterr().err


def test_detach_is_of_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--detach"]) == 1
    assert "--detach goes with --address" in capsys.readouterr().err


@pytest.fixture
def qdrant() -> Iterator[str]:
    """Asks for a key."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            knows = self.headers.get("api-key") == "key" and self.path == "/collections"
            self.send_response(200 if knows else 401)
            self.end_headers()
            self.wfile.write(b"" if knows else b"Must provide an API key")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_qdrant_has_to_answer_and_to_know_the_key(qdrant: str) -> None:
    asyncio.run(reached.check_qdrant(Settings(qdrant_url=qdrant, qdrant_api_key="key")))
    for key in ("", "other"):
        with pytest.raises(RuntimeError, match="401 Must provide an API key"):
            asyncio.run(reached.check_qdrant(Settings(qdrant_url=qdrant, qdrant_api_key=key)))
    with pytest.raises(RuntimeError, match=r"Qdrant at http://127\.0\.0\.1:1: "):
        asyncio.run(reached.check_qdrant(Settings(qdrant_url="http://127.0.0.1:1")))


def test_replicas_listen_where_their_node_is_unless_told_otherwise() -> None:
    told = cluster_ground._on_nodes(Settings(ray_token="a token"))
    assert told.ray_token.get_secret_value() == "", "the replicas have no need of it"
    assert (told.bind_host, told.gateway.host) == ("auto", "auto")
    there = told.on_node("10.0.0.7")
    assert (there.bind_host, there.gateway.host, there.peer_host) == ("10.0.0.7",) * 3
    assert not there.reflects, "it is no loopback"
    own = Settings(bind_host="10.1.0.7", gateway=GatewaySettings(host="10.2.0.7"))
    there = cluster_ground._on_nodes(own).on_node("10.0.0.7")
    assert (there.bind_host, there.gateway.host) == ("10.1.0.7", "10.2.0.7")


@pytest.mark.usefixtures("given")
def test_models_are_left_to_the_hosts_of_their_workers_and_open_ways_are_told() -> None:
    """This host need not have their checkpoints."""
    said: list[str] = []
    models = [ModelSpec(name="there", path="/on/other/hosts"), ModelSpec(name="hub", path="a/b")]
    ground = cluster_ground.ClusterGround("ray.example:6379", said.append)
    assert ground.checked(Settings(models=models)).models == models
    assert ["PENSTOCK_GATEWAY__TLS_CERT" in line for line in said] == [True, False, False]
    assert ["PENSTOCK_TLS_DIR" in line for line in said] == [False, True, False]
    assert "RAY_USE_TLS" in said[2]
    said.clear()
    cluster_ground.ClusterGround("127.0.0.1:6379", said.append).checked(Settings(models=models))
    assert not any("RAY_USE_TLS" in line for line in said)


@pytest.mark.parametrize("own", [{"bind_host": "auto"}, {"gateway": GatewaySettings(host="auto")}])
def test_a_process_without_a_node_has_no_address_of_one(own: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="PENSTOCK_BIND_HOST=auto"):
        Host(RouterService, Settings(**own))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["PENSTOCK_REDIS_URL", "PENSTOCK_QDRANT_URL"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.9", "[::1]"])
def test_other_hosts_reach_no_loopback(name: str, host: str) -> None:
    urls = {"redis_url": "redis://10.0.0.1:1/0", "qdrant_url": "http://name.example:1"}
    cluster_ground._check_reached_from_elsewhere(Settings(**urls))  # type: ignore[arg-type]
    field = name.removeprefix("PENSTOCK_").lower()
    urls[field] = urls[field].replace("10.0.0.1", host).replace("name.example", host)
    with pytest.raises(RuntimeError, match=f"{name}: .* do not reach a loopback"):
        cluster_ground._check_reached_from_elsewhere(Settings(**urls))  # type: ignore[arg-type]


def test_an_address_without_a_cluster_is_told_at_once(tmp_path: Path) -> None:
    for address in ("here", "10.0.0.1", "10.0.0.1:", ":6379"):
        with pytest.raises(RuntimeError, match="it is HOST:PORT, or auto"):
            joined_ray._check_reached(address)
    with pytest.raises(RuntimeError, match=r"127\.0\.0\.1:1: no Ray cluster there"):
        joined_ray._check_reached("127.0.0.1:1")
    with socket.create_server(("127.0.0.1", 0)) as there:
        joined_ray._check_reached(f"127.0.0.1:{there.getsockname()[1]}")


def test_a_token_comes_from_its_file_or_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    file = tmp_path / "token"
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "before")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    joined_ray.JoinedRay("auto", Settings(ray_token="a token"))._take_token()
    assert (os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"]) == ("token", "a token")
    missing = joined_ray.JoinedRay("auto", Settings(ray_token_file=file))
    with pytest.raises(RuntimeError, match=f"PENSTOCK_RAY_TOKEN_FILE: there is no file {file}"):
        missing._take_token()
    file.write_text("another")
    missing._take_token()
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(file)
    assert "RAY_AUTH_TOKEN" not in os.environ, "it would go before the file"


async def test_a_server_that_asks_nobody_is_told_from_one_that_does() -> None:
    import grpc

    method = "/grpc.health.v1.Health/Watch"
    locked, open_to_all = TRANSPORT.server(), grpc.aio.server()
    ports = [listen(server, "127.0.0.1", 0) for server in (locked, open_to_all)]
    for server in (locked, open_to_all):
        await server.start()
    assert await refuses_strangers(f"127.0.0.1:{ports[0]}", method)
    assert not await refuses_strangers(f"127.0.0.1:{ports[1]}", method)
    for server in (locked, open_to_all):
        await server.stop(0)
    with pytest.raises(RuntimeError, match="does not answer"):
        await refuses_strangers(f"127.0.0.1:{ports[0]}", method)


@pytest.mark.parametrize(
    ("replicas", "nodes", "most"),
    [(2, 2, 1), (3, 2, 2), (1, 3, 1), (4, 2, 2), (2, 1, None), (300, 2, 100)],
)
def test_replicas_are_spread_over_the_nodes(replicas: int, nodes: int, most: int | None) -> None:
    assert on_nodes(replicas, RayOptions(), nodes)["max_replicas_per_node"] == most
    for asks in ({"num_gpus": 1}, {"num_cpus": 1}, {"resources": {"a": 1}}):
        taking = RayOptions(**asks)  # type: ignore[arg-type]
        place = on_nodes(replicas, taking, nodes)
        assert place["max_replicas_per_node"] is None, "they go where that is"


def test_the_spread_reaches_each_deployment() -> None:
    model = ModelSpec(name="tiny", path="tiny").sized(2, 4)
    applications = build(Settings(models=[model], gateway=GatewaySettings(replicas=3)), nodes=2)

    def most(bound: object, found: dict[str, int]) -> dict[str, int]:
        deployment = bound._bound_deployment  # type: ignore[attr-defined]
        found[deployment.name] = deployment._replica_config.max_replicas_per_node
        for one in deployment.init_args[1:]:
            most(one, found)
        return found

    found: dict[str, int] = {}
    for application in applications.values():
        most(application, found)
    assert (found["gateway"], found["prefill-tiny"], found["decode-tiny"]) == (2, 1, 2)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> "Serve":
    serve = Serve()
    monkeypatch.setattr(app, "serve", serve)
    monkeypatch.setattr(app, "time", SimpleNamespace(sleep=serve.look))
    return serve


class Serve:
    """Runs applications; one that is deleted drains until the next look but its predecessors'."""

    def __init__(self) -> None:
        self.runs = ["mine:b", "model-x", "mine", "minefield", "mine:a~c", "other", "other:b"]
        self.told: list[tuple[str, list[str]]] = []  # what was deleted, and what ran then
        self._drain: list[str] = []

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(applications=dict.fromkeys(self.runs))

    def delete(self, name: str, _blocking: bool) -> None:
        assert not _blocking, "Serve's own waiting gives up after a minute"
        self.told.append((name, list(self.runs)))
        self._drain.append(name)

    def look(self, _: float) -> None:
        self.runs.remove(self._drain.pop(0))


def test_what_others_run_on_the_cluster_stays(serve: Serve) -> None:
    """Also another Penstock, whose namespace or model may be called alike."""
    assert app.deployed("mine") == ["mine", "mine:b", "mine:a~c"]
    assert app.deployed_models("mine") == ["b", "a/c"]
    app.delete_all("mine")
    assert serve.runs == ["model-x", "minefield", "other", "other:b"]
    assert [name for name, _ in serve.told] == ["mine", "mine:b", "mine:a~c"]
    assert all("mine" not in ran for _, ran in serve.told[1:]), "the services first"
    assert serve.told[1][1] == serve.told[2][1], "the models side by side"
    assert app.deployed("mine") == []
    app.delete_all("mine")


def test_what_was_there_before_may_stay(serve: Serve) -> None:
    app.delete_all("mine", but=["mine", "mine:b"])
    assert [name for name, _ in serve.told] == ["mine:a~c"]
    app.delete_model("other", "b")
    assert app.deployed("other") == ["other"]


@pytest.mark.parametrize("wrong", ["", "a/b", "a b", "{a}", "a:b"])
def test_a_namespace_is_a_name(wrong: str) -> None:
    """`a/b` would be the application of model `b` in `a`, and braces are Redis' own."""
    with pytest.raises(ValueError, match="namespace"):
        Settings(namespace=wrong)
