"""Where Serve puts a deployment's replicas: what it is told of nodes and of what they have."""

from math import ceil
from typing import Any

from services.common.config import RayOptions, WorkerSettings


def on_nodes(replicas: int, ray: RayOptions, nodes: int) -> dict[str, Any]:
    """Where Serve puts replicas, each on one of `nodes`."""
    most = _most(replicas, ray, nodes)
    return {"ray_actor_options": ray.model_dump(), "max_replicas_per_node": most}


def spread(worker: WorkerSettings) -> dict[str, Any]:
    """Likewise of a worker whose ranks may be on several nodes: a placement group of its own, with
    a bundle for each rank. The worker itself is in the first one, with the first rank."""
    share = worker.share
    takes = {"CPU": share.num_cpus, "GPU": share.num_gpus, **share.resources}
    # Ray takes no bundle of nothing: a byte of memory, of which each node has some.
    bundle = {name: amount for name, amount in takes.items() if amount} or {"memory": 1}
    return {
        "ray_actor_options": share.model_dump(),
        "placement_group_bundles": [bundle] * worker.tensor_parallel,
        "placement_group_strategy": worker.placement_group_strategy,
    }


def _most(replicas: int, ray: RayOptions, nodes: int) -> int | None:
    """How many replicas of a deployment one of `nodes` may have, so that the loss of one leaves
    others. Those that ask for resources go where these are; Serve spreads them as it can."""
    if nodes <= 1 or ray.asks_for_something:
        return None
    return min(ceil(replicas / nodes), 100)  # of which 100 are Serve's most
