"""What a start decides without starting anything: its parts, its key, what it waits for."""

import http.server
import json
import ssl
import stat
import threading
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.cli.commands import up
from services.cli.ground.local import LocalGround
from services.cli.laptop_key import laptop_key
from services.cli.running import Running, state_file
from services.cli.stack import checkpoints
from services.cli.stack import stack as module
from services.cli.stack.ready import not_ready, not_served
from services.cli.stack.replicas import missing as not_there
from services.cli.stack.replicas import wanted as waited_for
from services.cli.stack.stack import Stack
from services.cli.stack.wanted_models import WantedModels
from services.common.config import ModelSpec, Settings
from services.common.discovery import Replica
from services.common.redis import Redis, connect
from services.common.start_failures import StartFailure, tell
from services.gateway.identity.key_record import key_hash
from services.gateway.identity.keys import KeyStore
from tests.support.authority import Authority


@pytest.fixture
def settings(
    redis_url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Settings:
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path))
    return Settings(redis_url=redis_url, namespace=namespace, data_dir=tmp_path)


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({}, True),
        ({"PENSTOCK_GATEWAY__HOST": "0.0.0.0"}, False),
        ({"PENSTOCK_BIND_HOST": "192.0.2.1"}, False),
    ],
)
def test_a_key_is_printed_only_where_only_this_host_can_use_it(
    environment: dict[str, str], shown: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stack = Stack(Settings(data_dir=tmp_path), LocalGround(print), report=print)
    told = stack.told_key(Running("", "", "", "", key="psk-secret", pid=1))
    assert ("psk-secret" in told) is shown
    assert (str(tmp_path / "key") in told) is not shown


async def test_the_laptop_s_key_stays_until_it_is_revoked_or_redis_knows_it_no_more(
    settings: Settings, redis: Redis
) -> None:
    store = KeyStore(redis, settings.namespace)
    first = await laptop_key(settings)
    record = await store.find(key_hash(first))
    assert record is not None
    assert record.tenant == "local"
    assert stat.S_IMODE((settings.data_dir / "key").stat().st_mode) == 0o600
    assert await laptop_key(settings) == first
    await store.revoke(record.id)
    second = await laptop_key(settings)
    assert second != first
    assert await laptop_key(settings) == second
    other = settings.model_copy(update={"namespace": f"{settings.namespace}-other"})
    third = await laptop_key(other)
    assert third not in (first, second)
    assert await laptop_key(other) == third


def arguments(**given: Any) -> Namespace:
    none = ("prefill", "decode", "quantization", "kv_format", "tensor_parallel")
    return Namespace(**{"model": [], "lora": []} | dict.fromkeys(none) | given)


def test_arguments_come_before_settings_and_those_before_what_is_shipped(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def made(port: int | None = None, **given: Any) -> Settings:
        return up.local_stack(arguments(**given), port)._settings

    assert [m.name for m in made().models] == ["demo"]
    assert made().gateway.port == 8000
    monkeypatch.setenv("PENSTOCK_MODELS", '[{"name": "own", "path": "/own"}]')
    monkeypatch.setenv("PENSTOCK_GATEWAY__PORT", "9000")
    monkeypatch.setenv("PENSTOCK_GATEWAY__MAX_FILES", "7")
    assert [m.name for m in made().models] == ["own"]
    assert [m.name for m in made(model=["org/given"]).models] == ["given"]
    assert made().gateway.port == 9000
    assert (made(0).gateway.port, made(0).gateway.max_files) == (0, 7)

    def pools(**given: Any) -> dict[str, int]:
        (model,) = made(**given).models
        return {role: pool.replicas for role, pool in model.pools.items()}

    assert pools() == {"prefill": 1, "decode": 1}
    assert pools(prefill=3, decode=2) == {"prefill": 3, "decode": 2}
    monkeypatch.setenv("PENSTOCK_WORKER__REPLICAS", "2")
    assert pools() == {"prefill": 2, "decode": 2}
    assert pools(prefill=0) == {"both": 2}
    assert made().worker.quantization == "auto"
    monkeypatch.setenv("PENSTOCK_WORKER__QUANTIZATION", "int8")
    assert made().worker.quantization == "int8"
    assert made(quantization="auto").worker.quantization == "auto"
    assert made(kv_format="int8").worker.kv_format == "int8"
    assert made(kv_format="int8").worker.quantization == "int8", "as it is set"
    given = made(quantization="int8", kv_format="fp8", model=["org/given"])
    assert given.of_worker(given.models[0], "decode").worker.kv_format == "fp8"
    assert given.of_worker(given.models[0], "prefill").worker.quantization == "int8"
    assert made(tensor_parallel=2).worker.tensor_parallel == 2
    assert made().worker.tensor_parallel == 1
    told = {"name": "given", "path": "/own", "worker": {"quantization": "auto"}}
    exact = ModelSpec.model_validate(told)
    role = next(iter(exact.pools))
    assert given.of_worker(exact, role).worker.quantization == "auto", "it says so itself"

    own = '[{"name": "own", "path": "/own", "decode": {"replicas": 5}}]'
    monkeypatch.setenv("PENSTOCK_MODELS", own)
    assert pools(prefill=3, decode=3) == {"both": 5}, "a model that names its pools has those"


async def test_started_again_it_leaves_the_models_to_its_keeper(
    settings: Settings, redis: Redis
) -> None:
    own = ModelSpec(name="own", path="/gone")
    given = settings.model_copy(update={"models": [own]})
    wanted = WantedModels(redis, settings.namespace)
    again = Stack(given, LocalGround(print), report=print, again=True)
    assert again._settings.models == [], "a folder that is gone by now stops nobody"
    await again._write_wanted(wanted)
    assert set(await wanted.all()) == {"own"}, "Redis knew of none"
    await wanted.remove("own")
    await wanted.keep("the lost one")
    await again._write_wanted(wanted)
    assert not await wanted.all(), "all were removed"
    assert (await wanted.look()).keeper == again._id
    await Stack(given, LocalGround(print), report=print)._write_wanted(wanted)
    assert set(await wanted.all()) == {"own"}


def test_started_again_it_is_where_it_was(settings: Settings) -> None:
    lost = Running("http://127.0.0.1:4321", "127.0.0.1:4567", "r", "n", "k", 2**22 - 1)

    def gateway(again: bool) -> tuple[int, int | None]:
        found = up.local_stack(arguments(), 0, again=again)._settings.gateway
        return found.port, found.grpc_port

    assert gateway(True) == gateway(False) == (0, None), "nothing is known of an earlier one"
    state_file(settings).write_text(json.dumps(asdict(lost)))
    assert gateway(False) == (0, None)
    assert gateway(True) == (4321, 4567)


def test_all_replicas_are_waited_for() -> None:
    models = [ModelSpec(name=name, path=name) for name in ("a", "b")]
    wanted = waited_for(Settings(models=[m.sized(1, 2) for m in models]))

    def replica(service: str, n: int = 0, **facts: str) -> Replica:
        return Replica(service, f"{service}-{n}", "h:1", "h", 1, facts=facts)

    def missing(*replicas: Replica) -> list[str]:
        view: Any = SimpleNamespace(replicas=dict(enumerate(replicas)))
        return not_there(wanted, {"all": view})

    assert set(missing()) == {name for _, name in wanted}
    decode = [replica("worker", n, role="decode", model="a") for n in range(2)]
    assert "decode worker of a" in missing(decode[0])
    assert "decode worker of a" not in missing(*decode)
    assert {"decode worker of b", "prefill worker of a"} <= set(missing(*decode))
    assert "gateway" not in missing(replica("gateway"))


@pytest.fixture
def gateway() -> Iterator[Any]:
    """Answers `/readyz` with its `status`, and models with 200 for each key that it is `shown`."""

    class Ready(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith("/v1/models/"):
                server.shown.append(self.headers["authorization"])  # type: ignore[attr-defined]
                self.send_response(200 if self.path.endswith("/tiny") else 404)
                return self.end_headers()
            self.send_response(server.status if self.path == "/readyz" else 404)  # type: ignore[attr-defined]
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Ready)
    server.shown = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_the_gateway_is_waited_for_until_it_says_that_it_is_ready(gateway: Any) -> None:
    url = f"http://127.0.0.1:{gateway.server_port}"
    for status, left in ((503, 1), (404, 1), (200, 0)):
        gateway.status = status
        assert len(not_ready(url)) == left
    assert not_ready("http://127.0.0.1:1")


def with_tls(gateway: Any, folder: Path) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    gateway.socket = context.wrap_socket(gateway.socket, server_side=True)
    return f"https://127.0.0.1:{gateway.server_port}"


def test_the_key_goes_to_who_has_the_doors_own_certificate_and_nobody_else(
    gateway: Any, tmp_path: Path
) -> None:
    authority = Authority()
    own, other = (authority.issue(tmp_path / name, "api.example") for name in ("own", "other"))
    for folder in (own, other):  # as a chain, with the one who issued it
        with (folder / "tls.crt").open("ab") as chain:
            chain.write(authority.pem)
    url = with_tls(gateway, own)
    assert not_served(url, "psk-own", ["tiny", "large"], own / "tls.crt") == ["model large"]
    assert gateway.shown == ["Bearer psk-own"] * 2
    for cert in (other / "tls.crt", tmp_path / "none.crt", None):
        assert not not_served(url, "psk-own", ["large"], cert)
    assert gateway.shown == ["Bearer psk-own"] * 2


def test_no_proxy_is_asked_for_the_gateway(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = f"http://127.0.0.1:{gateway.server_port}"
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, proxy)
    gateway.status = 200
    for url in ("http://127.0.0.1:1", "https://127.0.0.1:1"):
        assert not_ready(url) == not_served(url, "psk-own", ["tiny"], None)
        assert not_ready(url) == ["the gateway's port"]
    assert not_served(proxy, "psk-own", ["tiny"], None) == []
    assert gateway.shown == ["Bearer psk-own"]


async def test_a_start_ends_with_the_first_reason_that_is_told(
    settings: Settings, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = SimpleNamespace(status="DEPLOYING", message="")
    monkeypatch.setattr(Stack, "_applications", lambda _: {"penstock:tiny": serve})
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.0)
    said: list[str] = []
    starting = Stack(settings, LocalGround(said.append), report=said.append)
    left = [["router"], ["router"], []]
    await starting._wait(redis, lambda: left.pop(0))
    assert said == ["waiting for: router"], "once"

    serve.status, serve.message = "DEPLOY_FAILED", "it failed to update"
    with pytest.raises(RuntimeError, match="it failed to update"):
        await starting._wait(redis, lambda: ["router"])
    await tell(redis, settings.namespace, StartFailure("retrieval", "no such model", ""))
    with pytest.raises(RuntimeError, match="retrieval did not start: no such model"):
        await starting._wait(redis, lambda: ["router"])
    serve.status = "DEPLOYING"
    with pytest.raises(RuntimeError, match="no such model"):
        await starting._wait(redis, lambda: ["router"])


async def test_a_start_that_nobody_says_anything_of_has_an_end(
    settings: Settings, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(module, "_START_TIMEOUT_S", 0.0)
    monkeypatch.setattr(Stack, "_applications", lambda _: {})
    starting = Stack(settings, LocalGround(print), report=lambda _: None)

    def missing() -> list[str]:
        now[0] += 9.0
        return ["router", "worker of demo"]

    with pytest.raises(RuntimeError, match=r"not up after 20 s: router, worker of demo"):
        await starting._wait(redis, missing)
    assert 1020.0 < now[0] < 1040.0, "neither sooner nor much later"


async def test_as_long_as_replicas_come_it_is_not_late(
    settings: Settings, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many may be replaced one after the other, each after its drain."""
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(Stack, "_applications", lambda _: {})
    starting = Stack(settings, LocalGround(print), report=lambda _: None)
    left = [[f"the new {n}"] for n in range(5)]

    def missing() -> list[str]:
        now[0] += 200.0
        return left.pop(0) if left else []

    await starting._wait(redis, missing)
    left = [["router"]] * 5
    with pytest.raises(RuntimeError, match="not up after 320 s: router"):
        await starting._wait(redis, missing)


def test_the_end_of_many_replicas_may_take_longer(settings: Settings) -> None:
    def ends_within_s(*models: str) -> float:
        specs = [ModelSpec(name=name, path="/m").sized(2, 3) for name in models]
        given = settings.model_copy(update={"models": specs})
        return Stack(given, LocalGround(print), report=print).ends_within_s

    assert ends_within_s("a") >= settings.drains_within_s + 5
    assert ends_within_s("a", "b") == ends_within_s("a") + 5 * 2


def test_a_hub_s_model_is_checked_before_its_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = Path(up.local_models([])[0].path)
    fetched: list[bool] = []

    def locate(spec: ModelSpec, *, weights: bool = True) -> Path:
        fetched.append(weights)
        return folder

    monkeypatch.setattr(checkpoints, "locate", locate)
    said: list[str] = []
    folder = shipped
    model = checkpoints.made_local(ModelSpec(name="m", path="owner/name"), Settings(), said.append)
    assert (model.name, model.path, fetched) == ("m", str(shipped), [False, True])
    assert "owner/name" in said[0]
    fetched.clear()
    checkpoints.made_local(ModelSpec(name="m", path=str(shipped)), Settings(), said.append)
    assert (fetched, len(said)) == ([True], 1), "no hub is asked for a folder"

    for worker, words in (
        ({"tensor_parallel": 3}, "'m': .*tensor_parallel 3 does not divide the model's num_att"),
        (
            {"tensor_parallel": 2, "quantization": "int4"},
            r"'m': .*'int4': num_attention_heads \* head_dim 224, of each of 2 ranks, is no mul",
        ),
        ({"tensor_parallel": 2, "device": "cuda", "ray": {"num_gpus": 1}}, "num_gpus 1, and"),
        ({"kv_disk_dir": "/dev/null"}, "kv_disk_dir '/dev/null': it is no folder"),
        ({"kv_disk_dir": "kv", "kv_disk_bytes": 10}, "kv_disk_bytes 10 is less than one block"),
    ):
        settings = Settings(worker=worker)
        with pytest.raises(RuntimeError, match=words):
            checkpoints.made_local(ModelSpec(name="m", path=str(shipped)), settings, said.append)
    two = Settings(worker={"tensor_parallel": 2})
    checkpoints.made_local(ModelSpec(name="m", path=str(shipped)), two, said.append)

    folder = tmp_path / "odd"
    folder.mkdir()
    config = json.loads((shipped / "config.json").read_text())
    config["architectures"] = ["Unknown"]
    (folder / "config.json").write_text(json.dumps(config))
    fetched.clear()
    with pytest.raises(RuntimeError, match=r"'m'.*Unknown"):
        checkpoints.made_local(ModelSpec(name="m", path="owner/name"), Settings(), said.append)
    assert fetched == [False]
