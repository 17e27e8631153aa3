"""A tiny seeded Llama with a tokenizer, in Hugging Face form: real in every part but its words."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.support.tokenizers import write_tokenizer

_HEADS, _KV_HEADS = 4, 2
_SCALE = 0.15
"""Random weights this large give logits apart by far more than rounding: greedy output must not
hang on the order of a sum."""


def write_checkpoint(
    folder: Path,
    *,
    vocab_size: int = 320,
    window: int = 512,
    seed: int = 20,
    hidden: int = 64,
    layers: int = 3,
) -> Path:
    """Writes the checkpoint and returns its folder. fp32; a seed's weights are always the same.

    By hand, for importing transformers takes each process that writes one several seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": hidden // _HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": window,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    weights = _weights(vocab_size, seed, hidden, layers)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    write_tokenizer(folder, vocab_size)
    return folder


def _weights(vocab_size: int, seed: int, hidden: int, layers: int) -> dict[str, Any]:
    """By name: arrays [out, in], and [hidden] of the norms."""
    rng = np.random.default_rng(seed)
    kv = hidden // _HEADS * _KV_HEADS
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (2 * hidden, hidden),
        "mlp.up_proj": (2 * hidden, hidden),
        "mlp.down_proj": (hidden, 2 * hidden),
    }
    of_layers = {f"model.layers.{n}.{k}": v for n in range(layers) for k, v in shapes.items()}
    ends = dict.fromkeys(("model.embed_tokens", "lm_head"), (vocab_size, hidden))
    drawn = {
        f"{name}.weight": rng.normal(0.0, _SCALE, shape).astype(np.float32)
        for name, shape in {**ends, **of_layers}.items()
    }
    norms = ["model.norm"] + [
        f"model.layers.{n}.{name}"
        for n in range(layers)
        for name in ("input_layernorm", "post_attention_layernorm")
    ]
    return drawn | {f"{name}.weight": np.ones(hidden, np.float32) for name in norms}
