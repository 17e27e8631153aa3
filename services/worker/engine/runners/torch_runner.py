"""A model on torch tensors, operation by operation: on a device that has no kernels of ours."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from kernels import reference
from kernels.heads import QkNorm, Scores
from kernels.kv_layer import KvLayer
from kernels.mixture import Mixture
from kernels.paged_batch import PagedBatch, tiles_of
from kernels.sampling import NO_TOP, NONE_LEFT, NOT_FINITE, Top
from services.worker.engine.adapters import Adapter
from services.worker.engine.config import EngineConfig
from services.worker.engine.formats.choice import told
from services.worker.engine.grammar.library import Words
from services.worker.engine.kv.groups import places
from services.worker.engine.kv.torch_cache import TorchCache
from services.worker.engine.models.registry import Model, build_model
from services.worker.engine.models.rope import angle_tables
from services.worker.engine.parallel.peers import Peers
from services.worker.engine.plan import Collected, Ints, StepPlan
from services.worker.engine.process.cores import usable_cores
from services.worker.engine.runners.moment import Moment
from services.worker.engine.runners.sampler import SamplingBatch, edit, keep_allowed, sample, top_of
from services.worker.engine.runners.torch_adapters import TorchAdapters
from services.worker.engine.sizes import choose_dtype, describe, stored_as
from services.worker.engine.weights.checkpoint import open_checkpoint
from services.worker.engine.weights.torch_weights import DTYPES, STORED, Linear, TorchWeights

log = logging.getLogger(__name__)


class TorchRunner:
    """See `Runner`: of a whole model, or of one rank's part."""

    def __init__(self, config: EngineConfig, peers: Peers) -> None:
        torch.set_num_threads(config.threads or usable_cores())
        self._device = torch.device(config.device)
        shard, self.peers = peers.shard, peers
        model = shard.config
        name = choose_dtype(config.dtype, model, self._device.type, has_dot=False)
        dtype = DTYPES[name]
        with open_checkpoint(config.model, shard.model) as checkpoint:
            weights = TorchWeights(checkpoint.tensors, dtype, self._device, shard)
            self._model = build_model(model, weights)
            for words in told(weights.taken):
                log.warning("%s: %s", config.model, words)
            checkpoint.check_unchanged()
        self.adapters = TorchAdapters(weights.linears, self._device)
        self.info = describe(
            config,
            model,
            dtype=name,
            kernels="reference",
            kv_order="rows",
            threads=torch.get_num_threads(),
            num_parameters=weights.num_parameters,
            parameter_bytes=weights.bytes,
            weights="memory" if self._device.type == "cpu" else str(self._device),
            huge_bytes=0,
            workspace_bytes=None,
        )
        shape, stored = self.info.kv_shape_per_block, STORED[stored_as(config, name)]
        self.cache = TorchCache(self.info.num_blocks, shape, stored, self._device)
        self.places = places(self.info.kv_groups)
        tables = angle_tables(model, self.info.max_model_len)
        self.angles = [(self.tensor(cos), self.tensor(sin)) for cos, sin in tables]
        self.logit_cap = model.logit_cap
        self._sampled = torch.zeros(0, dtype=torch.int32, device=self._device)
        """Ids of the step launched last; below 0: why there is none (kernels/sampling.py)."""

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> "Launched":
        began = Moment(self._device)
        token_ids = self.tensor(plan.token_ids)
        if len(plan.awaited):
            places, rows = self.tensor(plan.awaited).view(-1, 2).unbind(1)
            # Of a row without one nothing comes but what is thrown away.
            token_ids[places] = self._sampled[rows].clamp(min=0)
        step = _Step(self, plan, token_ids, self._batches(plan))
        logits = self._model.forward(step)
        if logits is None:
            logits = torch.zeros((0, 1), device=self._device)
        logits = logits.float()  # temperature, top-p and noise are computed on them
        launched = Launched(plan, began, logits, step.sums)
        if not len(plan.constrained):
            self._sample(launched)
        return launched

    @torch.inference_mode()
    def sample(self, ticket: "Launched", allowed: Words) -> None:
        ticket.allowed = allowed
        self._sample(ticket)

    def _sample(self, launched: "Launched") -> None:
        plan, logits = launched.plan, launched.logits
        self._sampled = torch.zeros(0, dtype=torch.int32, device=self._device)
        top = Top.of(plan.samplings)
        if len(plan.sampled):
            raw = logits.clone() if top.width else logits
            edit(logits, plan.samplings, plan.edits)
            if launched.allowed is not None:
                rows = self.tensor(plan.constrained)
                keep_allowed(logits, rows, self.tensor(launched.allowed))
            tokens = sample(logits, SamplingBatch.of(plan.samplings, self._device))
            given = self.tensor(plan.samplings["given"].astype(np.int64))
            tokens = torch.where(given > 0, given - 1, tokens)
            top = top_of(raw, tokens, plan.samplings)
            best = logits.amax(dim=-1)
            why_none = torch.where(best == -torch.inf, NONE_LEFT, NOT_FINITE)
            self._sampled = torch.where(best.isfinite(), tokens, why_none).to(torch.int32)
        launched.take(self._sampled, top)

    def collect(self, ticket: "Launched") -> Collected:
        results = ticket.plan.results(ticket.wait(), ticket.top, ticket.sums)
        return Collected(results, ticket.seconds)

    def head_rows(self, ids: Sequence[int]) -> NDArray[np.float32]:
        return head_rows(self._model, ids)

    def adapt(self, place: int, adapter: Adapter | None) -> None:
        self.adapters.put(place, adapter)

    def _batches(self, plan: StepPlan) -> list[PagedBatch]:
        """Of each KV group, which differ in where keys and values lie."""
        slots, tables = plan.slots(self.info.block_size), plan.block_tables
        first = PagedBatch(
            positions=self.tensor(plan.positions),
            slots=self.tensor(slots[0]),
            starts=self.tensor(plan.starts),
            lengths=self.tensor(plan.lengths),
            block_tables=self.tensor(tables[0]),
            tiles=self.tensor(tiles_of(np.asarray(plan.starts), plan.num_decodes, queries=64)),
            num_decodes=plan.num_decodes,
        )
        others = zip(slots[1:], tables[1:], strict=True)
        return [first] + [
            replace(first, slots=self.tensor(some), block_tables=self.tensor(table))
            for some, table in others
        ]

    def tensor(self, values: "Ints | np.ndarray") -> Tensor:
        return torch.from_numpy(np.asarray(values)).to(self._device)


class Launched:
    """A step whose operations are in the device's queue; on a CPU they are done."""

    def __init__(
        self, plan: StepPlan, began: Moment, logits: Tensor, sums: Tensor | None = None
    ) -> None:
        """`logits`: of its rows, which sampling changes; `sums`: of pooled states."""
        self.plan, self._began, self.logits = plan, began, logits
        self._sums = None if sums is None else _brought(sums)
        self.allowed: Words | None = None
        """Of the plan's constrained rows, once it is known."""
        self.take(torch.zeros(0, dtype=torch.int32, device=logits.device), NO_TOP)

    def take(self, sampled: Tensor, top: Top) -> None:
        """What it samples, on the device, and its logprobs."""
        self.top = top
        self._ids = _brought(sampled)
        self._ended = Moment(sampled.device)

    def wait(self) -> list[int]:
        """The sampled ids; does not wait for what was launched behind this step."""
        self._ended.wait()
        return self._ids.tolist()

    @property
    def sums(self) -> NDArray[np.float32] | None:
        """[P, hidden], once it was waited for."""
        return None if self._sums is None else self._sums.numpy()

    @property
    def seconds(self) -> float:
        """That the step took, once it was waited for."""
        return self._ended.seconds_since(self._began)


def _brought(tensor: Tensor) -> Tensor:
    """On the host, once what is queued on the device has run."""
    found = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    found.copy_(tensor, non_blocking=True)
    return found


def sums_of(states: Tensor, plan: StepPlan) -> Tensor:
    """float32 [P, hidden], of states of the plan's pooled tokens, [N, hidden]."""
    starts = plan.pool_starts.tolist()
    parts = [states[a:b].float().sum(0) for a, b in pairwise(starts)]
    return torch.stack(parts)


def head_rows(model: Model, ids: Sequence[int]) -> NDArray[np.float32]:
    assert model.head is not None
    weights: Tensor = model.head.weights
    found: NDArray[np.float32] = weights[list(ids)].float().cpu().numpy()
    return found


class _Step:
    """The operations of one step, as `Ops`, on tensors [T, features] of the model's dtype."""

    def __init__(
        self, runner: TorchRunner, plan: StepPlan, token_ids: Tensor, batches: list[PagedBatch]
    ) -> None:
        self._ids = token_ids
        self._plan = plan
        self._rows = runner.tensor(np.concatenate([plan.rows, plan.pooled_rows]))
        self.sums: Tensor | None = None
        """Of pooled states, if any is."""
        self._cache, self._lies, self._batches = runner.cache, runner.places, batches
        self._angles, self._peers = runner.angles, runner.peers
        self._adapters = runner.adapters
        self._places = runner.tensor(plan.adapters) if plan.adapters else None
        """Of each token's adapter."""
        self._of_rows = self._places
        """Of what linears take: those of tokens, then of wanted ones."""

    def embed(self, table: Tensor, scale: float = 1.0) -> Tensor:
        return self._peers.embed(table.__getitem__, self._ids) * scale

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return reference.rms_norm(x, weight, epsilon)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def add_norm(
        self, x: Tensor, y: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        return reference.add_rms_norm(x, y, weight, epsilon)

    def linear(self, x: Tensor, weights: Linear) -> Tensor:
        y = F.linear(x, weights.weights, weights.bias)
        if self._of_rows is not None:
            self._adapters.add(y, x, weights, self._of_rows)
        return self._peers.whole(y, weights.after)

    def silu_mul(self, x: Tensor) -> Tensor:
        return reference.silu_and_mul(x)

    def gelu_mul(self, x: Tensor) -> Tensor:
        return reference.gelu_and_mul(x)

    def experts(self, x: Tensor, mixture: Mixture[Linear]) -> Tensor:
        shares, experts = reference.route(
            F.linear(x, mixture.router[0]), mixture.chosen, mixture.normed
        )
        of_each = mixture.experts, -1
        gate_up, down = (one[0].unflatten(0, of_each) for one in (mixture.gate_up, mixture.down))
        y = reference.mixed(x, gate_up, down, shares, experts)
        y = self._peers.whole(y, mixture.down.after)
        if shared := mixture.shared:
            own = self.linear(self.silu_mul(self.linear(x, shared.gate_up)), shared.down)
            y = y + self.linear(x, shared.gate).sigmoid() * own
        return y

    def rotary(self, qkv: Tensor, layer: int, rope: int = 0, norm: QkNorm | None = None) -> Tensor:
        batch, kv = self._at(layer)
        if norm is not None and self._peers.norms_all:
            qkv, norm = self._peers.norm_all(qkv, norm), None
        return reference.rotary_store(
            qkv, self._angles[rope], batch.positions, batch.slots, kv, norm
        )

    def attention(self, queries: Tensor, layer: int, width: int, scores: Scores) -> Tensor:
        batch, kv = self._at(layer)
        y = reference.paged_attention(queries, kv, batch, scores)
        return y.reshape(len(y), width)

    def _at(self, layer: int) -> tuple[PagedBatch, KvLayer]:
        """Where its keys and values lie."""
        group, place = self._lies[layer]
        return self._batches[group], self._cache.layer(place)

    def cap(self, x: Tensor, cap: float) -> Tensor:
        return reference.capped(x, cap)

    def wanted(self, x: Tensor) -> Tensor:
        if self._places is not None:
            self._of_rows = self._places[self._rows]
        return x[self._rows]

    def pooled(self, x: Tensor) -> Tensor:
        count = len(self._plan.rows)
        if len(self._plan.pooled):
            self.sums = sums_of(x[count:], self._plan)
        return x[:count]
