"""Bytes and operations of a model, from its shape alone."""

from dataclasses import dataclass
from functools import cached_property
from math import prod

from services.worker.engine.kv.cache import block_bytes
from services.worker.engine.models.config import ModelConfig
from services.worker.engine.weights.weights import shapes

PRECISIONS = {"float32": 4.0, "bfloat16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5 + 2 / 32}
"""Bytes of a weight. fp8 and int8 have a scale for each row, which is next to nothing; int4 has one
of 16 bits for each 32 weights, and beside it embeddings and heads are int8 (decision 0061)."""


@dataclass(frozen=True)
class Costs:
    model: ModelConfig
    precision: str = "bfloat16"
    kv_format: str = "bfloat16"

    @cached_property
    def parameters(self) -> int:
        return sum(map(prod, self._shapes.values()))

    @property
    def weight_bytes(self) -> float:
        return self._bytes(self.layer_weights, self.parameters - self.layer_weights)

    @property
    def active_parameters(self) -> int:
        """All but those of experts that a token does not choose."""
        return self.parameters - int(self.expert_weights * (1 - self._chosen))

    @cached_property
    def layer_weights(self) -> int:
        """Of the layers' matrices."""
        return self._weights("")

    @cached_property
    def expert_weights(self) -> int:
        """Of them, those of experts."""
        return self._weights(".experts.") if self.model.experts else 0

    def _weights(self, within: str) -> int:
        return sum(
            prod(shape)
            for name, shape in self._shapes.items()
            if len(shape) == 2 and name.startswith("model.layers.") and within in name
        )

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Of experts there are tens of thousands."""
        return shapes(self.model)

    @property
    def _chosen(self) -> float:
        """Of the experts, what share a token chooses."""
        experts = self.model.experts
        return experts.chosen / experts.count if experts else 1.0

    def met_weights(self, tokens: float) -> float:
        """Of the layers' matrices, those that any of so many tokens meets: of experts those that
        one of them chooses, if each chooses by chance."""
        left: float = (1 - self._chosen) ** tokens
        return self.layer_weights - self.expert_weights * left

    @property
    def head_weights(self) -> int:
        """Of the one that tokens are sampled behind."""
        return self.model.vocab_size * self.model.hidden_size if self.model.head == "tokens" else 0

    def kv_bytes(self, tokens: int) -> int:
        """2 x layers x KV heads x tokens x (head_dim x bytes of an element + bytes of a scale); of
        layers with a window as many tokens as lie in it (decision 0071)."""
        each = block_bytes(self.model, 1, self.kv_format, layers=1)
        return each * int(sum(self._seen(tokens)))

    def prompt_flop(self, tokens: int) -> float:
        """A multiplication and an addition for each weight and token, two such for each pair of
        tokens that look at one another and each feature of all heads; one row of logits."""
        pairs = sum(
            _pairs(tokens, min(layer.window or tokens, tokens)) for layer in self.model.layers
        )
        met = 2 * self.met_weights(1) * tokens
        return met + self._pair_flop * pairs + 2 * self.head_weights

    def step_flop(self, sequences: float, context: float) -> float:
        """Of a step that gives each of the sequences a token."""
        looked_at = sequences * sum(self._seen(context))
        met = 2 * (self.met_weights(1) + self.head_weights) * sequences
        return met + self._pair_flop * looked_at

    def step_bytes(self, sequences: float, context: float) -> float:
        """That such a step reads: weights once, each sequence's keys and values."""
        weights = self.read_bytes(sequences)
        seen = sum(self._seen(context)) / self.model.num_layers
        return weights + sequences * seen * self.kv_bytes(1)

    def read_bytes(self, tokens: float) -> float:
        """Of weights, that a step of so many tokens reads."""
        return self._bytes(self.met_weights(tokens), self.head_weights)

    def _bytes(self, layers: float, tables: int) -> float:
        """Of so many weights of layers, and of embeddings and heads."""
        of_tables = "int8" if self.precision == "int4" else self.precision
        return layers * PRECISIONS[self.precision] + tables * PRECISIONS[of_tables]

    @property
    def _pair_flop(self) -> int:
        return 4 * self.model.num_heads * self.model.head_dim

    def _seen(self, context: float) -> list[float]:
        """Tokens that one looks at, by layer."""
        return [min(layer.window or context, context) for layer in self.model.layers]


def _pairs(tokens: int, window: int) -> float:
    """Of a token and one that it sees, itself included."""
    return window * (window + 1) / 2 + (tokens - window) * window
