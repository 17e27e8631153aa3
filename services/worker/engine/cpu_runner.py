"""A model on the C++ kernels: recorded once, run in one call a step. Imports no torch."""

import os
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.library import Library, Unavailable
from kernels.cpu.program import (
    PIECE,
    Format,
    Geometry,
    Launched,
    Limits,
    Matrix,
    Program,
    Recorder,
)
from services.worker.engine.checkpoint import Floats, Stored, read_tensors
from services.worker.engine.config import EngineConfig
from services.worker.engine.model_config import ModelConfig
from services.worker.engine.models.registry import build_model
from services.worker.engine.plan import Result, StepPlan
from services.worker.engine.rope import build_rope
from services.worker.engine.runner import (
    Dtype,
    choose_dtype,
    describe,
    max_model_len,
    num_blocks,
)


def check_fits(config: EngineConfig, model: ModelConfig) -> None:
    """Raises Unavailable if the kernels cannot run the model so."""
    for name, size, multiple in (
        ("head_dim", model.head_dim, PIECE),
        ("block_size", config.block_size, PIECE),
        ("hidden_size", model.hidden_size, 2),
        ("intermediate_size", model.intermediate_size, 2),
    ):
        if size % multiple:
            raise Unavailable(f"{name} {size} is no multiple of {multiple}")


class CpuRunner:
    """See `Runner`."""

    def __init__(self, config: EngineConfig, model: ModelConfig, library: Library) -> None:
        dtype = choose_dtype(config.dtype, model, "cpu", library.has_dot)
        tensors = read_tensors(config.model, model)
        weights = CpuWeights(library, tensors, dtype)
        blocks = num_blocks(config, model, dtype)
        context = max_model_len(config, model, blocks)
        recorder = Recorder()
        logits = build_model(model, weights).forward(recorder)
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
            ),
            Limits(config.max_batched_tokens, config.max_running, context),
            build_rope(model.rope).tables(np.arange(context)),
            weights.format,
            blocks,
            config.threads or len(os.sched_getaffinity(0)),
        )
        self.cache = Arena(self._program.arena, blocks)
        self.info = describe(
            config,
            model,
            dtype=dtype,
            kernels=library.instruction_set,
            kv_order="panels",
            num_parameters=weights.num_parameters,
            parameter_bytes=weights.bytes,
        )

    def launch(self, plan: StepPlan) -> tuple[StepPlan, Launched]:
        launched = self._program.launch(
            plan.token_ids,
            plan.positions,
            plan.starts,
            plan.lengths,
            plan.block_tables,
            plan.rows,
            plan.samplings,
            plan.awaited,
        )
        return plan, launched

    def collect(self, ticket: tuple[StepPlan, Launched]) -> list[Result]:
        plan, launched = ticket
        return plan.results(self._program.collect(launched).tolist())


class Arena:
    """The program's KV blocks, as `KvCache`."""

    def __init__(self, memory: NDArray[np.uint8], blocks: int) -> None:
        self._blocks = memory.reshape(blocks, -1)

    def read(self, blocks: list[int]) -> memoryview:
        return self._blocks[blocks].reshape(-1).data

    def write(self, blocks: list[int], data: bytes | bytearray | memoryview) -> None:
        self._blocks[blocks] = np.frombuffer(data, np.uint8).reshape(len(blocks), -1)


class CpuWeights:
    """A checkpoint's tensors for the kernels, as `Weights`."""

    def __init__(self, library: Library, tensors: Mapping[str, Stored], dtype: Dtype) -> None:
        """`dtype`: in which is computed. Matrices stored in bfloat16 stay so in any case."""
        self._library = library
        self._tensors = tensors
        matrices = [stored for stored in tensors.values() if stored.values.ndim > 1]
        narrow = all(stored.dtype == "BF16" for stored in matrices)
        self.format: Format = "float32"
        if dtype == "bfloat16":
            self.format = "bfloat16"
        elif narrow:
            self.format = "bfloat16_weights"
        self.num_parameters = self.bytes = 0
        self._counted: set[str] = set()

    def table(self, name: str, rows: int, width: int) -> NDArray[np.generic]:
        # A copy: a view would keep all of the file mapped, and follow whoever writes into it.
        table = np.array(self._values(f"{name}.weight"))
        self.bytes += table.nbytes
        return table

    def vector(self, name: str, size: int) -> Floats:
        vector = self._take(f"{name}.weight").float32()
        self.bytes += vector.nbytes
        return np.ascontiguousarray(vector)

    def matrix(self, layers: Mapping[str, int], width: int, bias: bool = False) -> Matrix:
        rows = [self._values(f"{name}.weight") for name in layers]
        biases = [self._take(f"{name}.bias").float32() for name in layers] if bias else []
        matrix = Matrix(
            self._library,
            np.concatenate(rows) if len(rows) > 1 else rows[0],
            np.concatenate(biases) if bias else None,
        )
        self.bytes += matrix.nbytes
        return matrix

    def _values(self, name: str) -> NDArray[np.generic]:
        stored = self._take(name)
        return stored.float32() if self.format == "float32" else stored.bfloat16()

    def _take(self, name: str) -> Stored:
        stored = self._tensors[name]
        if name not in self._counted:  # tied ones are taken twice
            self._counted.add(name)
            self.num_parameters += stored.values.size
        return stored
