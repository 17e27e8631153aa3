"""What all families have around their layers."""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from services.worker.engine.models import parts
from services.worker.engine.models.config import ModelConfig
from services.worker.engine.models.layers import Ops, Rows, Vector, Weights

Layer = TypeVar("Layer")


class Decoder(ABC, Generic[Layer]):
    """An embedding, layers, a last norm, a head. A family says what its layers are made of, and
    what is computed: its `forward` is `Model.forward`."""

    PLUS = 0.0
    """To the weights of norms."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._config = config
        self._embed = weights.table("model.embed_tokens", config.vocab_size, config.hidden_size)
        self._layers = [self._layer(weights, index) for index in range(config.num_layers)]
        self._norm = weights.vector("model.norm", config.hidden_size, self.PLUS)
        self.head = parts.head(config, weights)

    @abstractmethod
    def _layer(self, weights: Weights, index: int) -> Layer:
        """Asks for its tensors."""

    @abstractmethod
    def forward(self, ops: Ops) -> Rows | None: ...

    def _norm_of(self, weights: Weights, index: int, name: str) -> Vector:
        """One of a layer's."""
        return weights.vector(f"model.layers.{index}.{name}", self._config.hidden_size, self.PLUS)

    def _logits(self, ops: Ops, x: Rows) -> Rows | None:
        """Of `wanted` rows, normed for the last time: those of the rows that sample; None where no
        tokens are made."""
        config, x = self._config, ops.pooled(x)
        if config.head != "tokens":
            return None
        found = ops.linear(x, self.head)
        return ops.cap(found, config.logit_cap) if config.logit_cap else found
