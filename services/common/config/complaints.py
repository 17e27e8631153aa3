"""What is wrong with settings, told by the variables that hold them."""

import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from services.common.config.settings import Settings


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
    if problem["type"] == "extra_forbidden":
        near = _nearest(problem["loc"])
        said = f"unknown setting; {near} is the nearest" if near else "unknown setting"
    return f"setting {name}{inside}: {said}"


def _nearest(location: Sequence[int | str]) -> str:
    """Of the names that are known where the last of `location` was given; empty: none is near."""
    known: type[BaseModel] = Settings
    for part in location[:-1]:
        if field := known.model_fields.get(str(part)):  # else a place in a list, a key
            known = _section(field.annotation) or known
    near = get_close_matches(str(location[-1]).lower(), known.model_fields, n=1)
    if not near:
        return ""
    if len(location) > 2:  # inside of a JSON value
        return near[0]
    return "PENSTOCK_" + "__".join(str(part) for part in (*location[:-1], near[0])).upper()


def _section(kind: Any) -> type[BaseModel] | None:
    """A setting's own names, be it a list of such or none at all."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind
    return next(filter(None, map(_section, get_args(kind))), None)
