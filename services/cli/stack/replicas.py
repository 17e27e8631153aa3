"""The replicas that a stack has: how many, what they are called, whether Ray has room for them."""

from collections import Counter
from collections.abc import Collection

from services.common.config import ModelSpec, Settings, WorkerSettings
from services.common.discovery import SERVICES, Directory, Replica


def wanted(settings: Settings) -> dict[tuple[str, str], int]:
    """How many replicas of each (service, what to call it) there must be."""
    wanted = {(name, name): settings.replicas_of(name) for name in SERVICES if name != "worker"}
    for model in settings.models:
        wanted |= workers_of(model)
    return wanted


def workers_of(model: ModelSpec) -> dict[tuple[str, str], int]:
    """Of one model, likewise."""
    pools = model.pools.items()
    return {("worker", _worker(role, model.name)): pool.replicas for role, pool in pools}


def check_room(settings: Settings, has: dict[str, float]) -> None:
    """Raises RuntimeError when the replicas take more than Ray has: some would wait for ever."""
    takers = [
        (f"PENSTOCK_{name.upper()}__RAY", settings.replicas_of(name), settings.of_service(name).ray)
        for name in SERVICES
        if name != "worker"
    ]
    for model in settings.models:
        for role, pool in model.pools.items():
            worker = settings.of_worker(model, role).worker
            takers.append((f"the {_worker(role, model.name)}", pool.replicas, worker.ray))
            _check_nodes(_worker(role, model.name), worker, has)
    taken: Counter[str] = Counter()
    for who, replicas, ray in takers:
        for resource, amount in {"CPU": ray.num_cpus, "GPU": ray.num_gpus, **ray.resources}.items():
            taken[resource] += replicas * amount  # type: ignore[assignment]
            if taken[resource] > (there := has.get(resource, 0.0)):
                raise RuntimeError(
                    f"{who}: with {replicas} of it all replicas take {taken[resource]:g} of "
                    f"{resource}, and Ray has {there:g}"
                )


def _check_nodes(who: str, worker: WorkerSettings, has: dict[str, float]) -> None:
    """Raises RuntimeError where its ranks want more nodes than Ray has."""
    strategy, ranks = worker.placement_group_strategy, worker.tensor_parallel
    nodes = sum(name.startswith("node:") and "__" not in name for name in has)
    if strategy == "STRICT_SPREAD" and ranks > nodes:
        raise RuntimeError(
            f"the {who}: placement_group_strategy {strategy!r} puts {ranks} ranks on a node each, "
            f"and Ray has {nodes}"
        )


def _worker(role: str, model: str) -> str:
    """What a worker is called: "prefill worker of demo"; of both roles "worker of demo"."""
    return f"worker of {model}" if role == "both" else f"{role} worker of {model}"


def of_worker(replica: Replica) -> str:
    """What a registered worker is called."""
    return _worker(replica.facts["role"], replica.facts["model"])


def _label(replica: Replica) -> str:
    return of_worker(replica) if replica.service == "worker" else replica.service


def missing(
    wanted: dict[tuple[str, str], int], views: dict[str, Directory], but: Collection[str] = ()
) -> list[str]:
    """What of it is not registered; replicas with the ids of `but` do not count."""

    listed = (replica for view in views.values() for replica in view.replicas.values())
    found = [_label(replica) for replica in listed if replica.id not in but]
    return [name for (_, name), count in wanted.items() if found.count(name) < count]
