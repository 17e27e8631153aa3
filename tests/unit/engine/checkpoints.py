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
    "mistral": {"model_type": "mistral", "sliding_window": 21, "head_dim": 32},
    "qwen2": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 40,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 5, "sliding_window": 29},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "head_dim": 32,
        "num_experts": 20,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "mlp_only_layers": [1],
    },
    "qwen2-moe": {
        "model_type": "qwen2_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 128,
        "norm_topk_prob": True,
    },
    "phi3": {
        "model_type": "phi3",
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "sliding_window": 100,
        "original_max_position_embeddings": CONTEXT,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "attention_factor": 1.1,
            "short_factor": [1 + i / 9 for i in range(12)],
            "long_factor": [1 + i / 2 for i in range(12)],
        },
    },
    "olmo2": {"model_type": "olmo2"},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 32,
        "num_hidden_layers": 3,
        "sliding_window": 17,
        "query_pre_attn_scalar": 50,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 12.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 32,
        "num_hidden_layers": 4,
        "sliding_window": 33,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
}


def make(
    folder: Path,
    variant: str,
    seed: int = 3,
    shard: str = "5GB",
    kind: Any = transformers.AutoModelForCausalLM,
    **overrides: Any,
) -> Path:
    """Writes a checkpoint of a variant's config with random weights; returns `folder`.

    Weights are larger than usual so that logits lie well apart and no rounding decides a token.
    """
    config = transformers.AutoConfig.for_model(
        **{
            "model_type": "llama",
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
    model = kind.from_config(config)
    around = 0 if config.model_type.startswith("gemma") else 1
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(around - 0.5, around + 0.5)
            elif "embed" in name or "lm_head" in name:
                parameter.normal_(std=0.5)
            else:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def load_reference(folder: Path) -> "transformers.PreTrainedModel":
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.inference_mode()
def reference_logits(model: "transformers.PreTrainedModel", tokens: list[int]) -> Tensor:
    """[len(tokens), vocab]"""
    logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits
