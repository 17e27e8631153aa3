"""Model families by the architecture that config.json names."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from services.worker.engine.model_config import Fields, ModelConfig
from services.worker.engine.models import (
    gemma2,
    gemma3,
    llama,
    mistral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
)
from services.worker.engine.models.layers import Ops, Rows, Weights


class Model(Protocol):
    def forward(self, ops: Ops) -> Rows:
        """Writes the tokens' keys and values to the cache; gives the logits of the sampled ones,
        [R, vocab]."""


@dataclass(frozen=True, slots=True)
class Family:
    read: Callable[[Fields], ModelConfig]
    model: Callable[[ModelConfig, Weights], Model]


FAMILIES = {
    "LlamaForCausalLM": Family(llama.read, llama.Llama),
    "MistralForCausalLM": Family(mistral.read, llama.Llama),
    "Qwen2ForCausalLM": Family(qwen2.read, llama.Llama),
    "Qwen3ForCausalLM": Family(qwen3.read, llama.Llama),
    "Phi3ForCausalLM": Family(phi3.read, phi3.Phi3),
    "Olmo2ForCausalLM": Family(olmo2.read, olmo2.Olmo2),
    "Gemma2ForCausalLM": Family(gemma2.read, gemma2.Gemma2),
    "Gemma3ForCausalLM": Family(gemma3.read, gemma2.Gemma2),
}


def read_config(directory: str | Path) -> ModelConfig:
    """Reads config.json and, if there, generation_config.json. Raises UnsupportedModel."""
    fields = Fields(Path(directory))
    if fields.architecture not in FAMILIES:
        raise fields.refusal(
            f"architectures {fields.architecture!r} is not supported; "
            f"supported: {', '.join(FAMILIES)}"
        )
    return FAMILIES[fields.architecture].read(fields)


def build_model(config: ModelConfig, weights: Weights) -> Model:
    return FAMILIES[config.architecture].model(config, weights)
