"""What others wrote, for a terminal: it commands none."""

import re

_COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """Without control characters but lines and tabs, and without those that turn its order."""
    return _COMMANDS.sub("�", text)
