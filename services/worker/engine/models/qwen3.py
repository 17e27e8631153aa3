"""Qwen3 (arXiv 2505.09388), dense: a Llama that norms each head's queries and keys."""

from dataclasses import replace

from services.worker.engine.models import qwen2
from services.worker.engine.models.config import Fields, ModelConfig, read_decoder


def read(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    return replace(
        read_decoder(fields, head_dim=128),
        layers=qwen2.layers(fields),
        qk_norm="head",
        qkv_bias=bias,
        out_bias=bias,
    )
