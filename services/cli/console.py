"""Where the commands print their tables."""

import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.cli.plain import plain

_PIPED_WIDTH = 140  # columns; a pipe has no width of its own


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)


class _Plain(Table):
    """Its cells are what they say: what others named colours and commands no terminal."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        told = (Text(plain(c)) if isinstance(c, str) else c for c in cells)
        super().add_row(*told, **options)


def folding_table(*columns: str, title: str | None = None, caption: str | None = None) -> Table:
    """A table that never cuts a value: what is too long for its column goes on below."""
    table = _Plain(title=title, caption=caption)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
