"""What a checkpoint's config.json says of its rotary embedding. Imports no torch (see rope.py).

"dynamic" and "longrope" are refused: their frequencies depend on the sequence's current length, so
keys cached earlier, or by another request, would be rotated differently.
"""

from dataclasses import dataclass
from typing import Any

# What each kind cannot do without.
_KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


class UnsupportedRope(ValueError):
    """The message names the field."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A kind that rope.py computes, with the fields that it needs, `rope_theta` among them."""

    kind: str
    head_dim: int
    parameters: dict[str, Any]


def parse_rope(config: dict[str, Any], head_dim: int, context: int) -> RopeConfig:
    """Reads `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    parameters = {
        "rope_theta": config.get("rope_theta", 10000.0),
        "original_max_position_embeddings": context,
        **(config.get("rope_scaling") or {}),
        **(config.get("rope_parameters") or {}),
    }
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedRope("rope_parameters.partial_rotary_factor is not supported")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in _KINDS:
        raise UnsupportedRope(f"rope_parameters.rope_type {kind!r} is not supported")
    for field in ("rope_theta", *_KINDS[kind]):
        if field not in parameters:
            raise UnsupportedRope(f"rope_parameters.{field} is missing")
        if not isinstance(parameters[field], int | float):
            raise UnsupportedRope(f"rope_parameters.{field} is {parameters[field]!r}, not a number")
    return RopeConfig(kind, head_dim, parameters)
