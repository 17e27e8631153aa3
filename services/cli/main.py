"""The `penstock` command. A command's module is imported when that command is given."""

import argparse
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import FrameType

from services.cli.command_line import parser
from services.cli.failures import told
from services.cli.plain import plain

Command = Callable[[argparse.Namespace], int]


def _as_ctrl_c(frame: FrameType | None) -> None:
    """Ends a command as Ctrl-C does: a loop that runs ends its task. Raised here, it would end
    whatever callback of the loop it met."""
    interrupt = signal.getsignal(signal.SIGINT)
    if not callable(interrupt):  # ignored, as in a shell's background
        raise KeyboardInterrupt
    interrupt(signal.SIGINT, frame)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; its exit code is 0 on success, 1 on failure, 2 on wrong usage, and
    128 + the number of the signal that ended it before it was done."""
    given = parser().parse_args(argv)
    logging.basicConfig(level=logging.ERROR, format="penstock: %(message)s")
    ended_by: int = signal.SIGINT

    def terminate(number: int, frame: FrameType | None) -> None:
        nonlocal ended_by
        ended_by = number
        _as_ctrl_c(frame)

    signal.signal(signal.SIGTERM, terminate)
    try:
        command: Command = import_module(given.module).main
        return command(given)
    except KeyboardInterrupt:
        return 128 + ended_by
    except Exception as error:
        lines, code = told(error)
        if not lines:
            raise
        for line in lines:
            print(f"penstock: {plain(line)}", file=sys.stderr)
        return code


if __name__ == "__main__":
    sys.exit(main())
