"""What is wrong with settings, told by the variables that hold them."""

import os
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError


def complaints(error: ValidationError) -> list[str]:
    """A line each; never what was given, which may be a secret."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    return [_complaint(problem) for problem in problems]


def _complaint(problem: Mapping[str, Any]) -> str:
    said = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:  # about several; it names them
        return str(said)
    first, *rest = (str(part) for part in problem["loc"])
    short = first.upper().removeprefix("PENSTOCK_")
    name = f"PENSTOCK_{short}"
    if short in os.environ and name not in os.environ:  # REDIS_URL
        name = short
    if rest and not rest[0].isdecimal():
        name += f"__{rest.pop(0).upper()}"
    inside = f" ({'.'.join(rest)})" if rest else ""  # of a list's item
    return f"setting {name}{inside}: {said}"
