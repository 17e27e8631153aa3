"""The Ray Serve graph: every service a deployment, each bound to the next one of a request's way.

Serve places, health-checks, restarts, scales and upgrades the replicas. It carries no request:
each replica hosts the service's own servers (services/common/service.py) and registers them in
Redis, where its callers find it. So losing Serve's controller does not touch a running stream.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve._private import replica as serve_replica

from services.common.config import ModelSpec, Settings
from services.common.discovery import Replica as Registered
from services.common.redis import connect
from services.common.service import Host, Service
from services.common.start_failures import StartFailure, tell
from services.common.transport import host_port

APPLICATION = "penstock"
_SERVICES = {
    "gateway": "GatewayService",
    "retrieval": "RetrievalService",
    "tokenizer": "TokenizerService",
    "router": "RouterService",
    "worker": "WorkerService",
}


def service_class(name: str) -> type[Service]:
    """Imported only where it runs: a gateway's process has no need of torch."""
    found: type[Service] = getattr(import_module(f"services.{name}.server"), _SERVICES[name])
    return found


class Replica:
    """One replica of a service under Serve.

    `_next` is not called: it makes the graph show the way, and Serve start the far end first.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, service: str, settings: Settings, *_next: Any
    ) -> None:
        _bind_serve(settings.bind_host)
        try:
            self._host = Host(service_class(service), settings)
            await self._host.start()
        except Exception as error:
            await _tell_failure(settings, service, error)
            raise

    async def registered(self) -> Registered | None:
        """What the registry says of this replica."""
        return self._host.replica

    async def check_health(self) -> None:
        """Raises when the replica should be replaced: its own idea of health, not the port's."""
        self._host.check()

    async def __del__(self) -> None:
        await self._host.stop()


def _bind_serve(host: str) -> None:
    """Serve opens a server of its own in each replica once it is initialized, for calls between
    deployments, which nobody here makes; on all interfaces, and no setting says otherwise."""
    module: Any = serve_replica
    bind = module.add_port_to_grpc_server
    module.add_port_to_grpc_server = lambda server, _: bind(server, host_port(host, 0))


async def _tell_failure(settings: Settings, service: str, error: Exception) -> None:
    """Serve tells only that a deployment failed; whoever waits for this one wants to know why."""
    model = settings.worker.model
    who = f"{settings.worker.role} worker of {model}" if service == "worker" else service
    failure = StartFailure(who, why=str(error) or repr(error), log=_log())
    redis = connect(settings.redis_url)
    try:
        await tell(redis, settings.namespace, failure)
    finally:
        await redis.aclose()


def _log() -> str:
    """The file that Ray points this process's standard error to, where the kernel tells."""
    stderr = Path("/proc/self/fd/2")
    return str(stderr.readlink()) if stderr.exists() else ""


def _deployment(name: str, service: str, settings: Settings, replicas: int, *following: Any) -> Any:
    deployment: Any = serve.deployment(
        name=name,
        num_replicas=replicas,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=2,
        health_check_timeout_s=10,
        # Serve must outwait the drain, or it would cut the streams that still run.
        graceful_shutdown_timeout_s=settings.drain_grace_s + 10,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=2,
    )(Replica)
    return deployment.bind(service, settings, *following)


def _workers(settings: Settings, model: ModelSpec, role: str, replicas: int) -> Any:
    options = settings.worker.model_copy(update={"role": role, "model": model.name})
    own = settings.model_copy(update={"worker": options})
    return _deployment(f"{role}-{model.name}", "worker", own, replicas)


def build(settings: Settings, *, prefill: int, decode: int) -> Any:
    """The application, for `serve.run`.

    `prefill` and `decode` workers serve each model; with no prefill workers the decode workers
    compute prompts as well.
    """
    pools = {"prefill": prefill, "decode": decode} if prefill else {"both": decode}
    workers = [
        _workers(settings, model, role, replicas)
        for model in settings.models
        for role, replicas in pools.items()
    ]
    router = _deployment("router", "router", settings, settings.router.count, *workers)
    tokenizer = _deployment("tokenizer", "tokenizer", settings, settings.tokenizer.count, router)
    retrieval = _deployment("retrieval", "retrieval", settings, settings.retrieval.replicas)
    return _deployment("gateway", "gateway", settings, 1, tokenizer, retrieval)
