"""A checkpoint's tensors as numpy arrays, mapped: a page is read when it is looked at. No torch."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.worker.engine.model_config import ModelConfig, UnsupportedModel
from services.worker.engine.weights import check_weights, unused

_TYPES: dict[str, Any] = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}

Floats = NDArray[np.float32]
Bits = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as it lies in the file; numpy has no bfloat16, so of that the bits."""

    values: NDArray[Any]
    dtype: str

    def float32(self) -> Floats:
        """Exact, but for float64."""
        if self.dtype != "BF16":
            return self.values.astype(np.float32)
        return (self.values.astype(np.uint32) << 16).view(np.float32)

    def bfloat16(self) -> Bits:
        """The bits of the nearest values, of two the even one. What is stored so is not copied."""
        if self.dtype == "BF16":
            return self.values
        wide = self.float32()
        bits = wide.view(np.uint32)
        nearest = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(wide), np.uint16(0x7FC0), nearest)


def read_tensors(directory: str | Path, config: ModelConfig) -> dict[str, Stored]:
    """All that the model needs, by name. Raises UnsupportedModel as `check_weights` does."""
    return {
        name: stored
        for path in check_weights(directory, config)
        for name, stored in _read(path)
        if not unused(name, config)
    }


def _read(path: Path) -> Iterator[tuple[str, Stored]]:
    """safetensors: the header's size in 8 bytes, the header as JSON, the data."""
    try:
        data = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{path}: {error}") from error
    start = 8 + int(data[:8].view("<u8")[0])
    for name, about in json.loads(data[8:start].tobytes()).items():
        if name == "__metadata__" or about["dtype"] not in _TYPES:
            continue
        begin, end = about["data_offsets"]
        values = data[start + begin : start + end].view(_TYPES[about["dtype"]])
        yield name, Stored(np.asarray(values.reshape(about["shape"])), about["dtype"])
