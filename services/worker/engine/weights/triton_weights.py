"""A checkpoint's tensors on a GPU: matrices of few bits stay so (decision 0080)."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.matrix import Held
from kernels.triton.matrix import PANEL, NarrowMatrix
from services.worker.engine.formats.choice import Choice, narrow_rows, spans
from services.worker.engine.formats.stored import Stored
from services.worker.engine.parallel.shard import After, Shard
from services.worker.engine.weights.torch_weights import Linear, TorchWeights

_STRIP = 2**20
"""Weights that a thread reads at a time."""


class NarrowLinear(NamedTuple):
    """As `Linear`."""

    weights: NarrowMatrix
    bias: Tensor | None
    after: After = ""


AnyLinear = Linear | NarrowLinear


class TritonWeights:
    """As `Weights`, of one rank."""

    def __init__(
        self,
        tensors: Mapping[str, Stored],
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard,
        quantization: str,
        threads: int,
    ) -> None:
        """`quantization`: as `EngineConfig.quantization`. `threads`: that read and round."""
        self._tensors, self._dtype, self._device, self._shard = tensors, dtype, device, shard
        self._wide = TorchWeights(tensors, dtype, device, shard)
        self._choice, self._threads = Choice(quantization), threads
        self._narrow: dict[tuple[str, ...], NarrowMatrix] = {}
        self._taken: list[tuple[Stored, str]] = []

    @property
    def linears(self) -> Mapping[int, Mapping[str, int]]:
        """See `TorchWeights.linears`."""
        return self._wide.linears

    @property
    def num_parameters(self) -> int:
        return self._wide.num_parameters + sum(one.n * one.k for one in self._narrow.values())

    @property
    def bytes(self) -> int:
        return self._wide.bytes + sum(one.nbytes for one in self._narrow.values())

    @property
    def taken(self) -> Iterable[tuple[Stored, str]]:
        """See `choice.told`."""
        return [*self._taken, *self._wide.taken]

    def table(self, name: str, rows: int, width: int) -> Tensor | NarrowMatrix:
        names = (f"{name}.weight",)
        if held := self._choice.of_table(self._part(*names)):
            return self._held(names, held)
        return self._wide.table(name, rows, width)

    def vector(self, name: str, size: int, plus: float = 0.0) -> Tensor:
        return self._wide.vector(name, size, plus)

    def matrix(self, layers: Mapping[str, int], width: int, bias: bool = False) -> AnyLinear:
        names = tuple(f"{name}.weight" for name in layers)
        parts = [self._part(name) for name in names]
        known = self._narrow.get(names)  # a tied head is what the embedding is
        held = known.held if known else self._choice.of_matrix(layers, parts)
        if not held:
            return self._wide.matrix(layers, width, bias)
        weights = self._held(names, held)
        self._wide.linears[id(weights)] = layers
        return NarrowLinear(weights, *self._wide.beside(layers, bias))

    def _part(self, name: str) -> Stored:
        return self._shard.part(name, self._tensors[name])

    def _held(self, names: tuple[str, ...], held: Held) -> NarrowMatrix:
        if names not in self._narrow:
            parts = [self._part(name) for name in names]
            self._narrow[names] = self._read(parts, held)
            self._taken += [(stored, held) for stored in parts]
        return self._narrow[names]

    def _read(self, parts: Sequence[Stored], held: Held) -> NarrowMatrix:
        n, k = sum(stored.shape[0] for stored in parts), parts[0].shape[1]
        found = NarrowMatrix.empty(held, n, k, self._dtype, self._device)
        strip = max(1, _STRIP // k // PANEL) * PANEL

        def put(first: int) -> None:
            rows = [
                narrow_rows(stored, held, *own)
                for stored, *own in spans(parts, first, min(n, first + strip))
            ]
            found.put(first, *(np.concatenate(alike) for alike in zip(*rows, strict=True)))

        with ThreadPoolExecutor(self._threads) as pool:
            for _ in pool.map(put, range(0, n, strip)):
                pass
        return found
