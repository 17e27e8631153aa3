"""Qwen2 and 2.5 (arXiv 2407.10671): a Llama with biases of queries, keys and values."""

from dataclasses import replace

from services.worker.engine.models.config import Fields, LayerConfig, ModelConfig, read_decoder

FULL_LAYERS = 28
"""Where `max_window_layers` is not there."""


def read(fields: Fields) -> ModelConfig:
    fields.only("dual_chunk_attention_config", None)
    return replace(read_decoder(fields), layers=layers(fields), qkv_bias=True)


def layers(fields: Fields) -> tuple[LayerConfig, ...]:
    """Only with `use_sliding_window` windows are, and then in the last layers."""
    window = (
        fields.optional_size("sliding_window", 4096) if fields.flag("use_sliding_window") else 0
    )
    none = fields.raw.get("max_window_layers") == 0
    full = 0 if none else fields.size("max_window_layers", FULL_LAYERS)
    return fields.layers(window, slides=lambda index: index >= full)
