"""The machine, the data directory, checkpoints and certificates, with a fault each."""

import json
import os
import resource
import shutil
import socket
from collections import namedtuple
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

import models
from services.cli.commands.doctor import certificates, checkpoints, data, host
from services.cli.commands.doctor.findings import Finding
from services.cli.commands.doctor.installation import Installation
from services.cli.commands.up import local_models
from services.cli.ground.local import LocalGround
from services.common.config import ModelSpec, Settings
from services.common.discovery import SERVICES, Replica, machine_id
from services.common.locks.certificates import dns_name
from services.common.open_files import OTHER_FILES
from tests.support.authority import DAY, Authority
from tests.support.findings import about, state

Make = Callable[..., Settings]
IDENTITIES = (*SERVICES, "cli")


def replica(service: str = "gateway", **told: object) -> Replica:
    return Replica(
        **{
            "service": service,
            "id": f"{service}-00000001",
            "address": "127.0.0.1:1",
            "host_id": f"{machine_id()}/127.0.0.1",
            "pid": os.getpid(),
            **told,
        }  # type: ignore[arg-type]
    )


# -- the data directory


def kept_secrets(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    for name in ("internal-secret", "key"):
        (folder / name).write_text("a secret of the installation")
        (folder / name).chmod(0o600)
    return folder


async def test_a_data_directory_as_it_should_be(tmp_path: Path, settings: Make) -> None:
    kept_secrets(tmp_path / "data")
    found = await data.check(Installation(settings(internal_secret="")))
    assert [finding.state for finding in found] == ["ok"] * 4
    assert "a secret of the installation" not in repr(found)


async def test_secrets_that_others_may_read_are_told(tmp_path: Path, settings: Make) -> None:
    (kept_secrets(tmp_path / "data") / "key").chmod(0o640)
    told = about(await data.check(Installation(settings())), "secrets")
    assert told.state == "failed"
    assert f"chmod 600 {tmp_path / 'data' / 'key'}" in told.advice


async def test_an_empty_secret_is_told(tmp_path: Path, settings: Make) -> None:
    (kept_secrets(tmp_path / "data") / "internal-secret").write_text("")
    assert state(await data.check(Installation(settings())), "secrets") == "failed"


@pytest.mark.parametrize(("mode", "told"), [(0o700, "ok"), (0o755, "warning"), (0o1777, "failed")])
async def test_the_data_directory_is_its_owners_alone(
    mode: int, told: str, tmp_path: Path, settings: Make
) -> None:
    kept_secrets(tmp_path / "data").chmod(mode)
    assert state(await data.check(Installation(settings())), "data directory") == told


async def test_a_file_is_no_data_directory(tmp_path: Path, settings: Make) -> None:
    (tmp_path / "data").write_text("")
    assert state(await data.check(Installation(settings())), "data directory") == "failed"


@pytest.mark.parametrize(
    ("free", "told"), [(10 * 2**30, "ok"), (2**30, "warning"), (2**20, "failed")]
)
async def test_a_disk_that_fills_is_told(
    free: int, told: str, settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**40, 0, free))
    assert state(await data.check(Installation(settings())), "disk") == told


async def test_beyond_the_loopback_all_need_one_secret(settings: Make) -> None:
    async def told(**given: object) -> str:
        it = Installation(settings(**{"internal_secret": "", **given}))
        return state(await data.check(it), "internal secret")

    assert await told() == "ok"
    assert await told(bind_host="10.0.0.7") == "failed"
    assert await told(bind_host="10.0.0.7", internal_secret="one for all of them") == "ok"


async def test_services_that_run_have_a_secret_that_must_be_here(settings: Make) -> None:
    it = Installation(settings(internal_secret=""), replicas=[replica()])
    assert state(await data.check(it), "internal secret") == "failed"


# -- checkpoints


async def test_a_checkpoint_is_read_as_an_engine_would(tmp_path: Path, settings: Make) -> None:
    demo = Path(models.__path__[0]) / "demo"
    broken = Path(shutil.copytree(demo, tmp_path / "broken"))
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1000])
    given = [("whole", demo), ("broken", broken), ("missing", tmp_path / "nowhere")]
    specs = [ModelSpec(name=name, path=str(path)) for name, path in given]
    specs.append(ModelSpec(name="hub", path="owner/name"))
    found = await checkpoints.check(Installation(settings(models=specs)))
    states = {finding.about: finding.state for finding in found}
    assert states == {
        "model whole": "ok",
        "model broken": "failed",
        "model missing": "failed",
        "model hub": "ok",
        "embedding model": "ok",
        "policy": "ok",
    }


@pytest.mark.parametrize(
    ("told", "what", "names"),
    [
        ({"worker": {"kv_cache_bytes": 1}}, "model demo", "kv_cache_bytes 1 is less than one"),
        ({"worker": {"max_model_len": 10**8}}, "model demo", "exceeds the model's context"),
        ({"worker": {"kernels": "triton"}}, "model demo", "kernels 'triton' need a GPU"),
        (
            {"worker": {"quantization": "int8", "kernels": "reference"}},
            "model demo",
            "quantization 'int8' needs the C",
        ),
        (
            {"worker": {"quantization": "int8", "block_size": 8}},
            "model demo",
            "quantization 'int8': block_size 8 is no multiple of 16",
        ),
        ({"worker": {"max_running": 1000}}, "model demo", "max_batched_tokens"),
        ({"retrieval": {"embedding_model": "/nope"}}, "embedding model", "no folder /nope"),
        ({"retrieval": {"embedding_model": "/"}}, "embedding model", "/ has no config.json"),
        ({"policy": {"file": "/etc/passwd"}}, "policy", "policy file /etc/passwd"),
    ],
)
async def test_what_up_would_refuse_is_told(
    told: dict[str, object], what: str, names: str, settings: Make
) -> None:
    own = settings(**told)
    finding = about(await checkpoints.check(Installation(own)), what)
    assert finding.state == "failed"
    assert names in finding.told
    if what == "policy":
        return
    with pytest.raises(RuntimeError, match=names):
        LocalGround(print).checked(own.model_copy(update={"models": local_models([])}))


async def test_what_a_draft_models_weights_cannot_be_is_told(
    tmp_path: Path, settings: Make
) -> None:
    draft = Path(shutil.copytree(Path(models.__path__[0]) / "demo-draft", tmp_path / "draft"))
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"intermediate_size": 98}))
    worker = {"quantization": "int8", "speculation": "draft", "draft_model": str(draft)}
    finding = about(await checkpoints.check(Installation(settings(worker=worker))), "model demo")
    assert finding.state == "failed"
    assert "draft_model: quantization 'int8': intermediate_size 98 is no" in finding.told


# -- certificates


async def of(settings: Settings) -> list[Finding]:
    return await certificates.check(Installation(settings))


async def test_a_whole_set_of_certificates_is_well(tmp_path: Path, settings: Make) -> None:
    folder = Authority().identities(tmp_path / "tls", *IDENTITIES)
    for key in folder.glob("*/tls.key"):
        key.chmod(0o600)
    found = await of(settings(tls_dir=folder))
    assert [(f.about, f.state) for f in found] == [(f"certificate {i}", "ok") for i in IDENTITIES]


async def test_a_host_has_only_the_identities_that_it_needs(tmp_path: Path, settings: Make) -> None:
    folder = Authority().identities(tmp_path / "tls", "worker", "cli")
    assert len(await of(settings(tls_dir=folder))) == 2
    shutil.rmtree(folder / "cli")
    assert state(await of(settings(tls_dir=folder)), "certificate cli") == "failed"


@pytest.mark.parametrize(
    ("valid", "told", "words"),
    [
        (-timedelta(hours=1), "failed", "ended 1.0 hours ago"),
        (timedelta(hours=3), "warning", "ends in 3.0 hours"),
        (DAY, "ok", "ends in "),
        (400 * DAY, "ok", "ends in 399 days"),
        (20 * DAY, "ok", "ends in 19 days"),
    ],
)
async def test_a_certificate_ends_in_time_to_be_renewed(
    valid: timedelta, told: str, words: str, tmp_path: Path, settings: Make
) -> None:
    """Those of a test began two days ago: what counts is the share that is left."""
    folder = tmp_path / "tls"
    Authority().issue(folder / "cli", dns_name("cli"), valid=valid)
    (folder / "cli" / "tls.key").chmod(0o600)
    found = about(await of(settings(tls_dir=folder)), "certificate cli")
    assert found.state == told
    assert words in found.told


async def test_certificates_that_no_peer_would_take_are_told(
    tmp_path: Path, settings: Make
) -> None:
    authority, folder = Authority(), tmp_path / "tls"
    authority.identities(folder, *IDENTITIES)
    authority.issue(folder / "router", dns_name("worker"))
    authority.issue(folder / "worker", dns_name("worker"), authorities=Authority().pem)
    authority.issue(folder / "retrieval")
    shutil.copy(folder / "gateway" / "tls.key", folder / "cli" / "tls.key")
    (folder / "tokenizer" / "tls.crt").write_text("no certificate")
    found = await of(settings(tls_dir=folder))
    assert "not for router.penstock.internal" in about(found, "certificate router").told
    assert "has not signed it" in about(found, "certificate worker").told
    assert "is not the key of" in about(found, "certificate cli").told
    named = "is for no name, not for retrieval.penstock.internal"
    assert named in about(found, "certificate retrieval").told
    for identity in ("router", "worker", "cli", "tokenizer", "retrieval"):
        assert state(found, f"certificate {identity}") == "failed"
    assert state(found, "certificate gateway") != "failed"


async def test_a_key_that_everyone_may_read_is_told(tmp_path: Path, settings: Make) -> None:
    folder = Authority().identities(tmp_path / "tls", "cli")
    (folder / "cli" / "tls.key").chmod(0o644)
    assert state(await of(settings(tls_dir=folder)), "certificate cli") == "warning"


async def test_on_a_network_services_want_certificates(settings: Make) -> None:
    assert state(await of(settings()), "certificates") == "ok"
    assert state(await of(settings(bind_host="10.0.0.7")), "certificates") == "warning"


async def test_the_doors_files_are_looked_at_too(tmp_path: Path, settings: Make) -> None:
    folder = Authority().issue(tmp_path / "door", "api.example", valid=-DAY)
    own = {"tls_cert": folder / "tls.crt", "tls_key": folder / "tls.key"}
    assert state(await of(settings(gateway=own)), "door certificate") == "failed"


# -- the machine


async def test_a_taken_port_names_who_has_it(settings: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        own = settings(gateway={"port": port, "grpc_port": 0})
        told = about(await host.check(Installation(own)), f"port {port}")
        assert told.state == "failed"
        assert f"process {os.getpid()}" in told.told
        ours = Installation(own, replicas=[replica()])
        assert state(await host.check(ours), f"port {port}") == "ok"
        others = Installation(own, replicas=[replica(pid=1)])
        assert state(await host.check(others), f"port {port}") == "warning"
    assert state(await host.check(Installation(own)), f"port {port}") == "ok"


@pytest.mark.parametrize(
    ("who", "told"),
    [
        ({"replicas": [{}]}, "ok"),
        ({"replicas": [{"pid": 1}], "draining": [{}]}, "ok"),  # it still holds its port
        ({"replicas": [{"host_id": "another/10.0.0.7"}]}, "warning"),  # a process id of its own
        ({"replicas": []}, "failed"),
    ],
)
async def test_whose_a_port_is(who: dict[str, list[dict[str, object]]], told: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        own = Settings(gateway={"port": port, "grpc_port": 0})
        seen = {part: [replica(**one) for one in some] for part, some in who.items()}
        assert state(await host.check(Installation(own, **seen)), f"port {port}") == told


@pytest.mark.parametrize(
    ("gateway", "told"),
    [
        ({"port": 8000}, {"port 8000": "REST", "port 8001": "gRPC"}),
        ({"port": 8000, "grpc_port": 9000}, {"port 8000": "REST", "port 9000": "gRPC"}),
        ({"port": 8000, "grpc_port": 0}, {"port 8000": "REST"}),
        ({"port": 0}, {}),
        ({"port": 0, "internal_port": 7000}, {"port 7000": "internal port"}),
        ({"port": 0, "metrics_port": 7001}, {"port 7001": "metrics port"}),
    ],
)
async def test_the_ports_that_the_settings_name(
    gateway: dict[str, int],
    told: dict[str, str],
    settings: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Free ones are told of an installation that is to be started; of one that runs they are of
    another host."""
    monkeypatch.setattr(host, "bind_error", lambda _: None)
    own = settings(gateway=gateway)
    found = [f for f in await host.check(Installation(own)) if f.about.startswith("port")]
    assert {f.about: f.state for f in found} == dict.fromkeys(told, "ok")
    assert all(told[f.about] in f.told for f in found)
    runs = await host.check(Installation(own, replicas=[replica()]))
    assert not [f for f in runs if f.about.startswith("port")]


async def test_a_host_that_is_not_this_one_is_no_port_in_use(settings: Make) -> None:
    own = settings(gateway={"host": "192.0.2.1", "port": 8000, "grpc_port": 0})
    told = about(await host.check(Installation(own)), "port 8000")
    assert told.state == "failed"
    assert told.told == "setting PENSTOCK_GATEWAY__HOST: 192.0.2.1 is no address of this host"


async def test_a_port_in_use_is_told_by_up_with_its_setting(settings: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        own = settings(gateway={"port": 0, "metrics_port": port}, models=local_models([]))
        told = f"PENSTOCK_GATEWAY__METRICS_PORT: port {port} on 127.0.0.1 is in use"
        with pytest.raises(RuntimeError, match=told):
            LocalGround(print).checked(own)


async def test_all_fixed_ports_are_looked_at(settings: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        own = settings(gateway={"port": 0}, worker={"health_port": port})
        told = about(await host.check(Installation(own)), f"port {port}")
    assert told.state == "failed"
    assert "the worker's health port" in told.told


async def test_too_few_open_files_are_told(settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.resource, "getrlimit", lambda _: (1024, 4096))
    found = await host.check(Installation(settings()))
    assert state(found, "open files") == "warning"
    assert "PENSTOCK_GATEWAY__MAX_CONNECTIONS" in about(found, "open files").advice
    few = settings(gateway={"max_connections": 100})
    assert state(await host.check(Installation(few)), "open files") == "ok"


@pytest.mark.parametrize(
    ("soft", "missing", "told", "words"),
    [
        (64, 0, "ok", "allowed"),
        (10**6, 1, "warning", "a gateway may need"),
        (64, None, "ok", "any"),
    ],
)
async def test_how_many_open_files_a_gateway_may_need(
    soft: int,
    missing: int | None,
    told: str,
    words: str,
    settings: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The soft limit is raised up to the hard one at the start."""
    own = settings(gateway={"max_connections": 100})
    needed = own.gateway.open_at_once + OTHER_FILES
    hard = resource.RLIM_INFINITY if missing is None else needed - missing
    monkeypatch.setattr(host.resource, "getrlimit", lambda _: (soft, hard))
    found = about(await host.check(Installation(own)), "open files")
    assert found.state == told
    assert words in found.told


@pytest.mark.parametrize(
    ("size", "told"), [(64 * 2**20, "warning"), (2**30 - 1, "warning"), (2**30, "ok")]
)
async def test_a_small_shared_memory_is_told(
    size: int, told: str, settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers have 64 MiB unless more is asked for."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(host.shutil, "disk_usage", lambda _: usage(size, 0, size))
    assert state(await host.check(Installation(settings())), "/dev/shm") == told


async def test_no_shared_memory_at_all_is_told(
    tmp_path: Path, settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_SHM", tmp_path / "none")
    told = about(await host.check(Installation(settings())), "/dev/shm")
    assert (told.state, told.advice) == ("warning", "mount one")


@pytest.mark.parametrize(
    ("machine", "cpuinfo", "told", "words"),
    [
        ("x86_64", "flags : fpu avx2 fma\n", "ok", "a CPU, 3 cores, avx2 fma"),
        ("x86_64", "flags : fpu sse2\n", "warning", "no vector instructions known"),
        ("x86_64", "", "ok", "no vector instructions known"),  # who knows
        ("aarch64", "Features : asimd bf16\n", "ok", "asimd bf16"),
        ("aarch64", "Features : fp\n", "ok", "no vector instructions known"),
    ],
)
async def test_a_processor_has_what_an_engine_needs(
    machine: str,
    cpuinfo: str,
    told: str,
    words: str,
    tmp_path: Path,
    settings: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "cpuinfo").write_text(f"model name\t: a CPU\n{cpuinfo}\nmodel name : b\n")
    monkeypatch.setattr(host, "Path", lambda _: tmp_path / "cpuinfo")
    monkeypatch.setattr(host.platform, "machine", lambda: machine)
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: {0, 1, 5}, raising=False)
    found = about(await host.check(Installation(settings())), "processor")
    assert found.state == told
    assert words in found.told


@pytest.mark.parametrize(
    ("asked", "ready", "known", "told", "words"),
    [
        ("auto", ("avx512", "avx2"), ("avx512", "avx2"), "ok", "avx512 of avx512, avx2"),
        ("avx2", ("avx512", "avx2"), ("avx512", "avx2"), "ok", "avx2 of avx512, avx2"),
        ("auto", (), ("avx512", "avx2"), "warning", "for avx512 or avx2: workers run on PyTorch"),
        ("avx512", ("avx2",), ("avx512", "avx2"), "warning", "none is built for avx512"),
        ("avx512_bf16", ("avx2",), ("avx2",), "warning", "avx512_bf16 is asked for"),
        ("auto", (), (), "ok", "PyTorch's"),
    ],
)
async def test_kernels_that_workers_would_take_are_told(
    asked: str,
    ready: tuple[str, ...],
    known: tuple[str, ...],
    told: str,
    words: str,
    settings: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "built", lambda: ready)
    monkeypatch.setattr(host, "supported", lambda: known)
    own = {"decode": {"worker": {"kernels": asked}}}
    spec = ModelSpec.model_validate({"name": "a", "path": "x", **own})
    found = about(await host.check(Installation(settings(models=[spec]))), "kernels")
    assert found.state == told
    assert words in found.told


@pytest.mark.parametrize(
    ("known", "advice"), [(("avx2",), "kernels/cpu/build.py"), ((), "where there is AVX2")]
)
async def test_rounded_weights_are_not_said_to_run_on_pytorch(
    known: tuple[str, ...], advice: str, settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "built", tuple)
    monkeypatch.setattr(host, "supported", lambda: known)
    found = about(
        await host.check(Installation(settings(worker={"quantization": "int8"}))), "kernels"
    )
    assert found.state == "warning"
    assert "workers with quantization int8 do not start" in found.told
    assert advice in found.advice


async def test_workers_that_are_to_have_a_gpu_want_one(
    settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ModelSpec.model_validate(
        {"name": "large", "path": "x", "decode": {"worker": {"device": "cuda"}}}
    )
    wanting = Installation(settings(models=[spec]))
    monkeypatch.setattr(host, "_gpus", lambda: iter(()))
    assert state(await host.check(wanting), "GPU") == "warning"
    assert state(await host.check(Installation(settings())), "GPU") == "ok"
    monkeypatch.setattr(host, "_gpus", lambda: iter(["a GPU"]))
    assert about(await host.check(wanting), "GPU 0").told == "a GPU"


@pytest.mark.parametrize(
    ("device", "free", "told"),
    [
        ("cpu", 5 * 2**30, "ok"),
        ("cpu", 5 * 2**30 - 1, "warning"),  # a GiB beside the KV
        ("cuda", 2**20, "ok"),  # the KV is in the GPU's
    ],
)
async def test_memory_is_for_the_kv_and_the_rest(
    device: str, free: int, told: str, settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = namedtuple("memory", "available")
    monkeypatch.setattr(host.psutil, "virtual_memory", lambda: memory(free))
    own = settings(worker={"kv_cache_bytes": 4 * 2**30, "device": device})
    assert state(await host.check(Installation(own)), "memory") == told


async def test_little_memory_for_a_workers_kv_is_told(settings: Make) -> None:
    own = settings(worker={"kv_cache_bytes": 2**50})
    assert state(await host.check(Installation(own)), "memory") == "warning"
    assert state(await host.check(Installation(settings())), "memory") == "ok"


async def test_what_is_installed_is_told(settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    told = about(await host.check(Installation(settings())), "installed")
    assert "Python 3." in told.told
    assert "torch 2." in told.told
    monkeypatch.setattr(host, "_TOLD", ("torch", "no-such-package"))
    assert state(await host.check(Installation(settings())), "installed") == "failed"
