"""The Ray Serve graph: every service a deployment; an application for the services, and one for
each model, so that adding a model restarts nothing else.

Serve places, health-checks, restarts, scales and upgrades the replicas. It carries no request:
each replica hosts the service's own servers (services/common/service.py) and registers them in
Redis, where its callers find it. So losing Serve's controller does not touch a running stream.

`penstock up` deploys what `build` makes of its settings. A Serve config names `application` and
`model` as import paths; there each replica reads the settings of its own environment, since a
node's addresses and certificates are its own.
"""

import logging
import time
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import Field, SecretStr
from ray import nodes as ray_nodes
from ray import serve
from ray.serve._private import replica as serve_replica
from ray.serve._private.constants import SERVE_LOGGER_NAME
from ray.util import get_node_ip_address

from services.common.config import ModelSpec, RayOptions, Section, Settings
from services.common.config.stores import StoreSettings
from services.common.discovery import Replica as Registered
from services.common.redis import connect
from services.common.service import Host, Service
from services.common.start_failures import StartFailure, tell
from services.common.transport import host_port
from services.placing import on_nodes, spread
from services.post import Post

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.1
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

    `_next` is not called: Serve wants an application's deployments to hang together.
    """

    async def __init__(self, sealed: SecretStr, *_next: Any) -> None:  # type: ignore[misc]  # Serve awaits
        post = Post.read(sealed)
        stores = post.stores()
        try:
            settings = post.own_settings().on_node(get_node_ip_address())
            _bind_serve(settings.bind_host)
            _take_logs_of_ray()
            self._host = Host(service_class(post.service), settings)
            await self._host.start()
        except Exception as error:
            log.exception("%s did not start", post)  # in the file that the failure names
            await _tell_failure(stores, str(post), error)
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


def _take_logs_of_ray() -> None:
    """Its lines of this process go where ours do, as JSON. Serve's own file would be one
    more thing to fail on a full disk."""
    for name in (SERVE_LOGGER_NAME, "ray"):
        its = logging.getLogger(name)
        for handler in its.handlers[:]:
            its.removeHandler(handler)
            handler.close()
        its.propagate = True


async def _tell_failure(stores: StoreSettings, who: str, error: Exception) -> None:
    """Serve tells only that a deployment failed; whoever waits for this one wants to know why."""
    failure = StartFailure(who, why=str(error) or repr(error), log=_log())
    redis = connect(stores.redis_dsn)
    try:
        await tell(redis, stores.namespace, failure)
    finally:
        await redis.aclose()


def _log() -> str:
    """The file that Ray points this process's standard error to, if it is one and the kernel tells:
    under RAY_LOG_TO_STDERR it is that of `ray start`."""
    stderr = Path("/proc/self/fd/2")
    return str(stderr.readlink()) if stderr.is_file() else ""


class ServiceScale(Section):
    replicas: int | None = Field(None, ge=1, description="unset: as the settings say")
    ray: RayOptions | None = Field(None, description="unset: as the settings say")


class Scale(Section):
    """Arguments of `application`: a Serve config scales the services here while it runs, which
    their environment would take new pods for."""

    gateway: ServiceScale | None = Field(
        ServiceScale(),
        description="null: gateways run outside of Ray, `python -m services.gateway`",
    )
    retrieval: ServiceScale = ServiceScale()
    tokenizer: ServiceScale = ServiceScale()
    router: ServiceScale = ServiceScale()


def application_name(namespace: str, model: str = "") -> str:
    """What Serve calls the application of one model; without one, that of the services. Several
    Penstocks may share a Ray: each has a namespace of its own, in which there is no colon. Without
    slashes, which models' names may have: from a Serve config it becomes a file's name."""
    return f"{namespace}:{model.replace('/', '~')}" if model else namespace


def application(scale: Scale) -> Any:
    """The services' application, for a Serve config (`import_path: services.app:application`).

    Raises ValueError that names a wrong argument or setting.
    """
    settings = Settings()
    for service, its in scale:
        changes = {name: value for name, value in its or () if value is not None}
        setattr(settings, service, settings.of_service(service).model_copy(update=changes))
    return _services(settings, None, gateways=scale.gateway is not None)


def model(spec: ModelSpec) -> Any:
    """One model's application, for a Serve config (`import_path: services.app:model`; its
    arguments are a ModelSpec). Raises ValueError that names a wrong argument or setting.
    """
    settings = Settings()
    count = settings.worker.replicas
    return _model(settings, None, spec.sized(count, count))


def build(settings: Settings, nodes: int = 1) -> dict[str, Any]:
    """All applications by name, for `serve.run_many` on a Ray of so many nodes."""
    # The services learn of models from the workers: one that is removed leaves nothing behind.
    services = settings.model_copy(update={"models": []})
    applications = {"": _services(services, services, nodes)}
    applications |= {m.name: _model(settings, settings, m, nodes) for m in settings.models}
    return {application_name(settings.namespace, m): its for m, its in applications.items()}


def start_serve() -> None:
    """Without HTTP proxies of its own: they would listen on each node, and let in anybody. Where it
    runs already it is left as it is."""
    serve.start(proxy_location="Disabled")


def deploy(settings: Settings) -> None:
    """Deploys everything, or what of it has changed; returns before it runs.

    What Serve runs already is replaced step by step, as after a change of the code."""
    _run(build(settings, _nodes()))


def deploy_model(settings: Settings, spec: ModelSpec) -> None:
    """Deploys one model's workers; returns before they run."""
    name = application_name(settings.namespace, spec.name)
    _run({name: _model(settings, settings, spec, _nodes())})


def delete_model(namespace: str, name: str) -> None:
    """Returns when its workers have drained and ended."""
    _delete([application_name(namespace, name)])


def delete_all(namespace: str, but: Collection[str] = ()) -> None:
    """Drains the services and then the workers; returns when all have ended, what is deployed
    meanwhile included. `but` stay."""
    services = application_name(namespace)
    while names := [name for name in deployed(namespace) if name not in but]:
        _delete([name for name in names if name == services])
        _delete([name for name in names if name != services])


def _delete(names: list[str]) -> None:
    """All at once; returns when they have ended, which Serve sees to within the drains' time. Not
    by Serve's own waiting: that gives up after a minute, and a drain may take longer."""
    for name in names:
        serve.delete(name, _blocking=False)
    while set(names) & set(serve.status().applications):
        time.sleep(_LOOK_EVERY_S)


def deployed(namespace: str) -> list[str]:
    """The applications of this Penstock that Serve runs, the services' first."""
    services, names = application_name(namespace), list(serve.status().applications)
    models = [name for name in names if name.startswith(f"{services}:")]
    return [services] * (services in names) + models


def deployed_models(namespace: str) -> list[str]:
    """The models of which Serve runs an application."""
    services = application_name(namespace)
    names = (name.removeprefix(f"{services}:") for name in deployed(namespace) if name != services)
    return [name.replace("~", "/") for name in names]


def _nodes() -> int:
    return sum(node["Alive"] for node in ray_nodes())


def _run(applications: dict[str, Any]) -> None:
    targets = [
        serve.RunTarget(application, name=name, route_prefix=None)
        for name, application in applications.items()
    ]
    start_serve()  # who shared it may have shut it down; Serve would start it with proxies
    serve.run_many(targets, wait_for_applications_running=False)


def _services(
    settings: Settings, told: Settings | None, nodes: int = 1, gateways: bool = True
) -> Any:
    """By `settings`; its replicas have those that they are `told`, or their environments'."""

    def deployment(service: str, *following: Any) -> Any:
        replicas, ray = settings.replicas_of(service), settings.of_service(service).ray
        post, place = Post.of(service, told), on_nodes(replicas, ray, nodes)
        return _deployment(service, post, settings, replicas, place, *following)

    router, retrieval = deployment("router"), deployment("retrieval")
    if not gateways:
        return deployment("tokenizer", router, retrieval)
    return deployment("gateway", deployment("tokenizer", router), retrieval)


def _model(settings: Settings, told: Settings | None, spec: ModelSpec, nodes: int = 1) -> Any:
    """One model's workers, by `settings` and as `told` likewise."""
    chain: tuple[Any, ...] = ()
    for role in spec.pools:
        own = settings.of_worker(spec, role).worker
        post = Post.of("worker", told, spec, role)
        name = f"{role}-{spec.name}"
        place = spread(own) if own.is_spread else on_nodes(own.replicas, own.ray, nodes)
        chain = (_deployment(name, post, settings, own.replicas, place, *chain),)
    return chain[0]


def _deployment(
    name: str,
    post: Post,
    settings: Settings,
    replicas: int,
    place: dict[str, Any],
    *following: Any,
) -> Any:
    deployment: Any = serve.deployment(
        name=name,
        num_replicas=replicas,
        **place,
        health_check_period_s=1,
        health_check_timeout_s=5,
        # Serve must outwait the drain, or it would cut the streams that still run.
        graceful_shutdown_timeout_s=settings.drains_within_s + 10,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=2,
    )(Replica)
    return deployment.bind(post.sealed(), *following)
