"""An adapter, read. Plain arrays: it goes to the engine's process as it is."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pickle import PickleBuffer
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LINEARS = re.compile(r"\.(self_attn\.(q|k|v|o|qkv)|mlp\.(gate|up|down|gate_up))_proj$")
Floats = NDArray[np.float32]


def is_adapted(name: str) -> bool:
    """Whether adapters may change the linear of this name."""
    return _LINEARS.search(name) is not None


class UnsupportedAdapter(ValueError):
    """Files that are no adapter of the model, or one of a kind that is not built; says why."""


@dataclass(frozen=True, slots=True)
class Lora:
    """What is added to a linear: x A^T B^T."""

    down: Floats
    """A: [rank, inputs]"""
    up: Floats
    """B, scaled and transposed: [rank, outputs]"""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles (protocol 5) with the numbers out of band."""
        shapes = self.down.shape, self.up.shape
        return _lora, (shapes, PickleBuffer(self.down.data), PickleBuffer(self.up.data))


def _lora(shapes: tuple[tuple[int, ...], ...], *buffers: Any) -> Lora:
    found = [np.frombuffer(b, np.float32).reshape(s) for b, s in zip(buffers, shapes, strict=True)]
    return Lora(*found)


@dataclass(frozen=True, slots=True)
class Adapter:
    id: str
    """Its digest: adapters of one are the same."""
    modules: Mapping[str, Lora]
    """By the names that the model's tensors have, without ".weight"."""
