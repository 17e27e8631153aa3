"""Mixtral (arXiv 2401.04088): a Mistral with experts in the place of each MLP."""

from dataclasses import replace

from services.worker.engine.models import parts
from services.worker.engine.models.config import Fields, ModelConfig, read_decoder
from services.worker.engine.models.layers import Weights
from services.worker.engine.models.llama import Llama


def read(fields: Fields) -> ModelConfig:
    every = range(fields.num_layers())
    found = fields.experts("num_local_experts", "intermediate_size", normed=True, layers=every)
    window = fields.optional_size("sliding_window", 0)
    layers = fields.layers(window, slides=lambda _: True)
    return replace(read_decoder(fields), layers=layers, experts=found)


class Mixtral(Llama):
    def _mlp(self, weights: Weights, index: int) -> parts.Experts:
        at = f"model.layers.{index}.block_sparse_moe"
        return parts.experts(self._config, weights, at, ("w1", "w3", "w2"))
