"""Under Ray: places for the ranks of a worker's model on the nodes of its placement group.

A bundle of the group is a rank's. The worker is in the first; each other one is held by an actor, a
seat, which says what is there and, where that is another node, keeps the rank (engine/parallel).
"""

import asyncio
import secrets
import threading
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import get_current_placement_group, get_node_ip_address
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from services.common.checkpoints.checkpoint import digest, locate
from services.common.config import ModelSpec, Settings
from services.common.locks.certificates import dns_name
from services.common.telemetry.logs import configure_logging
from services.common.versions import version
from services.worker.engine.parallel.keeper import keep
from services.worker.engine.parallel.links import listen
from services.worker.engine.parallel.seats import Lock, Seat, Spread

_PLACED_WITHIN_S = 60.0
"""The group is there; what has to start is an actor in it."""


@dataclass(frozen=True, slots=True)
class _Place:
    """What a seat tells of itself."""

    node: str
    host: str
    gpus: str
    version: str


class _Holder:
    """An actor, which ends with the worker that has made it; so does the rank that it keeps."""

    def place(self, log_level: str) -> _Place:
        configure_logging("worker", log_level)
        context = ray.get_runtime_context()
        gpus = ",".join(context.get_accelerator_ids().get("GPU", ()))
        return _Place(context.get_node_id(), get_node_ip_address(), gpus, version())

    def checkpoint(self, model: str, quantization: str) -> tuple[str, str]:
        """The model's folder on this node, downloaded first where it is a hub's, and its digest."""
        folder = locate(ModelSpec.model_validate_json(model))
        return str(folder), digest(folder, quantization)

    def keep(self, rank: int, lock: Lock, engine: str) -> int:
        """Where the engine, from that address, reaches the rank's keeper: a port."""
        listener = listen(get_node_ip_address())
        port: int = listener.getsockname()[1]
        threading.Thread(target=keep, args=(listener, lock, rank, engine), daemon=True).start()
        return port


_Actor: Any = ray.remote(max_restarts=0)(_Holder)


class Seats:
    """Those of one worker, as long as it holds them."""

    def __init__(self, settings: Settings) -> None:
        """Raises ValueError where there is no placement group."""
        ranks = settings.worker.tensor_parallel
        group = get_current_placement_group() if ray.is_initialized() else None
        if group is None or group.bundle_count != ranks:
            raise ValueError(
                f"placement_group_strategy {settings.worker.placement_group_strategy!r}: Ray gives "
                "ranks their hosts, and this worker does not run in a placement group of Ray's "
                f"with {ranks} bundles; without Ray it is 'STRICT_PACK'"
            )
        self._settings = settings
        share = settings.worker.share
        self._seats: list[Any] = [
            _Actor.options(
                **share.model_dump(),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=rank
                ),
            ).remote()
            for rank in range(1, ranks)
        ]

    async def spread(self, model: ModelSpec, folder: str, as_loaded: str) -> Spread:
        """`folder`, `as_loaded`: of the checkpoint here, and its digest. Raises ValueError where a
        node has another one, or another version of Penstock, TimeoutError where a seat does not
        come, and what Ray raises where its node is lost."""
        level = self._settings.log_level
        places: list[_Place] = await asyncio.wait_for(
            asyncio.gather(*(seat.place.remote(level) for seat in self._seats)), _PLACED_WITHIN_S
        )
        own = ray.get_runtime_context().get_node_id()
        lock = _lock(self._settings)
        found = [Seat(get_node_ip_address(), folder)]
        found += [Seat(found[0].host, folder, gpu=place.gpus) for place in places]
        away = [rank for rank, place in enumerate(places, 1) if place.node != own]
        folders = await asyncio.gather(
            *(self._folder(rank, places[rank - 1], model, as_loaded) for rank in away)
        )
        # Together, and behind all downloads: a keeper does not wait for the engine for ever.
        ports = await asyncio.gather(
            *(self._seat(rank).keep.remote(rank, lock, found[0].host) for rank in away)
        )
        for rank, its, port in zip(away, folders, ports, strict=True):
            found[rank] = Seat(places[rank - 1].host, its, port)
        return Spread(tuple(found), lock)

    def leave(self) -> None:
        """Ends what they keep."""
        for seat in self._seats:
            ray.kill(seat)
        self._seats = []

    def _seat(self, rank: int) -> Any:
        return self._seats[rank - 1]

    async def _folder(self, rank: int, place: _Place, model: ModelSpec, as_loaded: str) -> str:
        where = f"rank {rank} at {place.host}"
        if place.version != version():
            raise ValueError(f"{where}: Penstock {place.version} runs there, {version()} here")
        quantization = self._settings.worker.quantization
        rounded = "" if quantization == "auto" else quantization
        told = await self._seat(rank).checkpoint.remote(model.model_dump_json(), rounded)
        folder, its = told
        if its != as_loaded:
            raise ValueError(f"{where}: {folder} holds another checkpoint than {model.path} here")
        return str(folder)


def _lock(settings: Settings) -> Lock:
    """With a secret of these ranks alone."""
    if settings.tls_dir is None:
        return Lock(secrets.token_bytes(32))
    folder = settings.tls_dir / "worker"
    return Lock(secrets.token_bytes(32), str(folder), dns_name("worker"))
