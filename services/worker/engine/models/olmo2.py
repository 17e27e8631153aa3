"""OLMo 2 (arXiv 2501.00656): norms come after attention and MLP and not before; queries and keys
are normed over all heads together."""

from dataclasses import dataclass, replace

from services.worker.engine.models import parts
from services.worker.engine.models.config import Fields, ModelConfig, read_decoder
from services.worker.engine.models.decoder import Decoder
from services.worker.engine.models.layers import Ops, Rows, Vector, Weights


def read(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    return replace(read_decoder(fields, epsilon=1e-5), qk_norm="all", qkv_bias=bias, out_bias=bias)


@dataclass(frozen=True, slots=True)
class Layer:
    attention: parts.Attention
    attention_norm: Vector
    mlp: parts.Mlp
    mlp_norm: Vector


class Olmo2(Decoder[Layer]):
    def _layer(self, weights: Weights, index: int) -> Layer:
        return Layer(
            parts.attention(self._config, weights, index),
            self._norm_of(weights, index, "post_attention_layernorm"),
            parts.mlp(self._config, weights, index),
            self._norm_of(weights, index, "post_feedforward_layernorm"),
        )

    def forward(self, ops: Ops) -> Rows | None:
        epsilon = self._config.rms_norm_epsilon
        x = ops.embed(self._embed)
        for index, layer in enumerate(self._layers):
            y = layer.attention.heads(ops, x)
            if index == len(self._layers) - 1:
                x, y = ops.wanted(x), ops.wanted(y)
            y = ops.linear(y, layer.attention.out)
            x = ops.add(x, ops.norm(y, layer.attention_norm, epsilon))
            x = ops.add(x, ops.norm(layer.mlp.of(ops, x), layer.mlp_norm, epsilon))
        return self._logits(ops, ops.norm(x, self._norm, epsilon))
