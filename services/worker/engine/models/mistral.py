"""Mistral (arXiv 2310.06825): a Llama, all of whose layers have a window or none."""

from dataclasses import replace

from services.worker.engine.models.config import Fields, ModelConfig, read_decoder


def read(fields: Fields) -> ModelConfig:
    fields.only("layer_types", None)
    window = fields.optional_size("sliding_window", 4096)
    return replace(read_decoder(fields), layers=fields.layers(window, slides=lambda _: True))
