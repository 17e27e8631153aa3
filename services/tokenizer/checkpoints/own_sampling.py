"""How a checkpoint is to be sampled where a request does not say: by its generation_config.json, as
its authors recommend and as vLLM does by default. Of its fields the five that change a token's
choice; lengths and `do_sample` are the request's."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protos.common_pb2 import Sampling

log = logging.getLogger(__name__)

_RANGES = {
    "temperature": (0.0, 100.0),
    "top_k": (0, 2**31 - 1),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}


def read_own(folder: Path) -> dict[str, float]:
    """By their names in `Sampling`; none where there is no such file. What is out of range, or no
    number, is left out, with a warning."""
    try:
        told = json.loads((folder / "generation_config.json").read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("%s: generation_config.json cannot be read: %s", folder, error)
        return {}
    found: dict[str, float] = {}
    for name, (least, most) in _RANGES.items():
        value: Any = told.get(name) if isinstance(told, dict) else None
        kinds = (int,) if name == "top_k" else (int, float)
        if type(value) in kinds and least <= value <= most:
            found[name] = value
        elif value is not None:
            log.warning("%s: generation_config.json: %s is not taken: %r", folder, name, value)
    return found


def fill(sampling: Sampling, own: Mapping[str, float]) -> None:
    """What the client did not name becomes the checkpoint's, as far as that says."""
    for name in sampling.unnamed:
        if name in own:
            setattr(sampling, name, own[name])
    del sampling.unnamed[:]
