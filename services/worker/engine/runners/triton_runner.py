"""A model on an NVIDIA GPU. Steps are queued on the device and nothing here waits but `collect`:
what a step samples stays there for the next one, and comes back behind it.

Steps of decodes alone are replayed from graphs, the others are launched kernel by kernel. Never run
on a GPU as yet (docs/performance.md): tests run it in Triton's interpreter.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.sampling import NO_TOP, Top
from kernels.triton.decode import Splits
from kernels.triton.launch import INTERPRETED
from kernels.triton.matrix import NarrowMatrix
from kernels.triton.prefill import queries_per_tile
from kernels.triton.sampling import SamplerRoom, sample
from services.worker.engine.adapters import Adapter
from services.worker.engine.config import EngineConfig
from services.worker.engine.formats.choice import check_on_gpu, told
from services.worker.engine.grammar.library import Words
from services.worker.engine.kv.groups import places
from services.worker.engine.kv.torch_cache import TorchCache
from services.worker.engine.models.registry import build_model
from services.worker.engine.models.rope import angle_tables
from services.worker.engine.parallel.peers import Peers
from services.worker.engine.plan import Collected, StepPlan
from services.worker.engine.process.cores import usable_cores
from services.worker.engine.runners.decode_graphs import DecodeGraphs
from services.worker.engine.runners.moment import Moment
from services.worker.engine.runners.sampler import edit, keep_allowed, top_of
from services.worker.engine.runners.step_inputs import Capacity, DeviceStep, StepInputs
from services.worker.engine.runners.torch_runner import Launched, head_rows, sums_of
from services.worker.engine.runners.triton_adapters import TritonAdapters
from services.worker.engine.runners.triton_ops import Memory, TritonOps
from services.worker.engine.sizes import choose_dtype, describe, stored_as
from services.worker.engine.weights.checkpoint import open_checkpoint
from services.worker.engine.weights.torch_weights import DTYPES, STORED
from services.worker.engine.weights.triton_weights import TritonWeights

log = logging.getLogger(__name__)

FP8_SINCE = (8, 9)
"""Compute capability of the first GPUs with floating-point numbers of 8 bits."""


@dataclass(frozen=True)
class Ticket:
    launched: Launched
    rows: NDArray[np.int32]
    """Of each row that samples, its place among the tokens that came back, and the logits."""
    step: DeviceStep


class TritonRunner:
    """See `Runner`."""

    def __init__(self, config: EngineConfig, peers: Peers) -> None:
        self._device, self._peers, shard = _device(config), peers, peers.shard
        check_on_gpu(config.quantization, shard)
        model = shard.config
        name = choose_dtype(config.dtype, model, "cuda", has_dot=False)
        with open_checkpoint(config.model, shard.model) as checkpoint:
            weights = TritonWeights(
                checkpoint.tensors,
                DTYPES[name],
                self._device,
                shard,
                config.quantization,
                config.threads or usable_cores(),
            )
            self._model = build_model(model, weights)
            for words in told(weights.taken):
                log.warning("%s: %s", config.model, words)
            checkpoint.check_unchanged()
        self.info = describe(
            config,
            model,
            dtype=name,
            kernels="triton",
            kv_order="rows",
            threads=torch.get_num_threads(),
            num_parameters=weights.num_parameters,
            parameter_bytes=weights.bytes,
            weights=str(self._device),
            huge_bytes=0,
            workspace_bytes=None,
        )
        blocks, context, rows = self.info.num_blocks, self.info.max_model_len, config.max_running
        self._inputs = StepInputs(
            Capacity(
                tokens=config.max_batched_tokens,
                sequences=rows,
                rows=config.max_rows,
                blocks=-(-context // config.block_size),
                block_size=config.block_size,
                scratch=blocks,
                groups=len(self.info.kv_groups),
                queries=queries_per_tile(model.num_heads // model.num_kv_heads),
            ),
            self._device,
        )
        shape, stored = self.info.kv_shape_per_block, STORED[stored_as(config, name)]
        lie = places(self.info.kv_groups)
        self.cache = TorchCache(blocks + 1, shape, stored, self._device)
        self._memory = Memory(
            layers=[self.cache.layer(lie[index][1]) for index in range(model.num_layers)],
            groups=[lie[index][0] for index in range(model.num_layers)],
            angles=[
                (torch.from_numpy(cos).to(self._device), torch.from_numpy(sin).to(self._device))
                for cos, sin in angle_tables(model, context)
            ],
            splits=Splits.of(rows, model.num_heads, model.head_dim, context, self._device),
            tokens=torch.zeros(config.max_rows, dtype=torch.int32, device=self._device),
            adapters=TritonAdapters(
                weights.linears,
                DTYPES[name],
                self._device,
                places=config.max_adapters,
                at_once=config.max_step_adapters,
                most_ranks=config.max_adapter_rank,
            ),
        )
        self._room = SamplerRoom.of(config.max_rows, model.vocab_size, self._device)
        self._before = np.zeros(0, np.int32)
        """Of the step launched last, `Ticket.rows`."""
        self.logit_cap, self._vocab = model.logit_cap, model.vocab_size
        kinds = (False, True) if config.max_adapters else (False,)
        self._graphs = {
            adapted: DecodeGraphs(rows, partial(self._decode, adapted), self._device)
            for adapted in kinds
            if self.info.generates
        }
        """Of steps without adapters, which do not pay for them, and of those with some."""

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Ticket:
        began = Moment(self._device)
        plain = not (len(plan.edits) or Top.of(plan.samplings).width)
        sums = None
        decodes = plan.num_decodes == len(plan.lengths) and not len(plan.pooled)
        if self._graphs and plain and decodes:
            adapted = bool(plan.adapters)
            graphs = self._graphs[adapted]
            size = graphs.size(plan.num_decodes)
            self._inputs.load_decodes(plan, self._before, size)
            logits = graphs.run(size)
            step, rows = self._inputs.decodes(size, adapted), np.asarray(plan.sampled)
        else:
            step = self._inputs.load(plan, self._before)
            ops = TritonOps(step, self._memory, self._peers, every_row=False)
            logits = self._compute(step, ops)
            if ops.states is not None:
                sums = sums_of(ops.states, plan)
            rows = np.arange(len(plan.sampled), dtype=np.int32)
        self._before = rows
        launched = Launched(plan, began, logits, sums)
        launched.take(self._memory.tokens, NO_TOP)
        if not (plain or len(plan.constrained)):
            self._sample_specially(launched, step)
        return Ticket(launched, rows, step)

    @torch.inference_mode()
    def sample(self, ticket: Ticket, allowed: Words) -> None:
        """It has sampled already, as a graph does: once more, then, now that it is known what."""
        launched, plan = ticket.launched, ticket.launched.plan
        if len(plan.edits) or Top.of(plan.samplings).width:
            launched.allowed = allowed
            self._sample_specially(launched, ticket.step)
            return
        rows = ticket.rows[plan.constrained]
        keep_allowed(launched.logits, self._tensor(rows), self._tensor(allowed))
        self._sample(launched.logits, ticket.step)
        launched.take(self._memory.tokens, NO_TOP)

    def collect(self, ticket: Ticket) -> Collected:
        launched = ticket.launched
        tokens = np.array(launched.wait())
        sampled = tokens[ticket.rows].tolist()
        results = launched.plan.results(sampled, launched.top, launched.sums)
        return Collected(results, launched.seconds)

    def adapt(self, place: int, adapter: Adapter | None) -> None:
        self._memory.adapters.put(place, adapter)

    def head_rows(self, ids: Sequence[int]) -> NDArray[np.float32]:
        assert self._model.head is not None
        weights = self._model.head.weights
        if not isinstance(weights, NarrowMatrix):
            return head_rows(self._model, ids)
        found: NDArray[np.float32] = weights.rows(self._tensor(np.asarray(ids))).cpu().numpy()
        return found

    @torch.inference_mode()
    def _decode(self, adapted: bool, rows: int) -> Tensor:
        step = self._inputs.decodes(rows, adapted)
        return self._compute(step, TritonOps(step, self._memory, self._peers, every_row=True))

    def _compute(self, step: DeviceStep, ops: TritonOps) -> Tensor:
        logits: Tensor | None = self._model.forward(ops)
        if logits is None:
            return torch.zeros((0, self._vocab), device=self._device)
        if len(step.rows):
            self._sample(logits, step)
        return logits

    def _sample(self, logits: Tensor, step: DeviceStep) -> None:
        sample(self._memory.tokens[: len(step.rows)], logits, step.samplings, self._room)

    def _sample_specially(self, launched: Launched, step: DeviceStep) -> None:
        """Where rows have edits or want logprobs: by torch's operations, which are waited for. What
        was sampled before is thrown away."""
        plan, raw = launched.plan, launched.logits.float()
        logits, tokens = raw.clone(), self._memory.tokens[: len(step.rows)]
        edit(logits, plan.samplings, plan.edits)
        if launched.allowed is not None:
            rows = self._tensor(np.asarray(plan.constrained))
            keep_allowed(logits, rows, self._tensor(launched.allowed))
        self._sample(logits, step)
        given = self._tensor(plan.samplings["given"].copy())
        tokens.copy_(torch.where((given > 0) & (tokens >= 0), given - 1, tokens))
        launched.take(self._memory.tokens, top_of(raw, tokens.long(), plan.samplings))

    def _tensor(self, values: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _device(config: EngineConfig) -> torch.device:
    """Raises ValueError where the kernels cannot run."""
    device = torch.device(config.device)
    if INTERPRETED and device.type == "cpu":
        return device
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ValueError(f"device {config.device!r}: the kernels 'triton' need an NVIDIA GPU")
    capability = torch.cuda.get_device_capability(device)
    if config.kv_format == "fp8" and capability < FP8_SINCE:
        raise ValueError(
            f"kv_format 'fp8' needs a GPU of compute capability 8.9 or more, {config.device!r} has "
            f"{capability[0]}.{capability[1]}"
        )
    return device
