"""A model on the C++ kernels: recorded once, run in one call a step. Imports no torch."""

import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.library import Library, Unavailable
from kernels.cpu.matrix import BYTES_STEP, NIBBLES_STEP, PANEL
from kernels.cpu.program import Geometry, Launched, Limits, Program
from kernels.cpu.recorder import Recorder
from services.worker.engine.config import EngineConfig
from services.worker.engine.cores import usable_cores
from services.worker.engine.cpu_cache import CpuCache
from services.worker.engine.cpu_weights import CpuWeights
from services.worker.engine.grammar.library import Words
from services.worker.engine.model_config import ModelConfig
from services.worker.engine.models.registry import build_model
from services.worker.engine.plan import Collected, StepPlan
from services.worker.engine.rope import angle_tables
from services.worker.engine.runner import (
    choose_dtype,
    describe,
    max_model_len,
    num_blocks,
)

log = logging.getLogger(__name__)


def check_fits(config: EngineConfig, model: ModelConfig) -> None:
    """Raises Unavailable if the kernels cannot run the model so."""
    step = {"int8": BYTES_STEP, "int4": NIBBLES_STEP}.get(config.quantization, 2)
    for name, size, multiple in (
        ("head_dim", model.head_dim, PANEL),
        ("block_size", config.block_size, PANEL),
        ("hidden_size", model.hidden_size, step),
        ("num_attention_heads * head_dim", model.num_heads * model.head_dim, step),
        ("intermediate_size", model.intermediate_size, step),
    ):
        if size % multiple:
            raise Unavailable(f"{name} {size} is no multiple of {multiple}")


@dataclass(slots=True)
class CpuTicket:
    plan: StepPlan
    launched: list[Launched]
    """Its parts, the last of which samples."""


class CpuRunner:
    """See `Runner`."""

    def __init__(self, config: EngineConfig, model: ModelConfig, library: Library) -> None:
        dtype = choose_dtype(config.dtype, model, "cpu", library.has_dot)
        threads = config.threads or usable_cores()
        if threads > usable_cores():
            log.warning("threads %d wait for %d processors' turns", threads, usable_cores())
        weights = CpuWeights(
            library, config.model, model, dtype, config.packed_dir, threads, config.quantization
        )
        blocks = num_blocks(config, model, dtype)
        context = max_model_len(config, model, blocks)
        recorder = Recorder()
        recorded = build_model(model, weights)
        logits = recorded.forward(recorder)
        self._head, self.logit_cap = recorded.head, model.logit_cap
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
                    model.num_layers,
                    config.block_size,
                    config.kv_format,
                ),
                limits,
                angle_tables(model, context),
                weights.format,
                blocks,
                threads,
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
        launched = self._program.launch(
            plan.token_ids,
            plan.positions,
            plan.starts,
            plan.lengths,
            plan.tables,
            plan.rows,
            plan.sampling_words,
            plan.awaited,
            plan.edits,
            samples=not len(plan.constrained),
            pooled_rows=plan.pooled_rows,
            pool_starts=plan.pool_starts,
        )
        return CpuTicket(plan, [launched])

    def head_rows(self, ids: Sequence[int]) -> NDArray[np.float32]:
        assert self._head is not None
        found: NDArray[np.float32] = self._head.rows(ids)
        return found

    def sample(self, ticket: CpuTicket, allowed: Words) -> None:
        grammars = array("i", [-1]) * len(ticket.plan.sampled)
        for number, row in enumerate(ticket.plan.constrained):
            grammars[row] = number
        ticket.launched.append(self._program.sample(ticket.launched[-1], grammars, allowed))

    def collect(self, ticket: CpuTicket) -> Collected:
        last = ticket.launched[-1]
        sampled_ids = self._program.collect(last).tolist()
        results = ticket.plan.results(sampled_ids, last.top, last.sums)
        ran_ns = 0
        for part in ticket.launched:
            ran_ns += part.launch.ended_ns - part.launch.started_ns
        return Collected(results, ran_ns / 1e9)
