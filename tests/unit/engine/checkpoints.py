"""Tiny seeded checkpoints, written with transformers, and what transformers computes from them."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB = 257
CONTEXT = 256

VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha-tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head-dim": {"head_dim": 24, "num_key_value_heads": 1},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


def make(folder: Path, variant: str, seed: int = 3, shard: str = "5GB", **overrides: Any) -> Path:
    """Writes a checkpoint of a variant's config with random weights; returns `folder`.

    Weights are larger than usual so that logits lie well apart and no rounding decides a token.
    """
    config = transformers.LlamaConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": None,
            **VARIANTS[variant],
            **overrides,
        }
    )
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif "embed" in name or "lm_head" in name:
                parameter.normal_(std=0.5)
            else:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def load_reference(folder: Path) -> "transformers.LlamaForCausalLM":
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.inference_mode()
def reference_logits(model: "transformers.LlamaForCausalLM", tokens: list[int]) -> Tensor:
    """[len(tokens), vocab]"""
    logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits
