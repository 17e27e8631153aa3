"""`penstock up`: everything on this machine until Ctrl-C, which drains; or with `--address` on the
Ray cluster that it names (services/cli/cluster.py)."""

import argparse
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from services.cli.supervisor import Leash, supervise

if TYPE_CHECKING:  # what starts a stack is imported when one is to start
    from services.cli.running import Running
    from services.cli.stack import Stack
    from services.common.config import ModelSpec, Settings


_TEND_EVERY_S = 0.2


def stack(arguments: argparse.Namespace, port: int | None, *, again: bool = False) -> "Stack":
    """The Stack that the arguments ask for. Raises ValueError that names a wrong one.

    Started `again` in place of a lost one, it is found where that one was.
    """
    from services.cli.stack import Stack

    return Stack(asked_for(arguments, port, again=again), report=report, again=again)


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
    sizes = [
        settings.worker.replicas if given is None else given
        for given in (arguments.prefill, arguments.decode)
    ]
    changes["models"] = [model.sized(*sizes) for model in models]
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
    demonstration model when none is given. Raises ValueError on two of one name.
    """
    import models
    from services.common.config import ModelSpec

    specs = []
    for path in given or [str(Path(models.__path__[0]) / "demo")]:
        folder = Path(path).expanduser()
        if folder.is_dir():
            specs.append(ModelSpec(name=folder.resolve().name, path=str(folder.resolve())))
        else:
            specs.append(ModelSpec(name=path.split("/")[-1], path=path))
    names = [spec.name for spec in specs]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"--model: two checkpoints are called {', '.join(sorted(twice))}")
    return specs


def supervised() -> Leash:
    """Returns in a process of its own for the stack (services/cli/supervisor.py)."""
    from services.common.config import Settings
    from services.tokenizer.policy import load_policy

    # What is wrong is told before there is anything to supervise.
    load_policy(Settings().tokenizer)
    return supervise(report)


def report(line: str) -> None:
    """Progress, apart from what a command prints as its result."""
    print(f"· {line}", file=sys.stderr, flush=True)


def main(arguments: argparse.Namespace) -> int:
    if arguments.address:
        from services.cli import cluster

        return cluster.main(arguments, asked_for(arguments, arguments.port), report)
    if arguments.detach:
        raise ValueError("--detach goes with --address: a Ray of its own ends with this command")
    leash = supervised()
    stopped = threading.Event()
    started = stack(arguments, arguments.port, again=leash.again)
    with started as running:
        signal.signal(signal.SIGTERM, lambda *_: stopped.set())
        leash.up(started.drains_within_s, started.logs)
        print(
            f"""
Penstock is up.
  API      {running.url}/v1   (OpenAI-compatible)
  gRPC     {running.grpc}   (penstock.v1.Inference)
  key      {started.told_key(running)}
  metrics  {started.metrics_url}   (Prometheus; all replicas: /targets beside it)
  logs     {started.logs}

  penstock chat      talk to it
  penstock status    see what runs
Ctrl-C stops: running streams finish first.
""",
            flush=True,
        )
        while not stopped.wait(_TEND_EVERY_S):
            started.tend()
        report("draining")
    return 0
