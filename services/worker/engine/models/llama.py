"""Llama (arXiv 2302.13971; grouped queries of 2305.13245), tensors named as by Hugging Face."""

from dataclasses import dataclass, replace

from services.worker.engine.model_config import Fields, ModelConfig, read_decoder
from services.worker.engine.models import parts
from services.worker.engine.models.layers import Ops, Rows, Vector, Weights


def read(fields: Fields) -> ModelConfig:
    fields.only("sliding_window", None)
    bias = fields.flag("attention_bias")
    return replace(
        read_decoder(fields), qkv_bias=bias, out_bias=bias, mlp_bias=fields.flag("mlp_bias")
    )


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Vector
    attention: parts.Attention
    mlp_norm: Vector
    mlp: parts.Mlp


class Llama:
    """And others that differ in what their config says alone."""

    FUSED = False
    """Tensors that meet the same input are one."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._config = config
        hidden = config.hidden_size
        self._embed = weights.table("model.embed_tokens", config.vocab_size, hidden)
        self._layers = [self._layer(weights, index) for index in range(config.num_layers)]
        self._norm = weights.vector("model.norm", hidden)
        self.head = parts.head(config, weights)

    def _layer(self, weights: Weights, index: int) -> Layer:
        config, at = self._config, f"model.layers.{index}"
        return Layer(
            weights.vector(f"{at}.input_layernorm", config.hidden_size),
            parts.attention(config, weights, index, fused=self.FUSED),
            weights.vector(f"{at}.post_attention_layernorm", config.hidden_size),
            parts.mlp(config, weights, index, fused=self.FUSED),
        )

    def forward(self, ops: Ops) -> Rows | None:
        """As `Model.forward`."""
        epsilon = self._config.rms_norm_epsilon
        norms = [*(layer.attention_norm for layer in self._layers), self._norm]
        x = ops.embed(self._embed)
        y = ops.norm(x, norms[0], epsilon)
        for index, layer in enumerate(self._layers):
            y = layer.attention.heads(ops, y)
            if index == len(self._layers) - 1:  # nobody looks at the others any more
                x, y = ops.wanted(x), ops.wanted(y)
            x, y = ops.add_norm(x, ops.linear(y, layer.attention.out), layer.mlp_norm, epsilon)
            y = ops.linear(ops.silu_mul(ops.linear(y, layer.mlp.gate_up)), layer.mlp.down)
            x, y = ops.add_norm(x, y, norms[index + 1], epsilon)
        return parts.logits(ops, self._config, y, self.head)
