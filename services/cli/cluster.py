"""Penstock on a Ray cluster that exists: `penstock up --address`, `penstock down --address`.

What several hosts share is nobody's to start here: Redis and Qdrant are given by URL. Nothing is
deployed before all that can be known from here has been checked.
"""

import argparse
import asyncio
import signal
import ssl
import threading
from ipaddress import ip_address
from urllib.parse import urlsplit

import httpx
from pydantic import SecretStr

from services.cli.joined_ray import JoinedRay
from services.cli.running import Running
from services.cli.stack import Report, Stack
from services.common.config import AUTO, ModelSpec, Settings
from services.common.secrets import redacted

_TIMEOUT_S = 5.0


class ClusterStack(Stack):
    """As a Stack, but on the nodes of a cluster that was there before and stays.

    Where nothing else is set, replicas listen on the address of the node that they run on.
    """

    def __init__(self, settings: Settings, *, report: Report, address: str) -> None:
        """Raises ValueError that names what is missing."""
        _check_given(settings)
        super().__init__(_on_nodes(settings), report=report)
        self._ray: JoinedRay = JoinedRay(address, settings)  # type: ignore[assignment]
        self._before = False  # whether Penstock was there
        self._up = False
        self._detached = False

    def __enter__(self) -> Running:
        running = super().__enter__()
        self._up = True
        return running

    def detach(self) -> None:
        """What was deployed stays, when this process ends."""
        self._detached = True

    def _local_models(self) -> list[ModelSpec]:
        """They lie on the hosts of the workers, which this one need not be."""
        return self._settings.models

    def _check_door(self) -> None:
        own = self._settings
        if own.gateway.tls_cert is None:
            self._report(
                "the door has no TLS: keys and texts travel in the clear; see "
                "PENSTOCK_GATEWAY__TLS_CERT"
            )
        if own.tls_dir is None:
            self._report(
                "no TLS between the services: their secret and all texts travel in the "
                "clear; see PENSTOCK_TLS_DIR"
            )

    def _start_redis(self) -> Settings:
        settings = super()._start_redis()
        asyncio.run(_check_qdrant(settings))
        return settings

    def _start_ray(self) -> None:
        super()._start_ray()
        from services.app import deployed

        self._before = bool(deployed())
        nodes = self._ray.nodes()
        self._report(f"ray: a cluster of {len(nodes)} nodes: {', '.join(sorted(nodes))}")
        if not all(_loopback(node) for node in nodes):
            _check_reached_from_elsewhere(self._settings)

    def _take_down(self) -> None:
        """Not what was there before, when what should replace it does not start."""
        stays = self._detached if self._up else self._before
        if not stays:
            super()._take_down()


def _check_given(settings: Settings) -> None:
    needed = {
        "PENSTOCK_REDIS_URL": "redis_url" in settings.model_fields_set,
        "PENSTOCK_QDRANT_URL": bool(settings.qdrant_url),
        "PENSTOCK_INTERNAL_SECRET": bool(settings.internal_secret.get_secret_value()),
    }
    missing = [name for name, given in needed.items() if not given]
    if missing:
        raise ValueError(
            f"--address needs {', '.join(missing)}: what the hosts of a cluster share is not "
            "started here"
        )
    if urlsplit(settings.redis_dsn).scheme == "unix":
        raise ValueError("setting PENSTOCK_REDIS_URL: other hosts do not reach a socket")


def _on_nodes(settings: Settings) -> Settings:
    changes: dict[str, object] = {
        "ray_token": SecretStr(""),
        "ray_token_file": None,
    }  # not the replicas'
    if "bind_host" not in settings.model_fields_set:
        changes["bind_host"] = AUTO
    if "host" not in settings.gateway.model_fields_set:
        changes["gateway"] = settings.gateway.model_copy(update={"host": AUTO})
    return settings.model_copy(update=changes)


def _check_reached_from_elsewhere(settings: Settings) -> None:
    for name, url in (
        ("PENSTOCK_REDIS_URL", settings.redis_dsn),
        ("PENSTOCK_QDRANT_URL", settings.qdrant_url),
    ):
        if _loopback(urlsplit(url).hostname or ""):
            raise RuntimeError(f"setting {name}: the cluster's other hosts do not reach a loopback")


def _loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


async def _check_qdrant(settings: Settings) -> None:
    """Raises RuntimeError when it does not answer, or not to us."""
    url, key = settings.qdrant_url.rstrip("/"), settings.qdrant_api_key.get_secret_value()
    try:
        verify = ssl.create_default_context(cafile=settings.qdrant_ca)
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, verify=verify) as http:
            answer = await http.get(f"{url}/collections", headers={"api-key": key} if key else {})
    except (httpx.HTTPError, OSError) as error:
        raise RuntimeError(f"Qdrant at {redacted(url)}: {error or type(error).__name__}") from error
    if not answer.is_success:
        raise RuntimeError(f"Qdrant at {redacted(url)}: {answer.status_code} {answer.text[:200]}")


def main(arguments: argparse.Namespace, settings: Settings, report: Report) -> int:
    """`penstock up --address`: until Ctrl-C, which takes Penstock down, or until it is up."""
    stack = ClusterStack(settings, report=report, address=arguments.address)
    stopped = threading.Event()
    with stack as running:
        signal.signal(signal.SIGTERM, lambda *_: stopped.set())
        signal.signal(signal.SIGINT, lambda *_: stopped.set())
        print(
            f"""
Penstock is up.
  API      {running.url}/v1   (OpenAI-compatible)
  gRPC     {running.grpc}   (penstock.v1.Inference)
  key      {stack.told_key(running)}

  penstock status    see what runs, and where
{_HOW_IT_ENDS[arguments.detach]}
""",
            flush=True,
        )
        if arguments.detach:
            stack.detach()
            return 0
        stopped.wait()
        report("draining")
    return 0


_HOW_IT_ENDS = {
    False: "Ctrl-C takes it down: running streams finish first.",
    True: "It stays up; `penstock down` takes it down.",
}
