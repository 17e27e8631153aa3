"""What a GGUF file says of its model, as config.json and generation_config.json would say it."""

import os
import re
from typing import Any

import numpy as np

from services.common.checkpoints.gguf.header import Header

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
_OF_EXPERTS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"},
    "qwen3moe": {"model_type": "qwen3_moe", "norm_topk_prob": True},
}
"""What a file of experts is besides: llama.cpp norms the shares of both."""
_MOST_DIMS = 2**16
EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
CONTROL, UNUSED = 3, 5
"""Types of tokens: the one is never text, and the other nothing."""
_CONTROL = re.compile(r"<\|\S+\|>")
_ENDS = {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<end_of_turn>"}
"""They are control tokens and end an answer, whatever else the file says: as llama.cpp has it."""


def config_of(header: Header) -> dict[str, Any]:
    """config.json's fields. Raises UnsupportedGguf, and OSError."""
    name = header.one("general.architecture")
    if name not in ARCHITECTURES:
        raise header.refusal(
            f"general.architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    if header.one("split.count", 1) not in (0, 1):
        raise header.refusal("it is one of several files: join them (llama-gguf-split --merge)")
    fields = _Fields(header, name)
    experts = fields.number("expert_count", 0)
    if experts and name not in _OF_EXPERTS:
        raise header.refusal(f"{name}.expert_count: its mixtures of experts are not supported")
    heads, hidden = fields.number("attention.head_count"), fields.number("embedding_length")
    head_dim = fields.number("attention.key_length", hidden // max(1, heads))
    if not head_dim > 0:
        raise header.refusal(f"{name}.attention.head_count {heads}: heads have {head_dim} features")
    if fields.number("attention.value_length", head_dim) != head_dim:
        raise header.refusal(f"{name}.attention.value_length is not that of keys")
    config = {
        "architectures": [ARCHITECTURES[name]],
        "model_type": name,
        "dtype": _dtype(header),
        "vocab_size": _shape(header, EMBEDDING)[0],
        "hidden_size": hidden,
        "intermediate_size": fields.number("feed_forward_length"),
        "num_hidden_layers": fields.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": fields.number("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(header, fields, head_dim),
        "attention_bias": name != "qwen2" and "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
        "tie_word_embeddings": HEAD not in header.tensors,
    }
    if experts:
        config |= _OF_EXPERTS[name] | {
            "num_experts" if name == "qwen3moe" else "num_local_experts": experts,
            "num_experts_per_tok": fields.number("expert_used_count"),
        }
    if name == "qwen3moe":
        config["moe_intermediate_size"] = fields.number("expert_feed_forward_length")
    window = fields.number("attention.sliding_window", 0)
    if window and name == "llama":
        config["sliding_window"] = window  # which is refused: llama.cpp computes without
    return config


def generation_config_of(header: Header) -> dict[str, Any]:
    ends = {header.one(f"tokenizer.ggml.{which}_token_id") for which in ("eos", "eot", "eom")}
    tokens, types = tokens_of(header), token_types_of(header)
    ends |= {i for i, token in enumerate(tokens) if types[i] == CONTROL and token in _ENDS}
    found: dict[str, Any] = {"eos_token_id": sorted(id for id in ends if type(id) is int)}
    if type(bos := header.one("tokenizer.ggml.bos_token_id")) is int:
        found["bos_token_id"] = bos
    return found


def tokens_of(header: Header) -> list[str]:
    """Raises UnsupportedGguf where there are none, or more than the embedding has."""
    found = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(found, list) or not found:
        raise header.refusal("tokenizer.ggml.tokens is no list of texts")
    rows = _shape(header, EMBEDDING)[0]
    if len(found) > rows:
        raise header.refusal(f"{len(found)} tokenizer.ggml.tokens, {EMBEDDING} has {rows}")
    return found


def token_types_of(header: Header) -> list[int]:
    """Of each token; CONTROL for those that must be, whatever the file says."""
    types = _told_types(header)
    for id in mistyped(header):
        types[id] = CONTROL
    return types


def mistyped(header: Header) -> list[int]:
    """Tokens that end answers, or that the template makes turns of, and are no control tokens by
    the file: whoever writes a message would write them."""
    template = header.metadata.get("tokenizer.chat_template")
    written = template if isinstance(template, str) else ""
    types = _told_types(header)
    return [
        id
        for id, token in enumerate(tokens_of(header))
        if types[id] not in (CONTROL, UNUSED)
        and (token in _ENDS or (_CONTROL.fullmatch(token) and token in written))
    ]


def _told_types(header: Header) -> list[int]:
    count = len(tokens_of(header))
    found = header.metadata.get("tokenizer.ggml.token_type", np.ones(count, np.int32))
    if not isinstance(found, np.ndarray) or len(found) != count or found.dtype.kind not in "iu":
        raise header.refusal(f"tokenizer.ggml.token_type is no list of {count} numbers")
    return [int(one) for one in found]


class _Fields:
    """Keys under the architecture's name."""

    def __init__(self, header: Header, architecture: str) -> None:
        self._header, self._architecture = header, architecture

    def get(self, name: str) -> Any:
        return self._header.one(f"{self._architecture}.{name}")

    def number(self, name: str, usual: float | None = None) -> Any:
        value = self.get(name)
        if value is None and usual is not None:
            return usual
        if isinstance(value, bool) or not isinstance(value, int | float):
            key = f"{self._architecture}.{name}"
            told = "missing" if value is None else "not a number"
            raise self._header.refusal(f"key {key} is {told}")
        return value


def _rope(header: Header, fields: _Fields, head_dim: int) -> dict[str, Any]:
    dims = fields.number("rope.dimension_count", head_dim)
    found: dict[str, Any] = {
        "rope_type": fields.get("rope.scaling.type") or "none",
        "rope_theta": fields.number("rope.freq_base", 10000.0),
    }
    if dims != head_dim:
        found["partial_rotary_factor"] = dims / head_dim
    if fields.number("rope.scaling.attn_factor", 1.0) != 1.0:
        raise header.refusal("rope.scaling.attn_factor is not supported")
    if found["rope_type"] == "none":
        found["rope_type"] = "default"
    elif found["rope_type"] in ("linear", "yarn"):
        found["factor"] = fields.number("rope.scaling.factor")
        original = fields.get("rope.scaling.original_context_length")
        if original is not None:
            found["original_max_position_embeddings"] = original
    else:
        raise header.refusal(f"rope.scaling.type {found['rope_type']!r} is not supported")
    if ROPE_FACTORS in header.tensors:
        if found["rope_type"] != "default":
            raise header.refusal(f"{ROPE_FACTORS} beside rope.scaling.type is not supported")
        # Each frequency is divided by its own, whatever the length: Llama 3.1's way, told so.
        factors = _factors(header)
        found |= {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
        found |= {"attention_factor": 1.0}
    return found


def _factors(header: Header) -> list[float]:
    at = header.tensors[ROPE_FACTORS]
    if at.type != "F32" or len(at.shape) != 1 or at.shape[0] > _MOST_DIMS:
        raise header.refusal(f"tensor {ROPE_FACTORS} is no list of floats")
    with header.path.open("rb") as file:
        content = os.pread(file.fileno(), 4 * at.shape[0], at.offset)
    if len(content) < 4 * at.shape[0]:
        raise header.refusal("it was cut short while it was read")
    return [float(one) for one in np.frombuffer(content, "<f4")]


def _dtype(header: Header) -> str:
    """In which is computed: matrices of few bits have none, and were bfloat16 most of the time."""
    types = {at.type for at in header.tensors.values() if len(at.shape) == 2}
    if "F16" in types:
        return "float16"
    return "float32" if types == {"F32"} else "bfloat16"


def _shape(header: Header, name: str) -> tuple[int, ...]:
    if name not in header.tensors:
        raise header.refusal(f"tensor {name} is missing")
    return header.tensors[name].shape
