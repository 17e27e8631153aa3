"""What a checkpoint's config.json says, checked against what the models here can compute."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.worker.engine.rope_config import RopeConfig, parse_rope


class UnsupportedModel(Exception):
    """The checkpoint is broken, or asks for something that is not implemented. The message names
    the file and the field."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-architecture model. Sizes in features, `context` in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    rms_norm_epsilon: float
    rope: RopeConfig
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    checkpoint_dtype: str
    """float32, bfloat16 or float16."""
    eos_token_ids: tuple[int, ...]
    """Of config.json and generation_config.json together."""


ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
"""Mistral without a sliding window is Llama."""


_NUMBERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
)


def read_config(directory: str | Path) -> ModelConfig:
    """Reads config.json and, if there, generation_config.json. Raises UnsupportedModel."""
    folder = Path(directory)
    path = folder / "config.json"
    raw = _read_json(path)
    architecture = next(iter(raw.get("architectures") or []), "")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{path}: architectures {architecture!r} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    _refuse_unsupported(path, raw)
    _refuse_odd_numbers(path, raw)
    try:
        return _build(path, architecture, raw, _eos_token_ids(folder, raw))
    except KeyError as error:
        raise UnsupportedModel(f"{path}: {error.args[0]} is missing") from error
    except (ValueError, TypeError) as error:  # of the rotary embedding, too
        raise UnsupportedModel(f"{path}: {error}") from error


def _build(
    path: Path, architecture: str, raw: dict[str, Any], eos_token_ids: tuple[int, ...]
) -> ModelConfig:
    hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
    kv_heads = int(raw.get("num_key_value_heads") or heads)
    head_dim = int(raw.get("head_dim") or hidden // heads)
    context = int(raw["max_position_embeddings"])
    if heads % kv_heads:
        raise UnsupportedModel(
            f"{path}: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}"
        )
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise UnsupportedModel(f"{path}: dtype {dtype!r} is not supported")
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context=context,
        rms_norm_epsilon=float(raw.get("rms_norm_eps", 1e-6)),
        rope=parse_rope(raw, head_dim, context),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        checkpoint_dtype=dtype,
        eos_token_ids=eos_token_ids,
    )


def _refuse_odd_numbers(path: Path, raw: dict[str, Any]) -> None:
    """Some of them would fail late and by another's name, or not at all."""
    for field in _NUMBERS:
        value = raw.get(field)
        if value is not None and (not isinstance(value, int | float) or value <= 0):
            raise UnsupportedModel(f"{path}: {field} {value!r} is not a number above 0")


def _refuse_unsupported(path: Path, raw: dict[str, Any]) -> None:
    """Fields whose other values would silently change what the model computes."""
    supported: dict[str, tuple[object, ...]] = {
        "hidden_act": ("silu",),
        "sliding_window": (None,),
        "quantization_config": (None,),
        "partial_rotary_factor": (None, 1, 1.0),
    }
    for field, values in supported.items():
        if field in raw and raw[field] not in values:
            raise UnsupportedModel(f"{path}: {field} {raw[field]!r} is not supported")


def _eos_token_ids(folder: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    found: list[Any] = [raw.get("eos_token_id")]
    generation = folder / "generation_config.json"
    if generation.exists():
        found.append(_read_json(generation).get("eos_token_id"))
    ids: set[int] = set()
    for value in found:
        ids.update([] if value is None else [value] if isinstance(value, int) else value)
    return tuple(sorted(ids))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise UnsupportedModel(f"{path} is missing") from None
    except json.JSONDecodeError as error:
        raise UnsupportedModel(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path} is not a JSON object")
    return content
