"""Llama (arXiv 2302.13971; grouped queries of 2305.13245), tensors named as by Hugging Face."""

from dataclasses import dataclass, replace

from services.worker.engine.models import parts
from services.worker.engine.models.config import Fields, ModelConfig, read_decoder
from services.worker.engine.models.decoder import Decoder
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
    mlp: parts.Mlp | parts.Experts


class Llama(Decoder[Layer]):
    """And others that differ in what their config says alone."""

    FUSED = False
    """Tensors that meet the same input are one."""

    def _layer(self, weights: Weights, index: int) -> Layer:
        return Layer(
            self._norm_of(weights, index, "input_layernorm"),
            parts.attention(self._config, weights, index, fused=self.FUSED),
            self._norm_of(weights, index, "post_attention_layernorm"),
            self._mlp(weights, index),
        )

    def _mlp(self, weights: Weights, index: int) -> parts.Mlp | parts.Experts:
        return parts.mlp(self._config, weights, index, fused=self.FUSED)

    def forward(self, ops: Ops) -> Rows | None:
        epsilon = self._config.rms_norm_epsilon
        norms = [*(layer.attention_norm for layer in self._layers), self._norm]
        x = ops.embed(self._embed)
        y = ops.norm(x, norms[0], epsilon)
        for index, layer in enumerate(self._layers):
            y = layer.attention.heads(ops, y)
            if index == len(self._layers) - 1:  # nobody looks at the others any more
                x, y = ops.wanted(x), ops.wanted(y)
            x, y = ops.add_norm(x, ops.linear(y, layer.attention.out), layer.mlp_norm, epsilon)
            x, y = ops.add_norm(x, layer.mlp.of(ops, y), norms[index + 1], epsilon)
        return self._logits(ops, y)
