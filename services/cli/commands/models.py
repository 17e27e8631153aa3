"""`penstock models`: what is served; models added to and removed from a running `penstock up`."""

import argparse
import asyncio
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.table import Table

from services.cli.console import console, folding_table
from services.cli.granting import actor
from services.cli.running import find_running
from services.cli.stack.checkpoints import made_local
from services.cli.stack.replicas import missing, workers_of
from services.cli.stack.wanted_models import Look, WantedModels
from services.common.config import ModelSpec, Settings
from services.common.discovery import Directory
from services.common.redis import Redis, connect
from services.common.served_models import READING, ServedModels
from services.gateway.identity.audit import Act, AuditLog

_LOOK_EVERY_S = 0.5
_KEPT_ELSEWHERE = (
    "no `penstock up` runs here: models are added and removed where it runs, and what "
    "`up --address --detach` left has those that it was given: deploy again with all of them"
)
_READ_S = 20.0  # for tokenizers, once the workers are up


def main(arguments: argparse.Namespace) -> int:
    settings = Settings()
    running = find_running(settings)
    if running is None and "redis_url" in settings.model_fields_set:
        if arguments.action != "list":
            raise RuntimeError(_KEPT_ELSEWHERE)
        return asyncio.run(_run(arguments, settings, settings.redis_dsn, settings.namespace))
    if running is None:
        raise RuntimeError(
            f"no `penstock up` runs with the data directory {settings.data_dir}; "
            "on Kubernetes the models are those of the chart's values"
        )
    return asyncio.run(_run(arguments, settings, running.redis_url, running.namespace))


async def _run(arguments: argparse.Namespace, settings: Settings, url: str, namespace: str) -> int:
    redis = connect(url)
    settings = settings.model_copy(update={"namespace": namespace})
    wanted = WantedModels(redis, namespace)
    audit = AuditLog(redis, namespace, settings.identity.audit_kept_days * 86_400)
    stack = _Stack(redis, settings)
    try:
        await stack.start()
        if arguments.action == "add":
            await _add(_spec(arguments, settings), wanted, stack, audit)
        elif arguments.action == "remove":
            await _remove(arguments.name, wanted, audit)
        else:
            console().print(_table(await wanted.look(), stack))
    finally:
        await stack.stop()
        await redis.aclose()
    return 0


class _Stack:
    """What the registry says of models."""

    def __init__(self, redis: Redis, settings: Settings) -> None:
        def view(service: str) -> Directory:
            return Directory(redis, settings.namespace, service, settings.lease_s)

        self._served = ServedModels(redis, settings)
        self._workers, self._tokenizers = view("worker"), view("tokenizer")
        self._readings = view(READING)
        self._views = (self._served, self._workers, self._tokenizers, self._readings)

    async def start(self) -> None:
        for one in self._views:
            await one.start()

    async def stop(self) -> None:
        for one in self._views:
            await one.stop()

    def paths(self) -> dict[str, str]:
        """Of the served models."""
        return {served.model: served.path for served in self._served.all()}

    def workers_of(self, name: str) -> int:
        return sum(w.facts.get("model") == name for w in self._workers.replicas.values())

    def missing(self, model: ModelSpec) -> list[str]:
        """What is not there yet for requests to be answered."""
        left = missing(workers_of(model), {"worker": self._workers})
        return left or self.not_read(model.name)

    def not_read(self, name: str) -> list[str]:
        """The tokenizers that cannot take its requests, and why."""
        checkpoints = self._served.of(name)
        if not checkpoints:
            return [f"model {name}"]
        told = {id: self._readings.replicas.get(id) for id in self._tokenizers.replicas}
        return [
            f"{id} to read it: {why}"
            for id, reading in told.items()
            for checkpoint in checkpoints
            if (why := reading.facts.get(str(checkpoint), "soon") if reading else "soon")
        ]


def _spec(arguments: argparse.Namespace, settings: Settings) -> ModelSpec:
    """Raises ValueError that names a wrong argument, RuntimeError for a wrong checkpoint."""
    folder = Path(arguments.path).expanduser()
    path = str(folder.resolve()) if folder.exists() else arguments.path
    last = path.rstrip("/").split("/")[-1].removesuffix(".gguf")
    told: dict[str, Any] = {"name": arguments.name or last, "path": path}
    if arguments.worker:
        try:
            told["worker"] = json.loads(arguments.worker)
        except ValueError as error:
            raise ValueError(f"--worker: not JSON: {error}") from None
    count = settings.worker.replicas
    sizes = (count if n is None else n for n in (arguments.prefill, arguments.decode))
    try:
        spec = ModelSpec.model_validate(told).sized(*sizes)
    except ValidationError as error:
        raise ValueError("; ".join(_complaint(problem) for problem in error.errors())) from None
    return made_local(spec, settings, _report)


def _complaint(problem: Any) -> str:
    """By the argument that it is about; never what was given."""
    argument, *inside = problem["loc"] or ("DIR_OR_HF_ID",)
    shown = argument if argument.isupper() else f"--{argument}"
    where = f" ({'.'.join(map(str, inside))})" if inside else ""
    return f"{shown}{where}: {problem['msg'].removeprefix('Value error, ')}"


async def _add(spec: ModelSpec, wanted: WantedModels, stack: _Stack, audit: AuditLog) -> None:
    """Returns when every request for it is answered."""
    if not await wanted.add(spec):
        raise RuntimeError(
            f"there is a model called {spec.name!r}, or one that still ends; remove it, or give "
            "--name"
        )
    await audit.note(Act(actor(), "model.add", f"model:{spec.name}", None, {"path": spec.path}))
    said: list[str] = []
    unread_since = math.inf
    while left := stack.missing(spec):
        now = await wanted.look()
        if spec.name not in now.specs:
            why = now.failures.get(spec.name, "it was removed meanwhile")
            raise RuntimeError(f"model {spec.name!r} is not served: {why}")
        if left != said:
            _report("waiting for: " + ", ".join(left))
            said = left
        if left == stack.not_read(spec.name):  # its workers are up
            unread_since = min(unread_since, time.monotonic())
        if time.monotonic() - unread_since > _READ_S:
            raise RuntimeError(
                f"model {spec.name!r} is not served by all: waited for {', '.join(left)}; that is "
                "tried again; `penstock models list` shows it, `models remove` ends it"
            )
        await asyncio.sleep(_LOOK_EVERY_S)
    print(f"{spec.name} is served")


async def _remove(name: str, wanted: WantedModels, audit: AuditLog) -> None:
    """Returns when its last request has ended and nobody knows of it."""
    if not await wanted.remove(name):
        names = ", ".join(await wanted.all()) or "none"
        raise RuntimeError(f"there is no model called {name!r}; there are: {names}")
    await audit.note(Act(actor(), "model.remove", f"model:{name}"))
    _report("running requests finish first")
    while (await wanted.look()).leaves(name):  # noqa: ASYNC110 - Redis has no event for it
        await asyncio.sleep(_LOOK_EVERY_S)
    print(f"{name} is removed")


def _table(wanted: Look, stack: _Stack) -> Table:
    table = folding_table("model", "checkpoint", "workers", "state")
    paths = stack.paths() | {name: spec.path for name, spec in wanted.specs.items()}
    for name in sorted({*paths, *wanted.failures, *wanted.odd}):
        count = str(stack.workers_of(name))
        table.add_row(name, paths.get(name, ""), count, _state(name, wanted, stack))
    return table


def _state(name: str, wanted: Look, stack: _Stack) -> str:
    if name in wanted.odd:
        return "what Redis says of it is no model; remove it"
    if name in wanted.failures:
        return f"failed: {wanted.failures[name]}"
    if name not in wanted.specs:
        return "leaves"
    left = stack.missing(wanted.specs[name])
    return "waits for " + ", ".join(left) if left else "served"


def _report(line: str) -> None:
    print(f"· {line}", file=sys.stderr, flush=True)
