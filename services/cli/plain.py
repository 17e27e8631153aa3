"""What others write, for a terminal: it commands none; and for a file: without colours."""

import os
import re
import sys

_COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """Without control characters but lines and tabs, and without those that turn its order."""
    return _COMMANDS.sub("�", text)


def without_colours() -> None:
    """Ray's messages of this process, where standard output is no terminal or whoever reads it
    wants none (https://no-color.org). Ray looks when it prints."""
    if os.environ.get("NO_COLOR") or not sys.stdout.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
