"""Gemma 2 (arXiv 2408.00118): norms before and after, of weights that lie around 0; every other
layer has a window; attention's scores and the logits are capped."""

import math
from dataclasses import dataclass, replace
from typing import Any

from services.worker.engine.models import parts
from services.worker.engine.models.config import Fields, ModelConfig, read_decoder
from services.worker.engine.models.decoder import Decoder
from services.worker.engine.models.layers import Ops, Rows, Vector, Weights
from services.worker.engine.models.rope_config import RopeConfig

ACTIVATION = ("hidden_activation", "gelu_pytorch_tanh")
HEAD_DIM = 256
_DIGITS = {"float32": 24, "bfloat16": 8, "float16": 11}


def read(fields: Fields) -> ModelConfig:
    window = fields.optional_size("sliding_window", 4096)
    return read_gemma(
        fields,
        layers=fields.layers(window, slides=lambda index: index % 2 == 0),
        score_cap=fields.optional("attn_logit_softcapping", 50.0),
        logit_cap=fields.optional("final_logit_softcapping", 30.0),
    )


def read_gemma(fields: Fields, ropes: tuple[RopeConfig, ...] = (), **own: Any) -> ModelConfig:
    """`own`: what is not alike in Gemma 2 and 3."""
    fields.only("use_bidirectional_attention", False, None)
    bias = fields.flag("attention_bias")
    return replace(
        read_decoder(fields, ropes=ropes, activation=ACTIVATION, head_dim=HEAD_DIM, tied=True),
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        qkv_bias=bias,
        out_bias=bias,
        **own,
    )


@dataclass(frozen=True, slots=True)
class Layer:
    before_attention: Vector
    attention: parts.Attention
    after_attention: Vector
    before_mlp: Vector
    mlp: parts.Mlp
    after_mlp: Vector


class Gemma2(Decoder[Layer]):
    PLUS = 1.0

    def _layer(self, weights: Weights, index: int) -> Layer:
        return Layer(
            self._norm_of(weights, index, "input_layernorm"),
            parts.attention(self._config, weights, index, plus=self.PLUS),
            self._norm_of(weights, index, "post_attention_layernorm"),
            self._norm_of(weights, index, "pre_feedforward_layernorm"),
            parts.mlp(self._config, weights, index),
            self._norm_of(weights, index, "post_feedforward_layernorm"),
        )

    def forward(self, ops: Ops) -> Rows | None:
        config, epsilon = self._config, self._config.rms_norm_epsilon
        scale = embedding_scale(config.hidden_size, config.checkpoint_dtype)
        x = ops.embed(self._embed, scale)
        for index, layer in enumerate(self._layers):
            y = layer.attention.heads(ops, ops.norm(x, layer.before_attention, epsilon))
            if index == len(self._layers) - 1:
                x, y = ops.wanted(x), ops.wanted(y)
            y = ops.linear(y, layer.attention.out)
            x = ops.add(x, ops.norm(y, layer.after_attention, epsilon))
            y = ops.linear(ops.norm(x, layer.before_mlp, epsilon), layer.mlp.gate_up)
            y = ops.linear(ops.gelu_mul(y), layer.mlp.down)
            x = ops.add(x, ops.norm(y, layer.after_mlp, epsilon))
        return self._logits(ops, ops.norm(x, self._norm, epsilon))


def embedding_scale(hidden_size: int, dtype: str) -> float:
    """Rounded to the dtype in which the model was made, as it was then."""
    fraction, exponent = math.frexp(math.sqrt(hidden_size))
    digits = _DIGITS[dtype]
    return math.ldexp(round(math.ldexp(fraction, digits)), exponent - digits)
