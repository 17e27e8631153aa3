"""Llama (arXiv 2302.13971; grouped queries of 2305.13245), tensors named as by Hugging Face."""

from dataclasses import dataclass

from services.worker.engine.model_config import ModelConfig
from services.worker.engine.models.layers import Matrix, Ops, Rows, Vector, Weights


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Vector
    qkv: Matrix
    out: Matrix
    mlp_norm: Vector
    gate_up: Matrix
    down: Matrix


class Llama:
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._config = config
        hidden, vocab = config.hidden_size, config.vocab_size
        self._embed = weights.table("model.embed_tokens", vocab, hidden)
        self._layers = [self._layer(weights, index) for index in range(config.num_layers)]
        self._norm = weights.vector("model.norm", hidden)
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        self._head = weights.matrix({head: vocab}, hidden)

    def _layer(self, weights: Weights, index: int) -> Layer:
        config, at = self._config, f"model.layers.{index}"
        hidden, inner = config.hidden_size, config.intermediate_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, mlp = f"{at}.self_attn", f"{at}.mlp"
        qkv = {f"{attention}.q_proj": queries} | {f"{attention}.{n}_proj": keys for n in "kv"}
        gate_up = {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}
        return Layer(
            attention_norm=weights.vector(f"{at}.input_layernorm", hidden),
            qkv=weights.matrix(qkv, hidden, config.attention_bias),
            out=weights.matrix({f"{attention}.o_proj": hidden}, queries, config.attention_bias),
            mlp_norm=weights.vector(f"{at}.post_attention_layernorm", hidden),
            gate_up=weights.matrix(gate_up, hidden, config.mlp_bias),
            down=weights.matrix({f"{mlp}.down_proj": hidden}, inner, config.mlp_bias),
        )

    def forward(self, ops: Ops) -> Rows:
        """Writes the tokens' keys and values to the cache; gives the logits of the sampled ones,
        [R, vocab]."""
        epsilon = self._config.rms_norm_epsilon
        width = self._config.num_heads * self._config.head_dim
        norms = [*(layer.attention_norm for layer in self._layers), self._norm]
        x = ops.embed(self._embed)
        y = ops.norm(x, norms[0], epsilon)
        for index, layer in enumerate(self._layers):
            y = ops.attention(ops.rotary(ops.linear(y, layer.qkv), index), index, width)
            if index == len(self._layers) - 1:  # nobody looks at the others any more
                x, y = ops.sampled(x), ops.sampled(y)
            x, y = ops.add_norm(x, ops.linear(y, layer.out), layer.mlp_norm, epsilon)
            y = ops.linear(ops.silu_mul(ops.linear(y, layer.gate_up)), layer.down)
            x, y = ops.add_norm(x, y, norms[index + 1], epsilon)
        return ops.linear(y, self._head)
