"""What a checkpoint's config.json says of its rotary embedding. Imports no torch (see rope.py).

"dynamic" is refused: its frequencies depend on the sequence's current length, so keys cached
earlier, or by another request, would be rotated differently. Those of "longrope" do, too, but are
only two; they are chosen by the context that is served (decision 0032).
"""

from dataclasses import dataclass
from typing import Any

ORIGINAL = "original_max_position_embeddings"
# What each kind cannot do without.
_KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
# What some have besides, and may leave empty.
_OPTIONAL = ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_LISTS = ("short_factor", "long_factor")


class UnsupportedRope(ValueError):
    """The message names the field."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A kind that rope.py computes, with the fields that it needs, `rope_theta` among them."""

    kind: str
    dims: int
    """Of a head, its first ones: they are turned."""
    context: int
    """Tokens that the model is for."""
    parameters: dict[str, Any]

    def is_long(self, served: int) -> bool:
        """Whether sequences of `served` tokens have other frequencies than shorter ones."""
        return self.kind == "longrope" and served > self.parameters[ORIGINAL]


def is_number(value: object) -> bool:
    """Above 0, and one that a float32 holds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e38


def parse_rope(config: dict[str, Any], head_dim: int, context: int) -> RopeConfig:
    """Reads `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).
    Raises UnsupportedRope."""
    given = object_in(config, "rope_scaling") | object_in(config, "rope_parameters")
    original = config.get(ORIGINAL, given.get(ORIGINAL))
    parameters = {
        "rope_theta": config.get("rope_theta", 10000.0),
        **given,
        ORIGINAL: context if original is None else original,
    }
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KINDS:
        raise UnsupportedRope(f"rope_parameters.rope_type {kind!r} is not supported")
    share = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    share = 1.0 if share is None else share
    if not is_number(share) or share > 1 or int(head_dim * share) % 2:
        raise UnsupportedRope(f"partial_rotary_factor {share!r} of {head_dim} makes no pairs")
    dims = int(head_dim * share)
    _check(kind, parameters, dims // 2)
    if kind == "yarn" and original is not None:
        # What it is for, whichever of the figures was left as it was.
        context = max(context, int(original * parameters["factor"]))
    return RopeConfig(kind, dims, context, parameters)


def object_in(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Empty where there is none. Raises UnsupportedRope."""
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise UnsupportedRope(f"{name} {value!r} is not an object")
    return value


def _check(kind: str, parameters: dict[str, Any], pairs: int) -> None:
    for field in ("rope_theta", ORIGINAL, *_KINDS[kind]):
        if field not in parameters:
            raise UnsupportedRope(f"rope_parameters.{field} is missing")
        value = parameters[field]
        if field not in _LISTS:
            if not is_number(value):
                raise UnsupportedRope(f"rope_parameters.{field} is {value!r}, not a number above 0")
        elif not isinstance(value, list) or not all(map(is_number, value)):
            raise UnsupportedRope(f"rope_parameters.{field} is no list of numbers above 0")
        elif len(value) != pairs:
            raise UnsupportedRope(f"rope_parameters.{field} has {len(value)} numbers, not {pairs}")
    for field in _OPTIONAL:
        if (value := parameters.get(field)) is not None and not is_number(value):
            raise UnsupportedRope(f"rope_parameters.{field} is {value!r}, not a number above 0")
    if parameters["rope_theta"] <= 1 or parameters[ORIGINAL] <= 1:
        raise UnsupportedRope(f"rope_parameters.rope_theta and {ORIGINAL} must be above 1")
    if kind == "llama3" and parameters["high_freq_factor"] <= parameters["low_freq_factor"]:
        raise UnsupportedRope("rope_parameters.high_freq_factor is not above low_freq_factor")
