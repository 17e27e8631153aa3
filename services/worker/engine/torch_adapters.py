"""Adapters on torch tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor

from services.worker.engine.adapters import Adapter, Lora, is_adapted
from services.worker.engine.torch_weights import Linear

_Delta = tuple[slice, Tensor, Tensor]
"""Columns of a linear, and what is added to them: A [ranks, k] and B^T [ranks, columns]."""


class TorchAdapters:
    """By place. Computed in float32."""

    def __init__(self, linears: Mapping[int, Mapping[str, int]], device: torch.device) -> None:
        """`linears`: output sizes of layers, by name, of each matrix, by its id."""
        self._linears, self._device = linears, device
        self._places: dict[int, dict[int, list[_Delta]]] = {}

    def put(self, place: int, adapter: Adapter | None) -> None:
        self._places.pop(place, None)
        if adapter is None:
            return
        self._places[place] = {
            matrix: self._deltas(adapter.modules, layers)
            for matrix, layers in self._linears.items()
            if layers.keys() & adapter.modules.keys()
        }

    def _deltas(self, modules: Mapping[str, Lora], layers: Mapping[str, int]) -> list[_Delta]:
        found, first = [], 0
        for name, size in layers.items():
            if is_adapted(name) and (lora := modules.get(name)):
                down, up = (torch.tensor(one, device=self._device) for one in (lora.down, lora.up))
                found.append((slice(first, first + size), down, up))
            first += size
        return found

    def add(self, y: Tensor, x: Tensor, weights: Linear, places: Tensor) -> None:
        """To y = x W^T + b, in place. places: [rows], -1: none."""
        for place in places.unique().tolist():
            deltas = self._places.get(place, {}).get(id(weights.weights), ())
            rows = (places == place).nonzero().squeeze(1)
            for columns, down, up in deltas:
                delta = x[rows].float() @ down.T @ up
                y[rows, columns] = (y[rows, columns].float() + delta).to(y.dtype)
