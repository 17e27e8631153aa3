"""Where the commands print their tables."""

import sys

from rich.console import Console
from rich.table import Table

_PIPED_WIDTH = 140  # columns; a pipe has no width of its own


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)


def folding_table(*columns: str, title: str | None = None, caption: str | None = None) -> Table:
    """A table that never cuts a value: what is too long for its column goes on below."""
    table = Table(title=title, caption=caption)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
