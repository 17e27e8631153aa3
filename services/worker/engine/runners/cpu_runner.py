"""A model on the C++ kernels: recorded once, run in one call a step. Imports no torch."""

import logging
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.deltas import Deltas, Part
from kernels.cpu.library import Library, Unavailable
from kernels.cpu.matrix import BYTES_STEP, NIBBLES_STEP, PANEL
from kernels.cpu.program import NO_INTS, Geometry, Ints, Launched, Limits, Program
from kernels.cpu.recorder import Recorder
from services.worker.engine.adapters import Adapter, Lora, is_adapted
from services.worker.engine.config import EngineConfig
from services.worker.engine.formats.choice import widths
from services.worker.engine.grammar.library import Words
from services.worker.engine.kv.cpu_cache import CpuCache
from services.worker.engine.kv.groups import block_layers, places
from services.worker.engine.models.config import ModelConfig
from services.worker.engine.models.registry import build_model
from services.worker.engine.models.rope import angle_tables
from services.worker.engine.parallel.shard import Shard
from services.worker.engine.plan import Collected, StepPlan
from services.worker.engine.process.cores import usable_cores
from services.worker.engine.sizes import (
    choose_dtype,
    describe,
    groups_of,
    max_model_len,
    num_blocks,
)
from services.worker.engine.weights.cpu_weights import CpuWeights

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from services.worker.engine.parallel.recorder import RankRecorder

log = logging.getLogger(__name__)


def check_fits(config: EngineConfig, shard: Shard) -> None:
    """Raises Unavailable if the kernels cannot run the model, or a rank's part of it, so."""
    model, whose = shard.config, f", of each of {shard.ranks} ranks," if shard.ranks > 1 else ""
    step = {"auto": 2, "int4": NIBBLES_STEP}.get(config.quantization, BYTES_STEP)
    for name, size, multiple in (
        ("head_dim", model.head_dim, PANEL),
        ("block_size", config.block_size, PANEL),
        *((name, size, step) for name, size in widths(model)),
        *_of_experts(model),
    ):
        if size % multiple:
            raise Unavailable(f"{name} {size}{whose} is no multiple of {multiple}")


def _of_experts(model: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """Each of them has panels of its own."""
    if model.experts is not None:
        yield "hidden_size", model.hidden_size, PANEL
        yield "features within an expert", model.experts.inner, PANEL // 2


def _deltas(config: EngineConfig, weights: CpuWeights) -> Deltas | None:
    if not config.max_adapters:
        return None
    adapted = {m: layers for m, layers in weights.linears.items() if any(map(is_adapted, layers))}
    most = max(map(len, adapted.values())) * config.max_adapter_rank
    return Deltas(adapted, config.max_adapters, most)


def _of_rank(shard: Shard, group: "ProcessGroup", weights: CpuWeights) -> "RankRecorder":
    from services.worker.engine.parallel.recorder import RankRecorder

    return RankRecorder(shard, group, weights.linears)


def _part(modules: Mapping[str, Lora], name: str, size: int, width: int) -> Part:
    if found := modules.get(name):
        return Part(found.down, found.up)
    return Part(np.zeros((0, width), np.float32), np.zeros((0, size), np.float32))


@dataclass(slots=True)
class CpuTicket:
    plan: StepPlan
    launched: list[Launched]
    """Its parts, the last of which samples."""


class CpuRunner:
    """See `Runner`."""

    def __init__(
        self,
        config: EngineConfig,
        shard: Shard,
        library: Library,
        group: "ProcessGroup | None" = None,
    ) -> None:
        """`group`: of the ranks, if there are some."""
        model = shard.config
        self._sampled_ids: Ints = NO_INTS
        """Of the step launched last."""
        dtype = choose_dtype(config.dtype, model, "cpu", library.has_dot)
        threads = config.threads or usable_cores()
        if threads > usable_cores():
            log.warning("threads %d wait for %d processors' turns", threads, usable_cores())
        weights = CpuWeights(
            library, config.model, shard, dtype, config.packed_dir, threads, config.quantization
        )
        blocks = num_blocks(config, model, dtype)
        context = max_model_len(config, model, blocks)
        groups = groups_of(config, model)
        self._rank = None if group is None else _of_rank(shard, group, weights)
        recorder = self._rank or Recorder()
        recorded = build_model(model, weights)
        logits = recorded.forward(recorder)
        self._head, self.logit_cap = recorded.head, model.logit_cap
        self._linears, self._deltas = weights.linears, _deltas(config, weights)
        limits = Limits(config.max_batched_tokens, config.max_rows, context)
        try:
            self._program = Program(
                library,
                recorder,
                logits,
                Geometry(
                    model.num_heads,
                    model.num_kv_heads,
                    model.head_dim,
                    block_layers(groups),
                    config.block_size,
                    config.kv_format,
                    places(groups),
                ),
                limits,
                angle_tables(model, context),
                weights.format,
                blocks,
                threads,
                self._deltas,
            )
        except MemoryError as error:
            raise ValueError(
                f"max_batched_tokens {config.max_batched_tokens}, max_running "
                f"{config.max_running}, threads {threads}, or the KV blocks take more memory than "
                f"there is: {error}"
            ) from error
        self.cache = CpuCache(self._program.arena, blocks)
        self.info = describe(
            config,
            model,
            dtype=dtype,
            kernels=library.instruction_set,
            kv_order="panels",
            threads=threads,
            num_parameters=weights.num_parameters,
            parameter_bytes=weights.bytes,
            weights=weights.place,
            huge_bytes=weights.huge_bytes,
            workspace_bytes=self._program.workspace_bytes,
        )

    def launch(self, plan: StepPlan) -> CpuTicket:
        token_ids, awaited = plan.token_ids, plan.awaited
        if self._rank is not None:
            token_ids, awaited = self._rank.own_ids(plan, self._sampled_ids), NO_INTS
        launched = self._program.launch(
            token_ids,
            plan.positions,
            plan.starts,
            plan.lengths,
            plan.tables,
            plan.rows,
            plan.sampling_words,
            awaited,
            plan.edits,
            samples=not len(plan.constrained),
            pooled_rows=plan.pooled_rows,
            pool_starts=plan.pool_starts,
            adapters=plan.adapters,
        )
        self._sampled_ids = launched.sampled_ids
        return CpuTicket(plan, [launched])

    def adapt(self, place: int, adapter: Adapter | None) -> None:
        assert self._deltas is not None
        modules = {} if adapter is None else adapter.modules
        self._deltas.put(
            place,
            {
                matrix: [_part(modules, name, size, matrix.k) for name, size in layers.items()]
                for matrix, layers in self._linears.items()
                if layers.keys() & modules.keys()
            },
        )

    def head_rows(self, ids: Sequence[int]) -> NDArray[np.float32]:
        assert self._head is not None
        found: NDArray[np.float32] = self._head.rows(ids)
        return found

    def sample(self, ticket: CpuTicket, allowed: Words) -> None:
        grammars = array("i", [-1]) * len(ticket.plan.sampled)
        for number, row in enumerate(ticket.plan.constrained):
            grammars[row] = number
        ticket.launched.append(self._program.sample(ticket.launched[-1], grammars, allowed))

    def logits(self, ticket: CpuTicket) -> NDArray[np.float32]:
        """For those who measure: see `Program.logits`."""
        return self._program.logits(ticket.launched[-1])

    def collect(self, ticket: CpuTicket) -> Collected:
        last = ticket.launched[-1]
        sampled_ids = self._program.collect(last).tolist()
        results = ticket.plan.results(sampled_ids, last.top, last.sums)
        ran_ns = 0
        for part in ticket.launched:
            ran_ns += part.launch.ended_ns - part.launch.started_ns
        return Collected(results, ran_ns / 1e9)
