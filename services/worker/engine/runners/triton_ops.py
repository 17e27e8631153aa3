"""A model's operations on a GPU, as `Ops`: Triton kernels, and torch's products."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
from kernels.heads import QkNorm, Scores
from kernels.kv_layer import KvLayer
from kernels.mixture import Mixture
from kernels.paged_batch import PagedBatch
from kernels.triton import activation, experts, norm, rotary
from kernels.triton.decode import Splits, decode
from kernels.triton.deltas import rows_of
from kernels.triton.embed import embed
from kernels.triton.linear import linear
from kernels.triton.matrix import NarrowMatrix
from kernels.triton.prefill import prefill
from services.worker.engine.parallel.peers import Peers
from services.worker.engine.runners.step_inputs import DeviceStep
from services.worker.engine.runners.triton_adapters import TritonAdapters
from services.worker.engine.weights.triton_weights import AnyLinear


@dataclass(frozen=True)
class Memory:
    """What stays from step to step."""

    layers: list[KvLayer]
    """Of each layer of the model"""
    groups: list[int]
    """Likewise: which of the step's `batches` says where its keys and values lie"""
    angles: list[tuple[Tensor, Tensor]]
    """Of each rotary embedding cos and sin, float32 [context, dims / 2]"""
    splits: Splits
    tokens: Tensor
    """int32 [rows]: what the step before sampled"""
    adapters: TritonAdapters


class TritonOps:
    """Of one step, on tensors [T, features]; waits for nothing."""

    def __init__(self, step: DeviceStep, memory: Memory, peers: Peers, every_row: bool) -> None:
        """`every_row`: after each token one is sampled."""
        self._step, self._memory, self._every_row = step, memory, every_row
        self._peers = peers
        self._adapted = None if step.adapters is None else rows_of(step.adapters)
        """Of what linears take: tokens, then the wanted ones."""
        self.states: Tensor | None = None
        """Of pooled tokens, if any is."""

    def embed(self, table: Tensor | NarrowMatrix, scale: float = 1.0) -> Tensor:
        ids, before = self._step.token_ids, self._memory.tokens
        if self._peers.group is None:
            return embed(ids, before, table, scale)
        known = torch.where(ids < 0, before[(-1 - ids).clamp(min=0)].clamp(min=0), ids)
        return self._peers.embed(lambda places: embed(places, before, table), known) * scale

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return norm.rms_norm(x, weight, epsilon)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def add_norm(
        self, x: Tensor, y: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        return norm.add_rms_norm(x, y, weight, epsilon)

    def linear(self, x: Tensor, weights: AnyLinear) -> Tensor:
        y = _product(x, weights)
        if self._adapted is not None:
            self._memory.adapters.add(y, x, weights, self._adapted)
        return self._peers.whole(y, weights.after)

    def silu_mul(self, x: Tensor) -> Tensor:
        return activation.silu_and_mul(x)

    def gelu_mul(self, x: Tensor) -> Tensor:
        return activation.gelu_and_mul(x)

    def experts(self, x: Tensor, mixture: Mixture[AnyLinear]) -> Tensor:
        logits = _product(x, mixture.router)
        shares, groups = experts.routed(logits, mixture.chosen, mixture.normed)
        gate_up, down = (
            _by_expert(one.weights, mixture.experts) for one in (mixture.gate_up, mixture.down)
        )
        y = experts.of_experts(x, gate_up, groups, mixture.chosen)
        y = experts.of_experts(activation.silu_and_mul(y), down, groups, chosen=0)
        y = experts.mix(y, groups, shares)
        y = self._peers.whole(y, mixture.down.after)
        if shared := mixture.shared:
            own = self.linear(self.silu_mul(self.linear(x, shared.gate_up)), shared.down)
            y = y + self.linear(x, shared.gate).sigmoid() * own
        return y

    def rotary(self, qkv: Tensor, layer: int, rope: int = 0, norm: QkNorm | None = None) -> Tensor:
        batch, memory = self._batch(layer), self._memory
        if norm is not None and self._peers.norms_all:
            qkv, norm = self._peers.norm_all(qkv, norm), None
        return rotary.rotary_store(
            qkv, memory.angles[rope], batch.positions, batch.slots, memory.layers[layer], norm
        )

    def attention(self, queries: Tensor, layer: int, width: int, scores: Scores) -> Tensor:
        batch, kv = self._batch(layer), self._memory.layers[layer]
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        if batch.num_decodes:
            decode(out, queries, kv, batch, scores, self._memory.splits)
        if len(batch.tiles):
            prefill(out, queries, kv, batch, scores)
        return out.view(len(out), width)

    def _batch(self, layer: int) -> PagedBatch:
        return self._step.batches[self._memory.groups[layer]]

    def cap(self, x: Tensor, cap: float) -> Tensor:
        return reference.capped(x, cap)

    def wanted(self, x: Tensor) -> Tensor:
        if self._every_row:
            return x
        if self._step.adapters is not None:
            self._adapted = rows_of(self._step.adapters[self._step.wanted])
        return x[self._step.wanted]

    def pooled(self, x: Tensor) -> Tensor:
        count = len(self._step.rows)
        if len(x) > count:
            self.states = x[count:]
        return x[:count]


def _product(x: Tensor, weights: AnyLinear) -> Tensor:
    if isinstance(weights.weights, NarrowMatrix):
        return linear(x, weights.weights, weights.bias)
    return F.linear(x, weights.weights, weights.bias)


def _by_expert(weights: Tensor | NarrowMatrix, count: int) -> Tensor | NarrowMatrix:
    """As `experts.of_experts` takes them."""
    return weights if isinstance(weights, NarrowMatrix) else weights.unflatten(0, (count, -1))
