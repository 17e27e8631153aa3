"""Llama: its parameters are named as in Hugging Face's checkpoints.

A step's tokens are one flat dimension T, whatever sequences they belong to; only attention looks at
`PagedBatch` to tell them apart. All matrices are nn.Linear, so that sharding and quantization can
exchange those and leave the model alone.
"""

import torch
from torch import Tensor, nn

import kernels
from kernels import PagedBatch
from services.worker.engine.kv_cache import KvCache
from services.worker.engine.model_config import ModelConfig
from services.worker.engine.rope import build_rope


class RMSNorm(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.hidden_size))
        self.epsilon = config.rms_norm_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.epsilon)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        hidden, bias = config.hidden_size, config.attention_bias
        queries, keys = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, queries, bias=bias)
        self.k_proj = nn.Linear(hidden, keys, bias=bias)
        self.v_proj = nn.Linear(hidden, keys, bias=bias)
        self.o_proj = nn.Linear(queries, hidden, bias=bias)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: KvCache, batch: PagedBatch
    ) -> Tensor:
        tokens = x.shape[0]
        q = kernels.rotary(self.q_proj(x).view(tokens, -1, self.head_dim), cos, sin)
        k = kernels.rotary(self.k_proj(x).view(tokens, -1, self.head_dim), cos, sin)
        v = self.v_proj(x).view(tokens, -1, self.head_dim)
        k_cache, v_cache = cache.layer(self.layer)
        kernels.store_kv(k, v, k_cache, v_cache, batch.slots)
        y = kernels.paged_attention(q, k_cache, v_cache, batch, self.scale)
        result: Tensor = self.o_proj(y.view(tokens, -1))
        return result


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(kernels.silu_and_mul(self.gate_proj(x), self.up_proj(x)))
        return result


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: KvCache, batch: PagedBatch
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache, batch)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class LlamaBody(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        # Given its weight it does not draw one at random, for which torch, where there is no memory
        # to draw into, imports its compiler: 90 MB and a second.
        weight = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(weight)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config)


class Llama(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.rope = build_rope(config.rope)
        self.model = LlamaBody(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, token_ids: Tensor, cache: KvCache, batch: PagedBatch) -> Tensor:
        """Writes the tokens' keys and values to the cache; gives their final states.

        token_ids: int64 [T]; result: [T, hidden] in the model's dtype.
        """
        cos, sin = self.rope.tables(batch.positions)
        x: Tensor = self.model.embed_tokens(token_ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin, cache, batch)
        states: Tensor = self.model.norm(x)
        return states

    def logits(self, states: Tensor) -> Tensor:
        """States [n, hidden] to float32 scores [n, vocab]."""
        scores: Tensor = self.lm_head(states)
        return scores.float()
