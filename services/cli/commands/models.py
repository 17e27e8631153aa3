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
from services.cli.interruptible import run
from services.cli.running import find_running
from services.cli.stack.checkpoints import check_engines, made_local
from services.cli.stack.replicas import missing, workers_of
from services.cli.stack.wanted_models import Look, WantedModels
from services.common.checkpoints.checkpoint import locate
from services.common.config import ModelSpec, Settings
from services.common.config.models import NOT_A_NAME
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
        return run(_run(arguments, settings, settings.redis_dsn, settings.namespace))
    if running is None:
        raise RuntimeError(
            f"no `penstock up` runs with the data directory {settings.data_dir}; "
            "on Kubernetes the models are those of the chart's values"
        )
    return run(_run(arguments, settings, running.redis_url, running.namespace))


async def _run(arguments: argparse.Namespace, settings: Settings, url: str, namespace: str) -> int:
    redis = connect(url)
    settings = settings.model_copy(update={"namespace": namespace})
    wanted = WantedModels(redis, namespace)
    audit = AuditLog(redis, namespace, settings.identity.audit_kept_days * 86_400)
    stack = _Stack(redis, settings)
    try:
        await stack.start()
        if arguments.action == "add" and arguments.adapter_of:
            await _add_adapter(arguments, settings, wanted, stack, audit)
        elif arguments.action == "add":
            await _add(_spec(arguments, settings), wanted, stack, audit)
        elif arguments.action == "remove":
            if not await _remove_adapter(arguments.name, wanted, stack, audit):
                await _remove(arguments.name, wanted, stack, audit)
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

    def knowing(self, name: str) -> list[str]:
        """Who still has the model: the registry, and tokenizers, whom the gateways ask."""
        listed = ["the registry"] if self._served.of(name) else []
        readings = self._readings.replicas.items()
        return listed + [
            id
            for id, reading in readings
            if any(checkpoint.rpartition("@")[0] == name for checkpoint in reading.facts)
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
    if argument == "name":
        return f"--name: {NOT_A_NAME}"
    return f"{shown}{where}: {problem['msg'].removeprefix('Value error, ')}"


async def _add(spec: ModelSpec, wanted: WantedModels, stack: _Stack, audit: AuditLog) -> None:
    """Returns when every request for it is answered."""
    if not await wanted.add(spec):
        raise RuntimeError(
            f"there is a model called {spec.name!r}, or one that still ends; remove it, or give "
            "--name"
        )
    await audit.note(Act(actor(), "model.add", f"model:{spec.name}", None, {"path": spec.path}))
    try:
        await _served(spec, wanted, stack)
    except asyncio.CancelledError:
        _report(f"it is added all the same; `penstock models remove {spec.name}` ends it")
        raise


async def _served(spec: ModelSpec, wanted: WantedModels, stack: _Stack) -> None:
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


async def _add_adapter(
    arguments: argparse.Namespace,
    settings: Settings,
    wanted: WantedModels,
    stack: _Stack,
    audit: AuditLog,
) -> None:
    """Returns when requests for it are answered."""
    model = arguments.adapter_of
    spec = (await wanted.all()).get(model)
    if spec is None:
        raise RuntimeError(f"--adapter-of: there is no model called {model!r}")
    name, path = await asyncio.to_thread(_adapter, arguments, spec, settings)
    if not await wanted.add_adapter(model, name, path):
        raise RuntimeError(f"there is a model or an adapter called {name!r}; remove it, or --name")
    await audit.note(Act(actor(), "adapter.add", f"model:{name}", None, {"path": path}))
    _report(f"waiting for the workers of {model}")
    until = time.monotonic() + _READ_S
    while left := stack.not_read(name):
        if why := (await wanted.look()).failures.get(name):
            await wanted.remove_adapter(name)
            raise RuntimeError(f"adapter {name!r} is not served: {why}")
        if time.monotonic() > until:
            raise RuntimeError(f"adapter {name!r} is not served yet: waited for {', '.join(left)}")
        await asyncio.sleep(_LOOK_EVERY_S)
    print(f"{name} is served")


def _adapter(
    arguments: argparse.Namespace, model: ModelSpec, settings: Settings
) -> tuple[str, str]:
    """Its name, and its folder, in which is one for the model. Raises ValueError that names a wrong
    argument, RuntimeError for a wrong adapter."""
    if arguments.worker or arguments.prefill is not None or arguments.decode is not None:
        raise ValueError("--adapter-of: the model's workers have it; it has none of its own")
    folder = Path(arguments.path).expanduser().resolve()
    name, path = arguments.name or folder.name, str(folder)
    with_it = model.model_copy(update={"adapters": {name: path}})
    try:
        ModelSpec.model_validate(with_it.model_dump())
    except ValidationError:
        raise ValueError(f"--name: {NOT_A_NAME}") from None
    check_engines(with_it, locate(model), settings)
    return name, path


async def _remove_adapter(name: str, wanted: WantedModels, stack: _Stack, audit: AuditLog) -> bool:
    """Returns when no new request gets it; False: there is no such adapter."""
    if not await wanted.remove_adapter(name):
        return False
    await audit.note(Act(actor(), "adapter.remove", f"model:{name}"))
    _report("running requests finish first")
    await _gone(name, stack)
    return True


async def _remove(name: str, wanted: WantedModels, stack: _Stack, audit: AuditLog) -> None:
    """Returns when its last request has ended and nobody knows of it."""
    if not await wanted.remove(name):
        there = [
            name for spec in (await wanted.all()).values() for name in (spec.name, *spec.adapters)
        ]
        names = ", ".join(there) or "none"
        raise RuntimeError(f"there is no model or adapter called {name!r}; there are: {names}")
    await audit.note(Act(actor(), "model.remove", f"model:{name}"))
    _report("running requests finish first")
    while (await wanted.look()).leaves(name):  # noqa: ASYNC110 - Redis has no event for it
        await asyncio.sleep(_LOOK_EVERY_S)
    await _gone(name, stack)


async def _gone(name: str, stack: _Stack) -> None:
    """Says so once a request for it is refused and no list has it, whichever gateway is asked."""
    until = time.monotonic() + _READ_S
    while left := stack.knowing(name):
        if time.monotonic() > until:
            raise RuntimeError(f"{name!r} is removed, and yet known to {', '.join(left)}")
        await asyncio.sleep(_LOOK_EVERY_S)
    print(f"{name} is removed")


def _table(wanted: Look, stack: _Stack) -> Table:
    table = folding_table("model", "checkpoint", "workers", "state")
    paths = stack.paths() | {name: spec.path for name, spec in wanted.specs.items()}
    of_models = {name: spec.name for spec in wanted.specs.values() for name in spec.adapters}
    for name in sorted({*paths, *of_models, *wanted.failures, *wanted.odd}):
        if (model := of_models.get(name)) is not None:
            path = wanted.specs[model].adapters[name]
            table.add_row(name, path, f"{model}'s", _adapters_state(name, wanted, stack))
            continue
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


def _adapters_state(name: str, wanted: Look, stack: _Stack) -> str:
    if name in wanted.failures:
        return f"failed: {wanted.failures[name]}"
    left = stack.not_read(name)
    return "waits for " + ", ".join(left) if left else "served"


def _report(line: str) -> None:
    print(f"· {line}", file=sys.stderr, flush=True)
