"""Model families by the architecture that config.json names."""

from services.worker.engine.model_config import ModelConfig
from services.worker.engine.models.layers import Weights
from services.worker.engine.models.llama import Llama

FAMILIES = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Llama,  # without a sliding window it is Llama
}


def build_model(config: ModelConfig, weights: Weights) -> Llama:
    return FAMILIES[config.architecture](config, weights)
