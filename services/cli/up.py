"""`penstock up`: everything on this machine until Ctrl-C, which drains."""

import argparse
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from services.cli.supervisor import Leash, supervise

if TYPE_CHECKING:  # what starts a stack is imported when one is to start
    from services.cli.running import Running
    from services.cli.stack import Stack
    from services.common.config import ModelSpec


_TEND_EVERY_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_stack_arguments(parser)
    parser.add_argument(
        "--port",
        type=_whole(0, 65535),
        help="HTTP port (default 8000; 0: a free one); gRPC: the next",
    )


def add_stack_arguments(parser: argparse.ArgumentParser) -> None:
    """What `up` and `demo` share."""
    parser.add_argument(
        "--profile", choices=["laptop"], default="laptop", help="laptop: one machine, CPU, float32"
    )
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="DIR_OR_HF_ID",
        help="checkpoint to serve, may be repeated (default: the shipped model)",
    )
    parser.add_argument(
        "--prefill",
        type=_whole(0),
        default=1,
        metavar="N",
        help="prefill workers a model; 0: the decode workers do both (default 1)",
    )
    parser.add_argument(
        "--decode",
        type=_whole(1),
        default=1,
        metavar="N",
        help="decode workers a model (default 1)",
    )


def _whole(least: int, most: int = 2**31) -> Callable[[str], int]:
    """An argument's type: a whole number within bounds."""

    def parse(text: str) -> int:
        if not text.lstrip("-").isdecimal() or not least <= int(text) <= most:
            bounds = f"from {least} to {most}" if most < 2**31 else f"of at least {least}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {bounds}")
        return int(text)

    return parse


def stack(arguments: argparse.Namespace, port: int | None, *, again: bool = False) -> "Stack":
    """The Stack that the arguments ask for. Raises ValueError that names a wrong one.

    Started `again` in place of a lost one, it is found where that one was.
    """
    from services.cli.running import last_running
    from services.cli.stack import Stack
    from services.common.config import Settings

    settings = Settings()
    changes: dict[str, object] = {}
    if arguments.model or not settings.models:
        changes["models"] = local_models(arguments.model)
    if port is not None:
        changes["gateway"] = settings.gateway.model_copy(update={"port": port})
    if again and (lost := last_running(settings)) is not None:
        changes["gateway"] = settings.gateway.model_copy(update=_ports(lost))
    return Stack(
        settings.model_copy(update=changes),
        prefill=arguments.prefill,
        decode=arguments.decode,
        report=report,
    )


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
    leash = supervised()
    stopped = threading.Event()
    started = stack(arguments, arguments.port, again=leash.again)
    with started as running:
        signal.signal(signal.SIGTERM, lambda *_: stopped.set())
        leash.up(started.drain_grace_s, started.logs)
        print(
            f"""
Penstock is up.
  API      {running.url}/v1   (OpenAI-compatible)
  gRPC     {running.grpc}   (penstock.v1.Inference)
  key      {running.key}
  metrics  {running.url}/metrics

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
