"""A model on torch tensors: on a GPU, and on a processor that the C++ kernels are not for."""

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
from kernels.kv_layer import KvLayer
from kernels.paged_batch import PagedBatch, tiles_of
from services.worker.engine.checkpoint import Stored, open_checkpoint
from services.worker.engine.config import EngineConfig
from services.worker.engine.kv_cache import block_shape
from services.worker.engine.model_config import ModelConfig
from services.worker.engine.models.registry import build_model
from services.worker.engine.plan import Result, StepPlan
from services.worker.engine.rope import build_rope
from services.worker.engine.runner import choose_dtype, describe
from services.worker.engine.sampler import SamplingBatch, sample

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Linear = tuple[Tensor, Tensor | None]
"""Weights [n, k] and bias [n]."""


class TorchRunner:
    """See `Runner`."""

    def __init__(self, config: EngineConfig, model: ModelConfig) -> None:
        if config.threads:
            torch.set_num_threads(config.threads)
        self._device = torch.device(config.device)
        name = choose_dtype(config.dtype, model, self._device.type, has_dot=False)
        dtype = DTYPES[name]
        with open_checkpoint(config.model, model) as checkpoint:
            weights = TorchWeights(checkpoint.tensors, dtype, self._device)
            self._model = build_model(model, weights)
            checkpoint.check_unchanged()
        self.info = describe(
            config,
            model,
            dtype=name,
            kernels="reference",
            kv_order="rows",
            threads=torch.get_num_threads(),
            num_parameters=weights.num_parameters,
            parameter_bytes=weights.num_parameters * dtype.itemsize,
            weights="memory" if self._device.type == "cpu" else str(self._device),
            huge_bytes=0,
            workspace_bytes=None,
        )
        shape = (self.info.num_blocks, *block_shape(model, config.block_size))
        self.cache = TorchCache(shape, dtype, self._device)
        cos, sin = build_rope(model.rope).tables(np.arange(self.info.max_model_len))
        self.angles = (self.tensor(cos), self.tensor(sin))
        self._sampled = torch.zeros(0, dtype=torch.int32, device=self._device)
        """Ids of the step launched last; -1: the row's logits are not finite."""
        self.head_dim = model.head_dim

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> "_Launched":
        token_ids = self.tensor(plan.token_ids)
        if len(plan.awaited):
            places, rows = self.tensor(plan.awaited).unbind(1)
            # Of one that is not finite (-1) nothing comes but what is thrown away.
            token_ids[places] = self._sampled[rows].clamp(min=0)
        logits = self._model.forward(_Step(self, plan, token_ids, self._batch(plan)))
        logits = logits.float()  # temperature, top-p and noise are computed on them
        self._sampled = torch.zeros(0, dtype=torch.int32, device=self._device)
        if len(plan.sampled):
            tokens = sample(logits, SamplingBatch.of(plan.samplings, self._device))
            finite = torch.isfinite(logits.amax(dim=-1))
            self._sampled = torch.where(finite, tokens, -1).to(torch.int32)
        return _Launched(plan, self._sampled)

    def collect(self, ticket: "_Launched") -> list[Result]:
        return ticket.plan.results(ticket.wait())

    def _batch(self, plan: StepPlan) -> PagedBatch:
        return PagedBatch(
            positions=self.tensor(plan.positions),
            slots=self.tensor(plan.slots(self.info.block_size)),
            starts=self.tensor(plan.starts),
            lengths=self.tensor(plan.lengths),
            block_tables=self.tensor(plan.block_tables),
            tiles=self.tensor(tiles_of(plan.starts, plan.num_decodes, queries=64)),
            num_decodes=plan.num_decodes,
        )

    def tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)


class _Launched:
    """A step whose operations are in the device's queue; on a CPU they are done."""

    def __init__(self, plan: StepPlan, sampled: Tensor) -> None:
        self.plan = plan
        self._ids = sampled.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if sampled.is_cuda else None
        if self._copied:
            self._copied.record()

    def wait(self) -> list[int]:
        """The sampled ids; does not wait for what was launched behind this step."""
        if self._copied:
            self._copied.synchronize()
        return self._ids.tolist()


class _Step:
    """The operations of one step, as `Ops`, on tensors [T, features] of the model's dtype."""

    def __init__(
        self, runner: TorchRunner, plan: StepPlan, token_ids: Tensor, batch: PagedBatch
    ) -> None:
        self._ids = token_ids
        self._rows = runner.tensor(plan.rows)
        self._cache, self._batch = runner.cache, batch
        self._angles, self._dim = runner.angles, runner.head_dim

    def embed(self, table: Tensor) -> Tensor:
        return table[self._ids]

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return reference.rms_norm(x, weight, epsilon)

    def add_norm(
        self, x: Tensor, y: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        return reference.add_rms_norm(x, y, weight, epsilon)

    def linear(self, x: Tensor, weights: Linear) -> Tensor:
        return F.linear(x, *weights)

    def silu_mul(self, x: Tensor) -> Tensor:
        return reference.silu_and_mul(x)

    def rotary(self, qkv: Tensor, layer: int) -> Tensor:
        return reference.rotary_store(
            qkv, self._angles, self._batch.positions, self._batch.slots, self._cache.layer(layer)
        )

    def attention(self, queries: Tensor, layer: int, width: int) -> Tensor:
        y = reference.paged_attention(
            queries, self._cache.layer(layer), self._batch, scale=self._dim**-0.5
        )
        return y.reshape(len(y), width)

    def sampled(self, x: Tensor) -> Tensor:
        return x[self._rows]


class TorchCache:
    """See `KvCache`; of a head its tokens lie in order, and of a token its dims."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        if device.type == "cpu":
            # torch.zeros would write every page; numpy takes zeroed ones from the kernel.
            memory = np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8)
            self._data = torch.from_numpy(memory).view(dtype).view(shape)
        else:
            self._data = torch.zeros(shape, dtype=dtype, device=device)

    def layer(self, index: int) -> KvLayer:
        return KvLayer(self._data[:, index])

    def read(self, blocks: list[int]) -> memoryview:
        content = self._data[torch.tensor(blocks, device=self._data.device)].cpu()
        return content.view(torch.uint8).numpy().reshape(-1).data

    def write(self, blocks: list[int], data: bytes | bytearray | memoryview) -> None:
        # torch wants memory that it could write to.
        writable = bytearray(data) if memoryview(data).readonly else data
        source = torch.frombuffer(writable, dtype=self._data.dtype)
        self._data[torch.tensor(blocks, device=self._data.device)] = source.view(
            len(blocks), *self._data.shape[1:]
        ).to(self._data.device)


class TorchWeights:
    """A checkpoint's tensors on a device, as `Weights`."""

    def __init__(
        self, tensors: Mapping[str, Stored], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._tensors, self._dtype, self._device = tensors, dtype, device
        self._made: dict[str, Tensor] = {}

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self._made.values())

    def table(self, name: str, rows: int, width: int) -> Tensor:
        return self._tensor(f"{name}.weight")

    def vector(self, name: str, size: int) -> Tensor:
        return self._tensor(f"{name}.weight")

    def matrix(self, layers: Mapping[str, int], width: int, bias: bool = False) -> Linear:
        weights = self._stacked([f"{name}.weight" for name in layers])
        return weights, self._stacked([f"{name}.bias" for name in layers]) if bias else None

    def _stacked(self, names: list[str]) -> Tensor:
        if len(names) == 1:
            return self._tensor(names[0])
        self._made["+".join(names)] = stacked = torch.cat([self._moved(name) for name in names])
        return stacked

    def _tensor(self, name: str) -> Tensor:
        if name not in self._made:  # tied ones are one
            self._made[name] = self._moved(name)
        return self._made[name]

    def _moved(self, name: str) -> Tensor:
        stored = self._tensors[name]
        values = torch.from_numpy(stored.values())
        if stored.dtype == "BF16":
            values = values.view(torch.bfloat16)
        return values.to(device=self._device, dtype=self._dtype)
