"""A checkpoint's tensors on a torch device."""

import logging
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from services.worker.engine.formats.stored import Stored

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STORED = DTYPES | {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Keys and values, likewise."""
Linear = tuple[Tensor, Tensor | None]
"""Weights [n, k] and bias [n]."""


class TorchWeights:
    """As `Weights`."""

    def __init__(
        self, tensors: Mapping[str, Stored], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._tensors, self._dtype, self._device = tensors, dtype, device
        kinds = Counter(stored.kind for stored in tensors.values() if stored.is_quantized)
        for kind, count in sorted(kinds.items()):
            log.warning("%d matrices of %s are widened to %s", count, kind, dtype)
        self._made: dict[str, Tensor] = {}

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self._made.values())

    def table(self, name: str, rows: int, width: int) -> Tensor:
        return self._tensor(f"{name}.weight")

    def vector(self, name: str, size: int, plus: float = 0.0) -> Tensor:
        if not plus:
            return self._tensor(f"{name}.weight")
        # Of weights around 0 the sum has more digits than a narrow dtype.
        stored = torch.from_numpy(self._tensors[f"{name}.weight"].float32())
        self._made[name] = found = stored.to(self._device) + plus
        return found

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
        values = torch.from_numpy(self._tensors[name].values())
        if values.dtype == torch.uint16:
            values = values.view(torch.bfloat16)
        return values.to(device=self._device, dtype=self._dtype)
