"""The whole command line: which commands there are. Imports next to nothing."""

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import Any

from services.cli import arguments, granting_arguments, plan_arguments, usage_arguments

# Name, help, the module whose `main` runs it, and what adds its arguments.
_COMMANDS = (
    ("up", "start Penstock here and stay up", "services.cli.commands.up", arguments.up),
    (
        "demo",
        "start, ask one question of the examples, show the request's way, stop",
        "services.cli.commands.demo",
        arguments.demo,
    ),
    ("chat", "talk to a running Penstock", "services.cli.commands.chat", arguments.chat),
    (
        "index",
        "bring a vector store to what a folder holds",
        "services.cli.commands.index",
        arguments.index,
    ),
    (
        "status",
        "services, replicas, workers, queue and KV use of a running Penstock",
        "services.cli.commands.status",
        arguments.status,
    ),
    (
        "down",
        "take Penstock down that `penstock up --address` left on a Ray cluster",
        "services.cli.commands.down",
        arguments.down,
    ),
    (
        "drain",
        "let replicas end what they run and take no more, before their host is stopped",
        "services.cli.commands.drain",
        arguments.drain,
    ),
    (
        "probe",
        "whether a service of this container takes requests, for its health check",
        "services.cli.commands.probe",
        arguments.probe,
    ),
    (
        "doctor",
        "examine an installation, running or to be started, and say what to do",
        "services.cli.commands.doctor",
        arguments.doctor,
    ),
    ("top", "what a running Penstock does, live", "services.cli.commands.top", arguments.top),
    (
        "models",
        "list, add and remove the models of a running Penstock",
        "services.cli.commands.models",
        arguments.models,
    ),
    (
        "tenants",
        "list, add, change and suspend tenants",
        "services.cli.commands.tenants",
        granting_arguments.tenants,
    ),
    (
        "keys",
        "create, list, change, rotate and revoke API keys",
        "services.cli.commands.keys",
        granting_arguments.keys,
    ),
    (
        "tokens",
        "list and revoke tokens of the OIDC issuer",
        "services.cli.commands.tokens",
        granting_arguments.tokens,
    ),
    (
        "limits",
        "list, set and remove what tenants and keys may use",
        "services.cli.commands.limits",
        granting_arguments.limits,
    ),
    (
        "audit",
        "who changed keys, tenants, limits and models",
        "services.cli.commands.audit",
        granting_arguments.audit,
    ),
    (
        "jobs",
        "durable jobs that wait and run, and those that are dead",
        "services.cli.commands.jobs",
        granting_arguments.jobs,
    ),
    (
        "policy",
        "try a policy file: its rules, and the tests that they name",
        "services.cli.commands.policy",
        arguments.policy,
    ),
    (
        "usage",
        "what tenants and keys used and what it cost, from the ledger",
        "services.cli.commands.usage",
        usage_arguments.usage,
    ),
    (
        "plan",
        "what a model needs, by bytes and operations: memory of its KV, GPUs, replicas, speed",
        "services.cli.commands.plan",
        plan_arguments.plan,
    ),
    (
        "quantize",
        "write a checkpoint again with weights of fewer bits",
        "services.cli.commands.quantize",
        arguments.quantize,
    ),
)
# Those of `bench` are of the measurement's own module.
_MEASUREMENTS = (
    ("engine", "the engine in this process, without services", "bench.engine", "bench.engine"),
    (
        "serve",
        "a server through its OpenAI-compatible front door",
        "bench.serve",
        "bench.serve_arguments",
    ),
)


def _adds(module: str) -> Callable[[argparse.ArgumentParser], None]:
    def add(parser: argparse.ArgumentParser) -> None:
        import_module(module).add_arguments(parser)

    return add


class _Parser(argparse.ArgumentParser):
    """A command's takes its arguments once there are some to parse."""

    def __init__(
        self, *, adds: Callable[[argparse.ArgumentParser], None] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self._adds = adds

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._adds:
            self._adds(self)
        return super().parse_known_args(args, namespace)


class _Version(argparse.Action):
    """Looked up only when it is asked for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from services.common.versions import version

        print(f"penstock {version()}")
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    root = _Parser(
        prog="penstock", description="LLM serving, whole: from prompt to streamed tokens."
    )
    root.add_argument("--version", action=_Version, help="show which Penstock this is")
    commands = root.add_subparsers(metavar="COMMAND", required=True)
    for name, help, module, adds in _COMMANDS:
        command = commands.add_parser(name, help=help, description=help, adds=adds)
        command.set_defaults(module=module)
    bench = commands.add_parser("bench", help="measure the engine, or a server")
    measurements = bench.add_subparsers(metavar="WHAT", required=True)
    for name, help, module, its in _MEASUREMENTS:
        command = measurements.add_parser(name, help=help, description=help, adds=_adds(its))
        command.set_defaults(module=module)
    return root
