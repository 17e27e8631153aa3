"""The `penstock` command. A command's module is imported when that command is given."""

import argparse
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from services.cli.command_line import parser
from services.cli.failures import told

Command = Callable[[argparse.Namespace], int]


def _interrupt(number: int, _: object) -> None:
    raise KeyboardInterrupt(number)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; its exit code is 0 on success, 1 on failure, 2 on wrong usage, and
    128 + the number of the signal that ended it before it was done."""
    given = parser().parse_args(argv)
    logging.basicConfig(level=logging.ERROR, format="penstock: %(message)s")
    signal.signal(signal.SIGTERM, _interrupt)  # ends a command as Ctrl-C does
    try:
        command: Command = import_module(given.module).main
        return command(given)
    except KeyboardInterrupt as asked:
        return 128 + (asked.args[0] if asked.args else signal.SIGINT)
    except Exception as error:
        lines, code = told(error)
        if not lines:
            raise
        for line in lines:
            print(f"penstock: {line}", file=sys.stderr)
        return code


if __name__ == "__main__":
    sys.exit(main())
