"""Qwen3's mixtures of experts (arXiv 2505.09388): as Qwen2's, but for norms of each head's queries
and keys, and without an expert that is every token's."""

from dataclasses import replace

from services.worker.engine.models import qwen2_moe
from services.worker.engine.models.config import Fields, ModelConfig, read_decoder


def read(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    window = fields.optional_size("sliding_window", 4096) * fields.flag("use_sliding_window")
    return replace(
        read_decoder(fields),
        layers=fields.layers(window, slides=lambda _: True),
        qk_norm="head",
        qkv_bias=bias,
        out_bias=bias,
        experts=qwen2_moe.experts(fields),
    )
