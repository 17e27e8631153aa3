"""A checkpoint's tensors on a torch device."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.kv_layer import INT4
from services.worker.engine.formats.stored import Stored
from services.worker.engine.parallel.shard import After, Shard

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STORED = DTYPES | {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": INT4}
"""Keys and values, likewise."""


class Linear(NamedTuple):
    weights: Tensor
    """[n, k]"""
    bias: Tensor | None
    """[n]"""
    after: After = ""


class TorchWeights:
    """As `Weights`, of one rank."""

    def __init__(
        self,
        tensors: Mapping[str, Stored],
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard,
    ) -> None:
        self._tensors, self._dtype, self._device = tensors, dtype, device
        self._shard = shard
        self._made: dict[str, Tensor] = {}
        self.linears: dict[int, Mapping[str, int]] = {}
        """Output sizes of a matrix's layers, by name, by the id of its weights."""
        self.taken: list[tuple[Stored, str]] = []
        """See `choice.told`."""

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self._made.values())

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._made.values())

    def table(self, name: str, rows: int, width: int) -> Tensor:
        return self._tensor(f"{name}.weight")

    def vector(self, name: str, size: int, plus: float = 0.0) -> Tensor:
        if not plus:
            return self._tensor(f"{name}.weight")
        # Of weights around 0 the sum has more digits than a narrow dtype.
        stored = self._read(f"{name}.weight")
        self._made[name] = found = stored.to(self._device, torch.float32) + plus
        return found

    def matrix(self, layers: Mapping[str, int], width: int, bias: bool = False) -> Linear:
        weights = self._stacked([f"{name}.weight" for name in layers])
        self.linears[id(weights)] = layers
        return Linear(weights, *self.beside(layers, bias))

    def beside(self, layers: Mapping[str, int], bias: bool) -> tuple[Tensor | None, After]:
        """The bias of a matrix of these layers, and what follows on it."""
        biases = [f"{name}.bias" for name in layers]
        bias = bias and all(map(self._shard.has, biases))
        (after,) = {self._shard.after(name) for name in layers}
        return self._stacked(biases) if bias else None, after

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
        return self._read(name).to(device=self._device, dtype=self._dtype)

    def _read(self, name: str) -> Tensor:
        stored = self._shard.part(name, self._tensors[name])
        self.taken.append((stored, str(self._dtype).removeprefix("torch.")))
        values = torch.from_numpy(stored.values())
        return values.view(torch.bfloat16) if values.dtype == torch.uint16 else values
