"""The `penstock` command."""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence

from pydantic import ValidationError

from bench import engine as bench_engine
from bench import serve as bench_serve
from services.cli import chat, demo, keys, status, up

Command = Callable[[argparse.Namespace], int]


def _add(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    help: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    main: Command,
) -> None:
    parser = commands.add_parser(name, help=help, description=help)
    add_arguments(parser)
    parser.set_defaults(main=main)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    root = argparse.ArgumentParser(
        prog="penstock", description="LLM serving, whole: from prompt to streamed tokens."
    )
    commands = root.add_subparsers(metavar="COMMAND", required=True)
    _add(commands, "up", "start Penstock here and stay up", up.add_arguments, up.main)
    _add(
        commands,
        "demo",
        "start, ask one question of the examples, show the request's way, stop",
        demo.add_arguments,
        demo.main,
    )
    _add(commands, "chat", "talk to a running Penstock", chat.add_arguments, chat.main)
    _add(
        commands,
        "status",
        "services, replicas, workers, queue and KV use of a running Penstock",
        status.add_arguments,
        status.main,
    )
    _add(commands, "keys", "create, list and revoke API keys", keys.add_arguments, keys.main)
    bench = commands.add_parser("bench", help="measure the engine, or a server").add_subparsers(
        metavar="WHAT", required=True
    )
    _add(
        bench,
        "engine",
        "the engine in this process, without services",
        bench_engine.add_arguments,
        bench_engine.main,
    )
    _add(
        bench,
        "serve",
        "a server through its OpenAI-compatible front door",
        bench_serve.add_arguments,
        bench_serve.main,
    )
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; its exit code is 0 on success, 1 on failure, 2 on wrong usage."""
    given = parser().parse_args(arguments)
    logging.basicConfig(level=logging.ERROR, format="penstock: %(message)s")
    command: Command = given.main
    try:
        return command(given)
    except ValidationError as error:
        for problem in error.errors():
            name = "__".join(str(part) for part in problem["loc"]).upper()
            print(f"penstock: setting PENSTOCK_{name}: {problem['msg']}", file=sys.stderr)
        return 2
    except (RuntimeError, OSError, ValueError) as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
