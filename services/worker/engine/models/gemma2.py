"""Gemma 2 (arXiv 2408.00118): norms before and after, of weights that lie around 0; every other
layer has a window; attention's scores and the logits are capped."""

import math
from dataclasses import dataclass, replace
from typing import Any

from services.worker.engine.model_config import Fields, ModelConfig, read_decoder
from services.worker.engine.models import parts
from services.worker.engine.models.layers import Ops, Rows, Vector, Weights
from services.worker.engine.rope_config import RopeConfig

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


class Gemma2:
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._config = config
        self._embed = weights.table("model.embed_tokens", config.vocab_size, config.hidden_size)
        self._layers = [self._layer(weights, index) for index in range(config.num_layers)]
        self._norm = weights.vector("model.norm", config.hidden_size, plus=1)
        self.head = parts.head(config, weights)

    def _layer(self, weights: Weights, index: int) -> Layer:
        config = self._config

        def norm(name: str) -> Vector:
            return weights.vector(f"model.layers.{index}.{name}", config.hidden_size, plus=1)

        return Layer(
            norm("input_layernorm"),
            parts.attention(config, weights, index, plus=1),
            norm("post_attention_layernorm"),
            norm("pre_feedforward_layernorm"),
            parts.mlp(config, weights, index),
            norm("post_feedforward_layernorm"),
        )

    def forward(self, ops: Ops) -> Rows | None:
        """As `Model.forward`."""
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
        return parts.logits(ops, config, ops.norm(x, self._norm, epsilon), self.head)


def embedding_scale(hidden_size: int, dtype: str) -> float:
    """Rounded to the dtype in which the model was made, as it was then."""
    fraction, exponent = math.frexp(math.sqrt(hidden_size))
    digits = _DIGITS[dtype]
    return math.ldexp(round(math.ldexp(fraction, digits)), exponent - digits)
