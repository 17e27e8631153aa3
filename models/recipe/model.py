"""A Llama in plain PyTorch, whose parameter names are those of Hugging Face's checkpoints.

It exists because it trains faster on a CPU than the general implementation; `tests/models`
compares the logits of the two.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. Widths are in features, `context` in tokens."""

    vocab: int
    hidden: int = 256
    inner: int = 640
    layers: int = 6
    heads: int = 4  # as many for keys and values: the first weights need three at least
    head_dim: int = 64
    context: int = 2048
    theta: float = 10000.0
    epsilon: float = 1e-5


class RMSNorm(nn.Module):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.epsilon)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on x: (batch, tokens, heads, dim), by tables of (tokens, 1, dim / 2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class _CausalSoftmax(torch.autograd.Function):
    """Softmax of the scores of some consecutive queries, the last keys being their own.

    It works in place where it can and keeps only its result for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor) -> Tensor:
        scores[..., -len(mask) :].add_(mask)
        weights = torch.softmax(scores, -1)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (weights,) = ctx.saved_tensors
        return torch._softmax_backward_data(grad, weights, -1, weights.dtype), None


QUERIES = 192  # that a CPU takes at once against all keys before them


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over (batch, heads, tokens, dim).

    A CPU does it in plain batched products over blocks of queries: measured 1.7 to 2.4 times the
    speed of PyTorch's fused kernel, forward and backward, at 256-900 tokens in bf16.
    """
    if q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    rows, heads, tokens, dim = q.shape
    q, k, v = (x.reshape(rows * heads, tokens, dim) for x in (q * dim**-0.5, k, v))
    blocks = []
    for first in range(0, tokens, QUERIES):
        end = min(first + QUERIES, tokens)
        mask = torch.full((end - first, end - first), -1e9, dtype=q.dtype).triu(1)
        scores = torch.bmm(q[:, first:end], k[:, :end].mT)
        blocks.append(torch.bmm(_CausalSoftmax.apply(scores, mask), v[:, :end]))
    return torch.cat(blocks, 1).view(rows, heads, tokens, dim)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden, width, bias=False)
        self.v_proj = nn.Linear(shape.hidden, width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        dim = self.shape.head_dim
        q = rotate(self.q_proj(x).view(rows, tokens, -1, dim), cos, sin).transpose(1, 2)
        k = rotate(self.k_proj(x).view(rows, tokens, -1, dim), cos, sin).transpose(1, 2)
        v = self.v_proj(x).view(rows, tokens, -1, dim).transpose(1, 2)
        y = attend(q, k, v)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(rows, tokens, -1))
        return out


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.epsilon)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.epsilon)


class Llama(nn.Module):
    """Token ids (batch, tokens) to hidden states and logits; the output layer is the embedding."""

    cos: Tensor  # (context, 1, head_dim / 2)
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        rates = shape.theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles = torch.arange(shape.context).float()[:, None, None] * rates
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.reset()

    def reset(self) -> None:
        """Small normal weights; those that write to the residual stream start at zero."""
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)
            elif weight.ndim == 2:
                std = 0.02 if "embed" in name else weight.shape[1] ** -0.5
                nn.init.normal_(weight, std=std)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Final normed states: (batch, tokens, hidden)."""
        x = self.model.embed_tokens(tokens)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        cos, sin = self.cos[: tokens.shape[1]].to(x.dtype), self.sin[: tokens.shape[1]].to(x.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        states: Tensor = self.model.norm(x)
        return states

    def logits(self, states: Tensor) -> Tensor:
        """States (..., hidden) to scores (..., vocab)."""
        return F.linear(states, self.model.embed_tokens.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(self.hidden(tokens))
