"""`penstock up`: everything on this machine until Ctrl-C, which drains; or with `--address` on the
Ray cluster that it names."""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from services.cli.stack.supervisor import Leash, supervise

if TYPE_CHECKING:  # what starts a stack is imported when one is to start
    from services.cli.running import Running
    from services.cli.stack.stack import Stack
    from services.common.config import ModelSpec, Settings


_TEND_EVERY_S = 0.2


def local_stack(arguments: argparse.Namespace, port: int | None, *, again: bool = False) -> "Stack":
    """On a ground of its own, as the arguments ask for. Raises ValueError that names a wrong one.

    Started `again` in place of a lost one, it is found where that one was.
    """
    from services.cli.ground.local import LocalGround
    from services.cli.stack.stack import Stack

    settings = asked_for(arguments, port, again=again)
    ground = LocalGround(report, again=again)
    return Stack(settings, ground, report=report, again=again)


def asked_for(
    arguments: argparse.Namespace, port: int | None, *, again: bool = False
) -> "Settings":
    """The settings with what the arguments change in them."""
    from services.cli.running import last_running
    from services.common.config import Settings

    settings = Settings()
    changes: dict[str, object] = {}
    models = settings.models
    if arguments.model or not models:
        models = local_models(arguments.model)
    models = with_adapters(models, arguments.lora)
    sizes = [
        settings.worker.replicas if given is None else given
        for given in (arguments.prefill, arguments.decode)
    ]
    changes["models"] = [model.sized(*sizes) for model in models]
    of_workers = ("quantization", "kv_format", "tensor_parallel")
    formats = {name: getattr(arguments, name) for name in of_workers}
    if given := {name: value for name, value in formats.items() if value is not None}:
        changes["worker"] = settings.worker.model_copy(update=given)
    if port is not None:
        changes["gateway"] = settings.gateway.model_copy(update={"port": port})
    if again and (lost := last_running(settings)) is not None:
        changes["gateway"] = settings.gateway.model_copy(update=_ports(lost))
    return settings.model_copy(update=changes)


def _ports(running: "Running") -> dict[str, int]:
    """Where a gateway listened, as its settings."""
    port, grpc_port = (int(a.rpartition(":")[2]) for a in (running.url, running.grpc))
    return {"port": port, "grpc_port": grpc_port}


def local_models(given: list[str]) -> "list[ModelSpec]":
    """`--model` values as served models, named by their last path component; the shipped
    demonstration model when none is given. Raises ValueError on two of one name, and on what is
    no name.
    """
    import models
    from services.common.config import ModelSpec
    from services.common.config.models import NOT_A_NAME

    specs = []
    for path in given or [str(Path(models.__path__[0]) / "demo")]:
        place = Path(path).expanduser()
        if place.exists():
            name = place.resolve().name.removesuffix(".gguf")
            found = name, str(place.resolve())
        else:
            found = path.split("/")[-1], path
        try:
            specs.append(ModelSpec(name=found[0], path=found[1]))
        except ValueError:
            raise ValueError(
                f"--model: {path!r} would be called {found[0]!r}, and {NOT_A_NAME}; "
                "PENSTOCK_MODELS gives it another"
            ) from None
    names = [spec.name for spec in specs]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"--model: two checkpoints are called {', '.join(sorted(twice))}")
    return specs


def with_adapters(models: "list[ModelSpec]", given: list[str]) -> "list[ModelSpec]":
    """`--lora` values, NAME=DIR, as adapters of the one model. Raises ValueError."""
    from pydantic import ValidationError

    from services.common.config import ModelSpec
    from services.common.config.models import NOT_A_NAME

    if not given:
        return models
    if len(models) > 1:
        raise ValueError(
            "--lora: it is not said of which model; name its adapters in PENSTOCK_MODELS"
        )
    adapters = dict(models[0].adapters)
    for value in given:
        name, _, path = value.partition("=")
        folder = Path(path).expanduser()
        if not (name and path and folder.is_dir()):
            raise ValueError(f"--lora: {value!r} is not NAME=DIR of a folder that is there")
        if name in (models[0].name, *adapters):
            raise ValueError(f"--lora: two models or adapters are called {name!r}")
        adapters[name] = str(folder.resolve())
    try:
        return [ModelSpec.model_validate(models[0].model_dump() | {"adapters": adapters})]
    except ValidationError as error:
        told = {problem["msg"].removeprefix("Value error, ") for problem in error.errors()}
        named = any("adapters" in problem["loc"] for problem in error.errors())
        raise ValueError(f"--lora: {NOT_A_NAME if named else '; '.join(sorted(told))}") from None


def supervised() -> Leash:
    """Returns in a process of its own for the stack (services/cli/stack/supervisor.py)."""
    from services.common.config import Settings
    from services.common.policy import read_policy

    # What is wrong is told before there is anything to supervise.
    if (policy := Settings().policy.file) is not None:
        read_policy(policy)
    return supervise(report)


def report(line: str) -> None:
    """Progress, apart from what a command prints as its result. What cannot be written, as when
    the disk is full or the pipe's reader has gone, is dropped: no stack ends for a line."""
    with suppress(OSError):
        print(f"· {line}", file=sys.stderr, flush=True)


def main(arguments: argparse.Namespace) -> int:
    if arguments.address:
        return _on_a_cluster(arguments)
    if arguments.detach:
        raise ValueError("--detach goes with --address: a Ray of its own ends with this command")
    leash = supervised()
    stack = local_stack(arguments, arguments.port, again=leash.again)
    with stack as running:
        stopped = _asked_to_stop()
        leash.up(stack.ends_within_s, stack.logs)
        _tell(stack, running, "Ctrl-C stops: running streams finish first.")
        _tend(stack, stopped)
    return 0


def _on_a_cluster(arguments: argparse.Namespace) -> int:
    from services.cli.ground.cluster import ClusterGround
    from services.cli.stack.stack import Stack

    settings = asked_for(arguments, arguments.port)
    stack = Stack(settings, ClusterGround(arguments.address, report), report=report)
    with stack as running:
        stopped = _asked_to_stop(_leave)
        if arguments.detach:
            stack.detach()
            _tell(stack, running, "It stays up; `penstock down` takes it down.")
        else:
            _tell(stack, running, "Ctrl-C takes it down: running streams finish first.")
            _tend(stack, stopped)
    return 0


def _asked_to_stop(again: Callable[[], None] = lambda: None) -> threading.Event:
    """Set by the signals that ask for it, from now on; `again` is called for each that follows."""
    stopped = threading.Event()

    def asked(*_: object) -> None:
        if stopped.is_set():
            again()
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, asked)
    return stopped


def _leave() -> None:
    """At once: what is waited for, Serve's controller above all, may never answer."""
    try:
        report("asked twice: left as it is; `penstock down` takes down what still runs")
    finally:
        os._exit(1)


def _tell(stack: "Stack", running: "Running", how_it_ends: str) -> None:
    admin = f"\n  admin    {stack.admin_url}/admin/v1" if stack.admin_url else ""
    logs = f"\n  logs     {stack.logs}" if stack.logs else ""
    print(
        f"""
Penstock is up.
  API      {running.url}/v1   (OpenAI-compatible)
  gRPC     {running.grpc}   (penstock.v1: Inference and others){admin}
  key      {stack.told_key(running)}
  metrics  {stack.metrics_url}   (Prometheus; all replicas: /targets beside it){logs}

  penstock chat      talk to it
  penstock status    see what runs
{how_it_ends}
""",
        flush=True,
    )


def _tend(stack: "Stack", stopped: threading.Event) -> None:
    while not stopped.wait(_TEND_EVERY_S):
        if not stack.tend():
            return
    report("draining")
