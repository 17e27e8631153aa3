"""What config.json's quantization_config says of tensors, as far as they do not say it themselves.
Imports no torch, and nothing of the engine."""

from dataclasses import dataclass
from typing import Any, Literal

Method = Literal["", "compressed-tensors", "gptq", "awq", "fp8"]
_METHODS: dict[str, Method] = {
    "compressed-tensors": "compressed-tensors",
    "gptq": "gptq",
    "awq": "awq",
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
}
_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized")
_MIXED = "mixed-precision"
_STRATEGIES = ("tensor", "channel", "group", "block")


class UnsupportedScheme(ValueError):
    """The message names the field."""


@dataclass(frozen=True, slots=True)
class Scheme:
    method: Method = ""
    zeros_less: int = 0
    """GPTQ's first layout stores a zero less than it is."""
    blocks: tuple[int, int] | None = None
    """Rows and columns that have a scale of FP8 in common."""
    rounds_rows: bool = False
    """Rows that meet matrices of int8 are to be int8, too, each with a scale of its own."""


NOT_QUANTIZED = Scheme()


def parse_scheme(told: Any) -> Scheme:
    """Raises UnsupportedScheme."""
    if told is None:
        return NOT_QUANTIZED
    if not isinstance(told, dict):
        raise UnsupportedScheme(f"quantization_config {told!r} is no object")
    name = told.get("quant_method")
    method = _METHODS.get(name) if isinstance(name, str) else None
    if method is None:
        raise _refusal("quant_method", name, tuple(_METHODS))
    if method == "gptq":
        layout = told.get("checkpoint_format") or "gptq"
        if layout not in ("gptq", "gptq_v2"):
            raise _refusal("checkpoint_format", layout, ("gptq", "gptq_v2"))
        return Scheme(method, zeros_less=1 if layout == "gptq" else 0)
    if method == "awq":
        version = told.get("version") or "gemm"
        if str(version).lower() != "gemm":
            raise _refusal("version", version, ("gemm",))
        return Scheme(method)
    if method == "fp8":
        return Scheme(method, blocks=_blocks("weight_block_size", told.get("weight_block_size")))
    return _of_groups(told)


def _of_groups(told: dict[str, Any]) -> Scheme:
    """compressed-tensors."""
    for field in ("sparsity_config", "transform_config"):
        if told.get(field):
            raise UnsupportedScheme(f"quantization_config.{field} is not supported")
    groups = told.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise UnsupportedScheme("quantization_config.config_groups names no group")
    format_ = told.get("format")
    if format_ not in (*_FORMATS, _MIXED):
        raise _refusal("format", format_, (*_FORMATS, _MIXED))
    found, rounded = set(), set()
    for name, group in groups.items():
        at, own = f"config_groups.{name}", group if isinstance(group, dict) else {}
        if own.get("format") not in (None, *_FORMATS):
            raise _refusal(f"{at}.format", own.get("format"), _FORMATS)
        weights = own.get("weights")
        if not isinstance(weights, dict):
            raise UnsupportedScheme(f"quantization_config.{at}.weights is no object")
        if weights.get("strategy") not in _STRATEGIES:
            raise _refusal(f"{at}.weights.strategy", weights.get("strategy"), _STRATEGIES)
        found.add(_blocks(f"{at}.weights.block_structure", weights.get("block_structure")))
        if _is_int8(weights):
            rounded.add(_is_of_tokens(own.get("input_activations")))
    found.discard(None)
    if len(found) > 1:
        raise UnsupportedScheme("quantization_config.config_groups have blocks of several sizes")
    blocks = next(iter(found), None)
    return Scheme("compressed-tensors", blocks=blocks, rounds_rows=rounded == {True})


def _is_int8(told: dict[str, Any]) -> bool:
    return told.get("type", "int") == "int" and told.get("num_bits") == 8


def _is_of_tokens(told: Any) -> bool:
    """A scale for each token as it comes, and no zero. Others' rows stay as they are."""
    return (
        isinstance(told, dict)
        and _is_int8(told)
        and (told.get("strategy"), told.get("dynamic")) == ("token", True)
        and told.get("symmetric", True) is True
    )


def _blocks(field: str, value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(_is_size(one) for one in value):
        raise UnsupportedScheme(f"quantization_config.{field} {value!r} is no rows and columns")
    return value[0], value[1]


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _refusal(field: str, value: Any, known: tuple[str, ...]) -> UnsupportedScheme:
    return UnsupportedScheme(
        f"quantization_config.{field} {value!r} is not supported; supported: {', '.join(known)}"
    )
