"""What is measured, as processes: our three services with a Redis of their own, or LiteLLM's proxy,
before the fake engine; and a gateway alone, behind which a tokenizer makes up its texts.

A checkpoint is the demonstration model's tokenizer with a window in which 2 MB of text fit.
"""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from bench.front_door.engine import WINDOW
from bench.links import Child
from services.common.checkpoints.checkpoint import digest, text_digest
from services.common.children import dying_with_parent
from services.common.config import Settings
from services.common.discovery import Directory, Replica
from services.common.embedded_redis import EmbeddedRedis
from services.common.redis import connect
from services.common.served_models import Checkpoint, entry
from services.gateway.identity.keys import KeyStore

MODEL = "bench"
NAMESPACE = "bench-front-door"
SERVICES = ("router", "tokenizer", "gateway")
LITELLM = "litellm[proxy]==1.106.2"
_DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
_START_S = 180.0
_MOST = "16384"


@dataclass
class Door:
    """What is asked, and whose processor time that takes."""

    url: str
    key: str
    processes: dict[str, psutil.Process]
    engine: str = ""  # where its HTTP server is

    def cpu_s(self) -> dict[str, float]:
        return {name: _cpu_s(process) for name, process in self.processes.items()}

    def unique_bytes(self) -> dict[str, int]:
        """Memory that each has for itself."""
        return {n: int(p.memory_full_info().uss) for n, p in self.processes.items()}

    def left(self) -> dict[int, list[int]]:
        """When the engine's tokens left since the last look, ns, by request."""
        told = httpx.get(f"http://{self.engine}/left", timeout=60).json()
        return {int(key): stamps for key, stamps in told.items()}


def _cpu_s(process: psutil.Process) -> float:
    family = [process, *process.children(recursive=True)]
    return sum(sum(one.cpu_times()[:2]) for one in family)


@contextmanager
def services(folder: Path, pace: float) -> Iterator[Door]:
    """Gateway, tokenizer and router before the engine."""
    with ExitStack() as stack:
        variables, redis = stack.enter_context(_environment(folder))
        engine = Child(stack, "bench.front_door.engine", "--pace", str(pace), variables=variables)
        replicas = start(stack, variables, SERVICES)
        yield _door(variables, redis, replicas, engine.address)


@contextmanager
def gateway_alone(folder: Path, pace: float) -> Iterator[Door]:
    """Behind it the engine's own tokenizer service (scripted.py)."""
    with ExitStack() as stack:
        variables, redis = stack.enter_context(_environment(folder))
        engine = Child(stack, "bench.front_door.scripted", "--pace", str(pace), variables=variables)
        replicas = start(stack, variables, ("gateway",))
        yield _door(variables, redis, replicas, engine.address)


@contextmanager
def engine_alone(folder: Path, pace: float) -> Iterator[Door]:
    """The engine's own HTTP server: what asking it without any front door takes."""
    with ExitStack() as stack:
        variables, _ = stack.enter_context(_environment(folder))
        engine = Child(stack, "bench.front_door.engine", "--pace", str(pace), variables=variables)
        door = Door(f"http://{engine.address}", "none", {}, engine.address)
        _wait_until_answering(door)
        yield door


@contextmanager
def litellm(folder: Path, environment: Path, pace: float) -> Iterator[Door]:
    """LiteLLM's proxy before the same engine, one process of it, quiet, without a database."""
    with ExitStack() as stack:
        variables, _ = stack.enter_context(_environment(folder))
        engine = Child(stack, "bench.front_door.engine", "--pace", str(pace), variables=variables)
        config = folder / "litellm.json"  # which is YAML, too
        where = {"model": f"openai/{MODEL}", "api_base": f"http://{engine.address}/v1"}
        listed = [{"model_name": MODEL, "litellm_params": {**where, "api_key": "none"}}]
        master = {"master_key": "sk-bench"}
        config.write_text(json.dumps({"model_list": listed, "general_settings": master}))
        port = _free_port()
        command = [str(environment / "bin" / "litellm"), "--config", str(config)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
        quiet = {"LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION", "LITELLM_TELEMETRY": "False"}
        quiet["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # and asks nobody for prices
        clean = {n: v for n, v in os.environ.items() if not n.startswith("PYTHON")}
        with (folder / "litellm.log").open("wb") as log:
            process = stack.enter_context(
                subprocess.Popen(
                    [*dying_with_parent(), *command],
                    env=clean | quiet,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
        stack.callback(process.terminate)
        door = Door(
            f"http://127.0.0.1:{port}",
            "sk-bench",
            {"litellm": psutil.Process(process.pid)},
            engine.address,
        )
        _wait_until_answering(door)
        yield door


def start(
    stack: ExitStack, variables: dict[str, str], services: tuple[str, ...]
) -> dict[str, Replica]:
    """Starts the services and waits until they are registered."""
    for service in services:
        command = [*dying_with_parent(), sys.executable, "-m", f"services.{service}"]
        process = stack.enter_context(subprocess.Popen(command, env=variables))
        stack.callback(process.terminate)
    return asyncio.run(_registered(_settings(variables), services))


def _door(
    variables: dict[str, str], redis: EmbeddedRedis, replicas: dict[str, Replica], engine: str
) -> Door:
    processes = {name: psutil.Process(one.pid) for name, one in replicas.items()}
    processes["redis"] = psutil.Process(redis.pid)
    key = asyncio.run(_make_key(_settings(variables)))
    door = Door(replicas["gateway"].facts["url"], key, processes, engine)
    _wait_until_answering(door)
    return door


def make_checkpoint(folder: Path) -> None:
    """What a tokenizer needs of one."""
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        shutil.copy(_DEMO / file, folder / file)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = WINDOW
    (folder / "config.json").write_text(json.dumps(config))


@contextmanager
def _environment(folder: Path) -> Iterator[tuple[dict[str, str], EmbeddedRedis]]:
    """Settings of all services as environment variables, with a Redis that lives as long."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir(exist_ok=True)
    make_checkpoint(checkpoint)
    with EmbeddedRedis() as redis:
        asyncio.run(_list_model(redis.url, checkpoint))
        variables = {
            "PENSTOCK_REDIS_URL": redis.url,
            "PENSTOCK_NAMESPACE": NAMESPACE,
            "PENSTOCK_MODELS": json.dumps([{"name": MODEL, "path": str(checkpoint)}]),
            "PENSTOCK_GATEWAY__PORT": "0",
            "PENSTOCK_GATEWAY__GRPC_PORT": "0",
            "PENSTOCK_GATEWAY__MAX_REQUESTS": _MOST,
            "PENSTOCK_GATEWAY__MAX_CONNECTIONS": _MOST,
            "PENSTOCK_TOKENIZER__MAX_REQUESTS": _MOST,
            "PENSTOCK_ROUTER__MAX_REQUESTS": _MOST,
            "PENSTOCK_LOG_LEVEL": "WARNING",
            "PENSTOCK_DRAIN_GRACE_S": "0",
        }
        yield {**os.environ, **variables}, redis


async def _list_model(redis_url: str, checkpoint: Path) -> None:
    """As a worker would: the one of the measurement knows nothing of models."""
    redis = connect(redis_url)
    listed = Checkpoint(MODEL, digest(checkpoint), text_digest(checkpoint), str(checkpoint))
    await entry(redis, Settings(namespace=NAMESPACE), listed).start()
    await redis.aclose()


def _settings(variables: dict[str, str]) -> Settings:
    return Settings(redis_url=variables["PENSTOCK_REDIS_URL"], namespace=NAMESPACE)


async def _registered(settings: Settings, services: tuple[str, ...]) -> dict[str, Replica]:
    redis = connect(settings.redis_dsn)
    found: dict[str, Replica] = {}
    async with asyncio.timeout(_START_S):
        for service in services:
            view = Directory(redis, settings.namespace, service, settings.lease_s)
            while not view.replicas:
                await view.refresh()
                await asyncio.sleep(0.1)
            [found[service]] = view.replicas.values()
    await redis.aclose()
    return found


async def _make_key(settings: Settings) -> str:
    redis = connect(settings.redis_dsn)
    key, _ = await KeyStore(redis, settings.namespace).create("bench")
    await redis.aclose()
    return key


def body(number: int, tokens: int, prompt_bytes: int = 0) -> bytes:
    """Of one chat, streamed; `prompt_bytes`: of text before its number."""
    words = "the keeper opens the gate and the river runs to the valley "
    text = (words * (prompt_bytes // len(words) + 1))[:prompt_bytes]
    messages = [
        {"role": "system", "content": "You answer in few words."},
        {"role": "user", "content": f"{text} #{number}# What does the keeper of the gate do?"},
    ]
    asked = {"model": MODEL, "messages": messages, "max_tokens": tokens, "stream": True}
    return json.dumps(asked).encode()


def _wait_until_answering(door: Door) -> None:
    """Asks for one token until it comes; raises RuntimeError with the last answer."""
    headers = {"Authorization": f"Bearer {door.key}", "Content-Type": "application/json"}
    deadline = time.monotonic() + _START_S
    said = ""
    while time.monotonic() < deadline:
        try:
            url = f"{door.url}/v1/chat/completions"
            answer = httpx.post(url, content=body(0, 1), headers=headers, timeout=30)
        except httpx.HTTPError as error:
            said = repr(error)
        else:
            if answer.status_code == 200:
                return
            said = answer.text
        time.sleep(0.2)
    raise RuntimeError(f"{door.url} does not answer: {said}")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
