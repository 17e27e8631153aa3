"""`penstock models`: what is served; models added to and removed from a running `penstock up`."""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from services.cli.checkpoints import made_local
from services.cli.console import console, folding_table
from services.cli.replicas import missing, workers_of
from services.cli.running import Running, find_running
from services.cli.wanted_models import Look, WantedModels
from services.common.config import ModelSpec, Settings
from services.common.discovery import Directory
from services.common.redis import connect
from services.common.served_models import ServedModels

_LOOK_EVERY_S = 0.5


def main(arguments: argparse.Namespace) -> int:
    settings = Settings()
    running = find_running(settings)
    if running is None:
        raise RuntimeError(
            f"no `penstock up` runs with the data directory {settings.data_dir}; "
            "on Kubernetes the models are those of the chart's values"
        )
    return asyncio.run(_run(arguments, settings, running))


async def _run(arguments: argparse.Namespace, settings: Settings, running: Running) -> int:
    redis = connect(running.redis_url)
    settings = settings.model_copy(update={"namespace": running.namespace})
    wanted = WantedModels(redis, running.namespace)
    workers = Directory(redis, running.namespace, "worker", settings.lease_s)
    served = ServedModels(redis, settings)
    try:
        await workers.start()
        await served.start()
        if arguments.action == "add":
            await _add(_spec(arguments, settings), wanted, workers, served)
        elif arguments.action == "remove":
            await _remove(arguments.name, wanted)
        else:
            console().print(_table(await wanted.look(), workers, served))
    finally:
        await served.stop()
        await workers.stop()
        await redis.aclose()
    return 0


def _spec(arguments: argparse.Namespace, settings: Settings) -> ModelSpec:
    """Raises ValueError that names a wrong argument, RuntimeError for a wrong checkpoint."""
    folder = Path(arguments.path).expanduser()
    path = str(folder.resolve()) if folder.is_dir() else arguments.path
    told: dict[str, Any] = {"name": arguments.name or path.rstrip("/").split("/")[-1], "path": path}
    if arguments.worker:
        try:
            told["worker"] = json.loads(arguments.worker)
        except ValueError as error:
            raise ValueError(f"--worker: not JSON: {error}") from None
    count = settings.worker.replicas
    sizes = (count if n is None else n for n in (arguments.prefill, arguments.decode))
    return made_local(ModelSpec.model_validate(told).sized(*sizes), _report)


async def _add(
    spec: ModelSpec, wanted: WantedModels, workers: Directory, served: ServedModels
) -> None:
    """Returns when it is served."""
    if not await wanted.add(spec):
        raise RuntimeError(
            f"there is a model called {spec.name!r}, or one that still ends; remove it, or give "
            "--name"
        )
    said: list[str] = []
    while left := missing(workers_of(spec), {"worker": workers}) or _unknown(spec.name, served):
        now = await wanted.look()
        if spec.name not in now.specs:
            why = now.failures.get(spec.name, "it was removed meanwhile")
            raise RuntimeError(f"model {spec.name!r} is not served: {why}")
        if left != said:
            _report("waiting for: " + ", ".join(left))
            said = left
        await asyncio.sleep(_LOOK_EVERY_S)
    print(f"{spec.name} is served")


async def _remove(name: str, wanted: WantedModels) -> None:
    """Returns when its last request has ended and nobody knows of it."""
    if not await wanted.remove(name):
        names = ", ".join(await wanted.all()) or "none"
        raise RuntimeError(f"there is no model called {name!r}; there are: {names}")
    _report("running requests finish first")
    while (await wanted.look()).leaves(name):  # noqa: ASYNC110 - Redis has no event for it
        await asyncio.sleep(_LOOK_EVERY_S)
    print(f"{name} is removed")


def _unknown(name: str, served: ServedModels) -> list[str]:
    return [] if name in served.all() else [f"model {name}"]


def _of(name: str, workers: Directory) -> list[str]:
    """The ids of its workers."""
    return [w.id for w in workers.replicas.values() if w.facts.get("model") == name]


def _table(wanted: Look, workers: Directory, served: ServedModels) -> Table:
    table = folding_table("model", "checkpoint", "workers", "state")
    known = {**served.all(), **wanted.specs}
    for name in sorted({*known, *wanted.failures, *wanted.odd}):
        path = known[name].path if name in known else ""
        table.add_row(name, path, str(len(_of(name, workers))), _state(name, wanted, workers))
    return table


def _state(name: str, wanted: Look, workers: Directory) -> str:
    if name in wanted.odd:
        return "what Redis says of it is no model; remove it"
    if name in wanted.failures:
        return f"failed: {wanted.failures[name]}"
    if name not in wanted.specs:
        return "leaves"
    left = missing(workers_of(wanted.specs[name]), {"worker": workers})
    return "waits for " + ", ".join(left) if left else "served"


def _report(line: str) -> None:
    print(f"· {line}", file=sys.stderr, flush=True)
