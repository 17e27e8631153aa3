"""Workload files: JSON lines, one request each.

    {"id", "prompt_token_ids" | "prompt" | "messages", "max_tokens", "temperature", "ignore_eos",
     "arrival_s", "seed"?}

A line that does not follow this is refused with its number and the field's name.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class WorkloadError(ValueError):
    """The message names file, line and field."""


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One line. Exactly one of `prompt_token_ids`, `prompt` and `messages` is not None."""

    id: str
    prompt_token_ids: list[int] | None
    prompt: str | None
    messages: list[dict[str, Any]] | None
    max_tokens: int
    temperature: float
    ignore_eos: bool
    arrival_s: float
    """Seconds after the start of the run."""
    seed: int | None


PROMPTS = ("prompt_token_ids", "prompt", "messages")


def load(path: str | Path) -> list[WorkloadRequest]:
    """The requests of a file, by arrival. Raises WorkloadError, and OSError if it is not there."""
    requests: dict[str, WorkloadRequest] = {}
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            request = _parse(line, where)
            if request.id in requests:
                raise WorkloadError(f"{where}: id {request.id!r} is there twice")
            requests[request.id] = request
    if not requests:
        raise WorkloadError(f"{path}: holds no requests")
    return sorted(requests.values(), key=lambda request: request.arrival_s)


def _parse(line: str, where: str) -> WorkloadRequest:
    try:
        raw = json.loads(line)
    except json.JSONDecodeError as error:
        raise WorkloadError(f"{where}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise WorkloadError(f"{where}: not a JSON object")
    unknown = sorted(raw.keys() - _CHECKS.keys())
    if unknown:
        raise WorkloadError(f"{where}: {unknown[0]} is not a field of a workload")
    given = [name for name in PROMPTS if raw.get(name) is not None]
    if len(given) != 1:
        raise WorkloadError(f"{where}: needs exactly one of {', '.join(PROMPTS)}, has {len(given)}")
    for name, (wanted, is_right) in _CHECKS.items():
        if name in PROMPTS and name not in given:
            continue
        if name == "seed" and raw.get(name) is None:
            continue
        if name not in raw:
            raise WorkloadError(f"{where}: {name} is missing")
        if not is_right(raw[name]):
            raise WorkloadError(f"{where}: {name} must be {wanted}")
    return WorkloadRequest(
        id=str(raw["id"]),
        prompt_token_ids=raw.get("prompt_token_ids"),
        prompt=raw.get("prompt"),
        messages=raw.get("messages"),
        max_tokens=raw["max_tokens"],
        temperature=float(raw["temperature"]),
        ignore_eos=raw["ignore_eos"],
        arrival_s=float(raw["arrival_s"]),
        seed=raw.get("seed"),
    )


def _is_int(value: Any, least: int, below: float) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < below


def _is_number(value: Any, least: float, most: float) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and least <= value <= most


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_int(x, 0, 2**32) for x in value)


def _is_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(x, dict) and isinstance(x.get("role"), str) for x in value)
    )


_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "id": ("a string or a number", lambda x: isinstance(x, str) or _is_int(x, 0, 2**64)),
    "prompt_token_ids": ("a list of token ids, not empty", _is_token_ids),
    "prompt": ("a string, not empty", lambda x: isinstance(x, str) and bool(x)),
    "messages": ("a list of messages with a role each, not empty", _is_messages),
    "max_tokens": ("a whole number above 0", lambda x: _is_int(x, 1, 2**31)),
    "temperature": ("a number from 0 to 100", lambda x: _is_number(x, 0, 100)),
    "ignore_eos": ("true or false", lambda x: isinstance(x, bool)),
    "arrival_s": ("seconds, at least 0", lambda x: _is_number(x, 0, 1e9)),
    "seed": ("a whole number in [0, 2**64)", lambda x: _is_int(x, 0, 2**64)),
}
