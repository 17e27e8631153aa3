"""A model's operations on a GPU, as `Ops`: Triton kernels, and torch's products."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
from kernels.heads import QkNorm, Scores
from kernels.kv_layer import KvLayer
from kernels.triton import activation, norm, rotary
from kernels.triton.decode import Splits, decode
from kernels.triton.embed import embed
from kernels.triton.prefill import prefill
from services.worker.engine.step_inputs import DeviceStep
from services.worker.engine.torch_weights import Linear


@dataclass(frozen=True)
class Memory:
    """What stays from step to step."""

    layers: list[KvLayer]
    angles: list[tuple[Tensor, Tensor]]
    """Of each rotary embedding cos and sin, float32 [context, dims / 2]"""
    splits: Splits
    tokens: Tensor
    """int32 [rows]: what the step before sampled"""


class TritonOps:
    """Of one step, on tensors [T, features]; waits for nothing."""

    def __init__(self, step: DeviceStep, memory: Memory, every_row: bool) -> None:
        """`every_row`: after each token one is sampled."""
        self._step, self._memory, self._every_row = step, memory, every_row
        self.states: Tensor | None = None
        """Of pooled tokens, if any is."""

    def embed(self, table: Tensor, scale: float = 1.0) -> Tensor:
        return embed(self._step.token_ids, self._memory.tokens, table, scale)

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return norm.rms_norm(x, weight, epsilon)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def add_norm(
        self, x: Tensor, y: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        return norm.add_rms_norm(x, y, weight, epsilon)

    def linear(self, x: Tensor, weights: Linear) -> Tensor:
        return F.linear(x, *weights)

    def silu_mul(self, x: Tensor) -> Tensor:
        return activation.silu_and_mul(x)

    def gelu_mul(self, x: Tensor) -> Tensor:
        return activation.gelu_and_mul(x)

    def rotary(self, qkv: Tensor, layer: int, rope: int = 0, norm: QkNorm | None = None) -> Tensor:
        batch, memory = self._step.batch, self._memory
        return rotary.rotary_store(
            qkv, memory.angles[rope], batch.positions, batch.slots, memory.layers[layer], norm
        )

    def attention(self, queries: Tensor, layer: int, width: int, scores: Scores) -> Tensor:
        batch, kv = self._step.batch, self._memory.layers[layer]
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        if batch.num_decodes:
            decode(out, queries, kv, batch, scores, self._memory.splits)
        if len(batch.tiles):
            prefill(out, queries, kv, batch, scores)
        return out.view(len(out), width)

    def cap(self, x: Tensor, cap: float) -> Tensor:
        return reference.capped(x, cap)

    def wanted(self, x: Tensor) -> Tensor:
        return x if self._every_row else x[self._step.wanted]

    def pooled(self, x: Tensor) -> Tensor:
        count = len(self._step.rows)
        if len(x) > count:
            self.states = x[count:]
        return x[:count]
