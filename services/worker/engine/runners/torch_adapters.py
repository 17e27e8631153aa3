"""Adapters on torch tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kernels import reference
from kernels.deltas import Delta
from services.worker.engine.adapters import Adapter, Lora, is_adapted
from services.worker.engine.weights.torch_weights import Linear


class TorchAdapters:
    """By place. Computed in float32."""

    def __init__(self, linears: Mapping[int, Mapping[str, int]], device: torch.device) -> None:
        """`linears`: output sizes of layers, by name, of each matrix, by its id."""
        self._linears, self._device = linears, device
        self._deltas: dict[int, dict[int, list[Delta]]] = {matrix: {} for matrix in linears}
        """Of each matrix, by place."""

    def put(self, place: int, adapter: Adapter | None) -> None:
        for deltas in self._deltas.values():
            deltas.pop(place, None)
        if adapter is None:
            return
        for matrix, layers in self._linears.items():
            if layers.keys() & adapter.modules.keys():
                self._deltas[matrix][place] = self._of(adapter.modules, layers)

    def _of(self, modules: Mapping[str, Lora], layers: Mapping[str, int]) -> list[Delta]:
        found, first = [], 0
        for name, size in layers.items():
            if is_adapted(name) and (lora := modules.get(name)):
                down, up = (torch.tensor(one, device=self._device) for one in (lora.down, lora.up))
                found.append(Delta(first, down, up))
            first += size
        return found

    def add(self, y: Tensor, x: Tensor, weights: Linear, places: Tensor) -> None:
        """To y = x W^T + b, in place. places: [rows], -1: none."""
        if deltas := self._deltas.get(id(weights.weights)):
            reference.add_deltas(y, x, places, deltas)
