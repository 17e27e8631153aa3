"""Where the commands print their tables."""

import sys

from rich.console import Console

_PIPED_WIDTH = 140  # columns; a pipe has no width of its own


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)
