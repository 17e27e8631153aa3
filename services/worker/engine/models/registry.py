"""Model families by the architecture that config.json names."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from services.worker.engine.models import (
    gemma2,
    gemma3,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from services.worker.engine.models.config import Fields, Head, ModelConfig, check_modules
from services.worker.engine.models.layers import Matrix, Ops, Rows, Weights


class Model(Protocol):
    head: Matrix | None
    """Of states of `hidden_size`: makes logits of tokens, or of classes."""

    def forward(self, ops: Ops) -> Rows | None:
        """Writes the tokens' keys and values to the cache; gives the logits of the sampled ones,
        [R, vocab]; None of a model that makes no tokens."""


@dataclass(frozen=True, slots=True)
class Family:
    read: Callable[[Fields], ModelConfig]
    model: Callable[[ModelConfig, Weights], Model]


FAMILIES = {  # by the architecture that makes tokens
    "LlamaForCausalLM": Family(llama.read, llama.Llama),
    "MistralForCausalLM": Family(mistral.read, llama.Llama),
    "Qwen2ForCausalLM": Family(qwen2.read, llama.Llama),
    "Qwen3ForCausalLM": Family(qwen3.read, llama.Llama),
    "MixtralForCausalLM": Family(mixtral.read, mixtral.Mixtral),
    "Qwen3MoeForCausalLM": Family(qwen3_moe.read, qwen2_moe.Qwen2Moe),
    "Qwen2MoeForCausalLM": Family(qwen2_moe.read, qwen2_moe.Qwen2Moe),
    "Phi3ForCausalLM": Family(phi3.read, phi3.Phi3),
    "Olmo2ForCausalLM": Family(olmo2.read, olmo2.Olmo2),
    "Gemma2ForCausalLM": Family(gemma2.read, gemma2.Gemma2),
    "Gemma3ForCausalLM": Family(gemma3.read, gemma2.Gemma2),
}


def read_config(directory: str | Path) -> ModelConfig:
    """Reads config.json and, if there, generation_config.json. Raises UnsupportedModel."""
    fields = Fields(Path(directory))
    family, head = _found(fields.architecture)
    if family is None:
        others = " and ".join(f"...{ending}" for ending in _HEADS if ending != _TOKENS)
        raise fields.refusal(
            f"architectures {fields.architecture!r} is not supported; "
            f"supported: {', '.join(FAMILIES)}, and their {others}"
        )
    check_modules(fields)
    classes = fields.num_labels() if head == "classes" else 0
    return replace(family.read(fields), head=head, num_classes=classes)


def build_model(config: ModelConfig, weights: Weights) -> Model:
    family, _ = _found(config.architecture)
    assert family is not None
    return family.model(config, weights)


_TOKENS = "ForCausalLM"
_HEADS: dict[str, Head] = {
    _TOKENS: "tokens",
    "ForSequenceClassification": "classes",
    "Model": "none",
}
_ALIASES = {"Gemma3Text": "Gemma3"}


def _found(architecture: str) -> tuple[Family | None, Head]:
    """LlamaModel, for one, is what LlamaForCausalLM is without the head."""
    for ending, head in _HEADS.items():
        name = architecture.removesuffix(ending)
        if name != architecture:
            return FAMILIES.get(_ALIASES.get(name, name) + _TOKENS), head
    return None, "none"
