"""Phi-3, 3.5 and 4 (arXiv 2404.14219; longrope of 2402.13753): a Llama with fused tensors, and in
some a rotary embedding of a part of each head."""

from dataclasses import replace

from services.worker.engine.models.config import Fields, ModelConfig, read_decoder
from services.worker.engine.models.llama import Llama


def read(fields: Fields) -> ModelConfig:
    scaling = fields.raw.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("type") in ("su", "yarn"):  # its names before
        fields.raw["rope_scaling"] = scaling | {"type": "longrope"}
    layers = fields.layers(fields.optional_size("sliding_window", 0), slides=lambda _: True)
    return replace(read_decoder(fields, epsilon=1e-5, partial=True), layers=layers)


class Phi3(Llama):
    FUSED = True
