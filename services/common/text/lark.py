"""Lark's notation, as llguidance reads it."""

import json


def literal(text: str) -> str:
    """A grammar's literal: as JSON has it, but no control character stands as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")
