"""What the chart renders runs: each pod of the laptop profile's Ray cluster is a Ray node of its
own, with the pod's environment, Ray parameters and certificates, at an address of its own; the
gateway is what its pod runs, outside of Ray; Redis is the chart's, with its users, and has Ray's
state; Ray's processes speak TLS, as with `ray.tls`; Serve's config goes the way that KubeRay sends
it. Not tried here: what the kubelet and KubeRay do besides."""

import base64
import json
import os
import random
import re
import secrets
import socket
import ssl
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import httpx
import psutil
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.children import dying_with_parent
from services.common.discovery import SERVICES, Directory, Replica
from services.common.locks.socket_folder import SocketFolder
from services.common.redis import connect
from services.gateway.identity.keys import KeyStore
from tests.deploy.manifests import Release, Thing, render, secret_value
from tests.support.authority import Authority
from tests.support.chart_redis import ChartRedis
from tests.support.laptop import free_port
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
START_S = 180.0
MODEL = "Org/demo"
# Ports that are one pod's in a cluster, and would be taken twice on one machine.
_PORTS = re.compile("port$")
# No Qdrant here, and no TLS of Redis.
_ELSEWHERE = re.compile("PENSTOCK_QDRANT_|PENSTOCK_REDIS_CA|RAY_REDIS_CA_CERT")


class Pods:
    """Processes that stand for the pods of a release; `close` ends them by process id."""

    def __init__(self, release: Release, folder: Path, redis: ChartRedis) -> None:
        self._release, self._folder, self._redis = release, folder, redis
        self._authority = Authority()
        self._ray = SocketFolder()
        self.token = secrets.token_hex(16)
        self.gcs, self.dashboard = free_port(), free_port()
        self.addresses: dict[str, str] = {}  # by group, as the next
        self.environments: dict[str, dict[str, str]] = {}
        self._network = f"127.{random.randint(1, 250)}.{random.randint(0, 250)}"
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def redis_url(self) -> str:
        """By Penstock's user."""
        return self.environments["gateway"]["PENSTOCK_REDIS_URL"]

    async def start_head(self) -> None:
        cluster = self._release.ray["rayClusterConfig"]
        ports = [f"--port={self.gcs}", f"--dashboard-port={self.dashboard}"]
        # As KubeRay does for gcsFaultToleranceOptions.
        options = cluster["gcsFaultToleranceOptions"]
        user, password = options["redisUsername"]["value"], self.rays_password()
        ports += [f"--redis-username={user}", f"--redis-password={password}"]
        state = {
            "RAY_REDIS_ADDRESS": self._redis.here(options["redisAddress"]),
            "RAY_external_storage_namespace": "the-uid-of-a-cluster",
        }
        arguments = ["--head", *ports, f"--temp-dir={self._ray.path}/ray"]
        await self._start("head", cluster["headGroupSpec"], arguments, state)

    def rays_password(self) -> str:
        options = self._release.ray["rayClusterConfig"]["gcsFaultToleranceOptions"]
        return secret_value(self._release, options["redisPassword"]) or ""

    async def start_workers(self) -> None:
        for name, group in self._release.groups().items():
            assert group["replicas"] == 1, "of the laptop profile"
            await self._start(name, group, [f"--address={self.addresses['head']}:{self.gcs}"])

    def start_gateway(self) -> subprocess.Popen[bytes]:
        """The container's own command, but for tini, which comes with the image."""
        [pod] = self._release.pods_of("gateway")
        [container] = pod.spec["containers"]
        assert container["command"][:3] == ["tini", "--", "python"]
        self._place("gateway", container, pod.spec)
        self._run("gateway", [sys.executable, *container["command"][3:]])
        return self._processes[-1]

    def _place(self, name: str, container: Thing, spec: Thing) -> None:
        self.addresses[name] = f"{self._network}.{len(self.addresses) + 1}"
        self.environments[name] = self._environment(name, container, spec)

    def _run(self, name: str, command: list[str]) -> Path:
        """Returns its log."""
        log = self._folder / f"{name}.log"
        with log.open("wb") as sink:
            self._processes.append(
                subprocess.Popen(
                    [*dying_with_parent(), *command],
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    cwd=self._folder,
                    env=self.environments[name],
                )
            )
        return log

    async def _start(
        self,
        name: str,
        group: Thing,
        arguments: list[str],
        environment: dict[str, str] | None = None,
    ) -> None:
        """Returns once the node has joined: several at once take longer than Ray waits."""
        [container] = group["template"]["spec"]["containers"]
        self._place(name, container, group["template"]["spec"])
        self.environments[name] |= {**self._of_kuberay(name), **(environment or {})}
        given = {
            option: value.strip("'")  # of the shell that KubeRay starts it in
            for option, value in group["rayStartParams"].items()
            if not _PORTS.search(option) and option != "dashboard-host"
        }
        options = [f"--{option}={value}" for option, value in given.items()]
        python = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        own = [f"--node-ip-address={self.addresses[name]}", "--disable-usage-stats"]
        for option in ("dashboard-agent-listen-port", "metrics-export-port"):
            own.append(f"--{option}={free_port()}")
        log = self._run(name, [*python, *options, *own, *arguments])

        def joined() -> bool:
            said = log.read_text(errors="replace")
            assert self._processes[-1].poll() is None, said
            return "Ray runtime started" in said

        await until(joined, START_S, f"the node of {name}")

    def logged(self, name: str) -> set[str]:
        """The services that have told something in what `kubectl logs` shows of a pod."""
        lines = (self._folder / f"{name}.log").read_text(errors="replace").splitlines()
        ours = (json.loads(line) for line in lines if line.startswith('{"') and line.endswith("}"))
        return {line["service"] for line in ours if "service" in line}

    def _of_kuberay(self, name: str) -> dict[str, str]:
        """What it adds to each pod of Ray, for authOptions and tlsOptions."""
        cluster = self._release.ray["rayClusterConfig"]
        assert cluster["authOptions"] == {"mode": "token"}
        assert cluster["tlsOptions"] == {"enabled": True}
        own = self._folder / name / "ray-tls"
        self._authority.issue(own, "localhost", address=self.addresses[name])
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "RAY_USE_TLS": "1",
            "RAY_TLS_SERVER_CERT": str(own / "tls.crt"),
            "RAY_TLS_SERVER_KEY": str(own / "tls.key"),
            "RAY_TLS_CA_CERT": str(own / "ca.crt"),
        }

    def _environment(self, name: str, container: Thing, spec: Thing) -> dict[str, str]:
        """The container's, with what the kubelet fills in, and paths of this machine."""
        mine = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        for entry in container["env"]:
            field = entry.get("valueFrom", {}).get("fieldRef")
            if field is not None:
                mine[entry["name"]] = self.addresses[name]
            elif "valueFrom" in entry:
                if (value := secret_value(self._release, entry)) is not None:
                    mine[entry["name"]] = value
            else:
                mine[entry["name"]] = entry["value"]
        mine = {k: v for k, v in mine.items() if not _ELSEWHERE.match(k)}
        url = mine["PENSTOCK_REDIS_URL"].replace("$(REDIS_AUTH)", mine["REDIS_AUTH"])
        home = self._folder / name
        home.mkdir()
        return mine | {
            "PENSTOCK_REDIS_URL": self._redis.here(url),
            "PENSTOCK_GATEWAY__HOST": self.addresses[name],  # 0.0.0.0 of this pod
            "PENSTOCK_DATA_DIR": str(home),
            "PENSTOCK_BLOBS_URL": (self._folder / "blobs").as_uri(),
            "PENSTOCK_TLS_DIR": str(self._certificates(home, container, spec)),
            "HOME": str(home),
        }

    def _certificates(self, home: Path, container: Thing, spec: Thing) -> Path:
        """Those that the pod mounts below PENSTOCK_TLS_DIR, and no others."""
        folder = home / "tls"
        for mount in container["volumeMounts"]:
            identity = mount["mountPath"].removeprefix("/etc/penstock/tls/")
            if identity == mount["mountPath"]:
                continue
            [volume] = [v for v in spec["volumes"] if v["name"] == mount["name"]]
            own = folder / identity
            own.mkdir(parents=True)
            secret = self._release.one("Secret", volume["secret"]["secretName"])
            for file, text in secret["data"].items():
                (own / file).write_bytes(base64.b64decode(text))
        return folder

    def close(self) -> None:
        for process in self._processes:
            with suppress(psutil.NoSuchProcess):
                main = psutil.Process(process.pid)
                tree = [main, *main.children(recursive=True)]
                for each in tree:
                    with suppress(psutil.NoSuchProcess):
                        each.kill()
            process.wait()
        self._ray.close()


class Operator:
    """Ray's dashboard, as KubeRay calls it."""

    def __init__(self, pods: Pods) -> None:
        self._client = httpx.Client(
            base_url=f"http://127.0.0.1:{pods.dashboard}",
            headers={"x-ray-authorization": f"Bearer {pods.token}"},
            timeout=30,
            trust_env=False,
        )

    def answers(self) -> bool:
        with suppress(httpx.TransportError):
            return self._client.get("/api/serve/applications/").status_code == 200
        return False

    def submit(self, config: str) -> None:
        """The text of serveConfigV2, as JSON."""
        answer = self._client.put("/api/serve/applications/", json=yaml.safe_load(config))
        assert answer.status_code == 200, answer.text

    def states(self) -> dict[str, str]:
        applications = self._client.get("/api/serve/applications/").json()["applications"]
        for name, its in applications.items():
            assert its["status"] != "DEPLOY_FAILED", f"{name}: {its['message']}"
        return {name: its["status"] for name, its in applications.items()}


async def _replicas(url: str, service: str) -> list[Replica]:
    client = connect(url)
    try:
        view = Directory(client, "penstock", service, lease_s=3.0)
        await view.refresh()
        return list(view.replicas.values())
    finally:
        await client.aclose()


def _release() -> Release:
    """The laptop profile's; the image's model is this repository's."""
    pool = {"replicas": 1}
    model = {"name": MODEL, "enabled": True, "path": str(ROOT / "models/demo")}
    settings = {"ROUTER__QUEUE_LIMIT": 17, "GATEWAY__MAX_REQUESTS": 64, "LOG_LEVEL": "INFO"}
    models = [{**model, "prefill": pool, "decode": pool}]
    return render("laptop", {"models": models, "settings": settings, "ray": {"tls": True}})


async def test_the_rendered_graph_runs_on_nodes_that_stand_for_its_pods(tmp_path: Path) -> None:
    release = _release()
    with ExitStack() as stack:
        redis = ChartRedis(release, tmp_path / "redis")
        stack.callback(redis.close)
        await redis.start()
        pods = Pods(release, tmp_path, redis)
        stack.callback(pods.close)
        await pods.start_head()
        operator = Operator(pods)
        await until(operator.answers, START_S, "the head's dashboard")
        # KubeRay waits for no worker: they come, and become ready, after this.
        operator.submit(release.ray["serveConfigV2"])
        process = pods.start_gateway()
        await pods.start_workers()
        names = {"penstock", "penstock:Org~demo"}
        await until(lambda: operator.states() == dict.fromkeys(names, "RUNNING"), START_S, "Serve")

        of_group = {
            "gateway": "gateway",
            "retrieval": "services",
            "tokenizer": "services",
            "router": "services",
            "worker": None,
        }
        assert set(of_group) == set(SERVICES)
        found = {service: await _replicas(pods.redis_url, service) for service in SERVICES}
        ports = {service: 9000 + i for i, service in enumerate(of_group)}
        for service, group in of_group.items():
            groups = [group] if group else ["prefill-org-demo", "decode-org-demo"]
            assert sorted(replica.address for replica in found[service]) == sorted(
                f"{pods.addresses[one]}:{ports[service]}" for one in groups
            )
            for one in groups:
                await _probed(f"{pods.addresses[one]}:{ports[service] + 200}")
        [router], [gateway] = found["router"], found["gateway"]
        at_the_door = psutil.Process(gateway.pid).environ()
        assert not any(name.startswith("RAY") for name in at_the_door)
        assert not {pods.token, pods.rays_password()} & set(at_the_door.values())
        assert at_the_door["PENSTOCK_GATEWAY__MAX_REQUESTS"] == "64"
        assert psutil.Process(router.pid).environ()["PENSTOCK_ROUTER__QUEUE_LIMIT"] == "17"
        for worker in found["worker"]:
            own = psutil.Process(worker.pid).environ()
            assert own["PENSTOCK_LOG_LEVEL"] == "INFO"
            assert "PENSTOCK_ROUTER__QUEUE_LIMIT" not in own, "it would restart with the router's"

        await _answers_a_chat(f"http://{pods.addresses['gateway']}:8000", pods.redis_url)
        assert {"retrieval", "tokenizer", "router"} <= pods.logged("services")
        assert "worker" in pods.logged("decode-org-demo")
        _rays_state_is_its_own(redis)
        _speaks_tls(pods.addresses["head"], pods.gcs, tmp_path / "head/ray-tls")

        # What preStop runs, in the gateway's pod: nobody finds it any more; then its end.
        [container] = release.pods_of("gateway")[0].spec["containers"]
        shell = container["lifecycle"]["preStop"]["exec"]["command"]
        assert shell[:2] == ["bash", "-c"]
        command = shell[2].replace("penstock ", f"{sys.executable} -m services.cli ")
        drained = subprocess.run(
            ["bash", "-c", command], env=pods.environments["gateway"], capture_output=True
        )
        assert drained.returncode == 0, drained.stderr
        assert gateway.id not in {r.id for r in await _replicas(pods.redis_url, "gateway")}
        process.terminate()
        assert process.wait(timeout=30) == 0


async def _probed(address: str) -> None:
    """As the kubelet asks: plain gRPC, no service named."""
    async with grpc.aio.insecure_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        answer = await check(health_pb2.HealthCheckRequest(), timeout=10)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def _rays_state_is_its_own(redis: ChartRedis) -> None:
    """Each user has written what it needs, and nothing was refused to either."""
    with redis.as_admin() as admin:
        prefixes = {key.split(":")[0].split("@")[0] for key in admin.scan_iter()}
        assert prefixes == {"penstock", "RAYthe-uid-of-a-cluster"}
    assert redis.refused() == []


def _speaks_tls(address: str, port: int, folder: Path) -> None:
    """Who shows a certificate of the cluster's is let in, and nobody else."""
    known = ssl.create_default_context(cafile=folder / "ca.crt")
    known.set_alpn_protocols(["h2"])

    def let_in() -> bool:
        with socket.create_connection((address, port), timeout=10) as plain:
            try:
                with known.wrap_socket(plain, server_hostname=address) as end:
                    return bool(end.recv(1))
            except (ssl.SSLError, ConnectionError):  # or the end without a word
                return False

    assert not let_in()
    known.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    assert let_in()


async def _answers_a_chat(door: str, redis_url: str) -> None:
    client = connect(redis_url)
    try:
        key, _ = await KeyStore(client, "penstock").create("someone")
    finally:
        await client.aclose()
    question = {"role": "user", "content": "What is a penstock?"}
    body = {"model": MODEL, "messages": [question], "max_tokens": 8}
    async with httpx.AsyncClient(base_url=door, timeout=120, trust_env=False) as api:
        lives = door.replace(":8000", ":9100/healthz")
        told = [(await api.get(url)).status_code for url in ("/readyz", lives)]
        assert told == [200, 200], "what the probes ask"
        answer = await api.post(
            "/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
        )
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"]
