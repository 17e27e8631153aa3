"""What a checkpoint says of the use of its states, in the files of sentence-transformers:
modules.json names modules in their order, and each has a folder with a config.json."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["last", "mean"]


class UnsupportedModules(Exception):
    """A module that is not built here, or files that are broken. Names the file and the field."""


@dataclass(frozen=True, slots=True)
class Modules:
    """Of a checkpoint without such files: nothing is said."""

    pooling: Kind | None = None
    """Which states an embedding is made of."""
    relevant: int | None = None
    """It is a cross-encoder: the token whose logit behind a pair tells how well the two fit."""
    irrelevant: int | None = None
    """The token whose logit is taken off that."""


NO_MODULES = Modules()


def read_modules(folder: Path) -> Modules:
    """Raises UnsupportedModules."""
    path = folder / "modules.json"
    if not path.exists():
        return NO_MODULES
    listed = _read(path)
    if not isinstance(listed, list):
        raise UnsupportedModules(f"{path}: is no list of modules")
    found = NO_MODULES
    for module in listed:
        about = module if isinstance(module, dict) else {}
        kind, place = str(about.get("type", "")).rpartition(".")[2], about.get("path", "")
        if not isinstance(place, str) or ".." in place or place.startswith("/"):
            raise UnsupportedModules(f"{path}: path {place!r} is no folder beside it")
        match kind:
            case "Transformer" | "Normalize":
                pass
            case "Pooling":
                found = Modules(pooling=_pooling(folder / place / "config.json"))
            case "LogitScore":
                found = _of_logits(folder / place / "config.json")
            case _:
                raise UnsupportedModules(f"{path}: type {about.get('type')!r} is not supported")
    return found


def _pooling(path: Path) -> Kind:
    said = _object(path)
    modes = {name for name, on in said.items() if name.startswith("pooling_mode_") and on}
    if isinstance(said.get("pooling_mode"), str):  # as later versions say it
        modes = {f"pooling_mode_{said['pooling_mode']}"}
    kinds: dict[str, Kind] = {
        "pooling_mode_lasttoken": "last",
        "pooling_mode_mean": "mean",
        "pooling_mode_mean_tokens": "mean",
    }
    if len(modes) != 1 or not modes <= kinds.keys():
        named = ", ".join(sorted(modes)) or "pooling_mode"
        raise UnsupportedModules(f"{path}: {named}: only lasttoken or mean_tokens are supported")
    if said.get("include_prompt", True) is not True:
        raise UnsupportedModules(
            f"{path}: include_prompt {said['include_prompt']!r} is not supported"
        )
    return kinds[modes.pop()]


def _of_logits(path: Path) -> Modules:
    said = _object(path)
    yes, no = said.get("true_token_id"), said.get("false_token_id")
    for name, id in (("true_token_id", yes), ("false_token_id", no)):
        if not (type(id) is int and 0 <= id < 2**31) and not (id is None and name[0] == "f"):
            raise UnsupportedModules(f"{path}: {name} {id!r} is no token")
    return Modules(relevant=yes, irrelevant=no)


def _object(path: Path) -> dict[str, Any]:
    found = _read(path)
    if not isinstance(found, dict):
        raise UnsupportedModules(f"{path}: is no JSON object")
    return found


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModules(f"{path}: cannot be read: {error}") from error
