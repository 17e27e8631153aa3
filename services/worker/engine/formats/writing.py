"""A checkpoint written again with matrices of few bits, as compressed-tensors has them: read to the
bit here, and by others that read those."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.matrix import BYTES_STEP, GROUP, NIBBLES_STEP, grouped, in_e4m3, quantized
from services.worker.engine.formats.stored import TYPES, Floats, Plain, Shape, Stored
from services.worker.engine.models.config import UnsupportedModel
from services.worker.engine.models.parts import ROUTERS, is_router
from services.worker.engine.models.registry import read_config
from services.worker.engine.weights.checkpoint import open_checkpoint

Format = Literal["int8", "int4", "fp8", "w8a8"]


class _Layout(NamedTuple):
    name: str
    """compressed-tensors' own."""
    bits: int
    type: str = ""
    """Of the numbers, in a tensor `weight`; "": they are packed in words."""


_LAYOUTS: dict[Format, _Layout] = {
    "int8": _Layout("pack-quantized", 8),
    "int4": _Layout("pack-quantized", 4),
    "fp8": _Layout("float-quantized", 8, "F8_E4M3"),
    "w8a8": _Layout("int-quantized", 8, "I8"),
}
_ROUNDED: dict[Format, Callable[[Floats], tuple[NDArray[Any], NDArray[Any]]]] = {
    "int8": quantized,
    "int4": grouped,
    "fp8": in_e4m3,
    "w8a8": quantized,
}
_WIDE = ("model.embed_tokens.weight", "lm_head.weight", "score.weight")
"""Which decide the token, and which readers of such checkpoints mostly have as floats."""
_STRIP = 2**20
"""Weights at a time."""


def write_quantized(folder: Path, to: Path, format_: Format) -> dict[str, int]:
    """Writes config.json and model.safetensors into the folder `to`. What became of how many
    matrices that were of few bits before, in words. Raises UnsupportedModel, and OSError."""
    model = read_config(folder)
    with open_checkpoint(folder, model) as checkpoint:
        tensors, changed = checkpoint.tensors, Counter[str]()
        for name, stored in tensors.items():
            packed = _is_packed(name, stored)
            if packed:
                _check(name, stored, format_)
            if stored.is_quantized and not (packed and format_ in stored.held):
                becomes = "rounded again" if packed else "widened to bfloat16"
                changed[f"matrices of {stored.kind} are {becomes}"] += 1
        with (to / "model.safetensors").open("wb") as file:
            _write(file, tensors, format_)
        checkpoint.check_unchanged()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization_config(format_)
    (to / "config.json").write_text(json.dumps(config, indent=2))
    return changed


def quantization_config(format_: Format) -> dict[str, Any]:
    groups: dict[str, Any] = {"strategy": "group", "group_size": GROUP}
    rows: dict[str, Any] = {"strategy": "channel", "group_size": None}
    numbers = {
        "num_bits": _LAYOUTS[format_].bits,
        "type": "float" if format_ == "fp8" else "int",
        "symmetric": True,
    }
    weights = numbers | {"dynamic": False, **(groups if format_ == "int4" else rows)}
    group: dict[str, Any] = {"targets": ["Linear"], "weights": weights}
    if format_ == "w8a8":
        group["input_activations"] = numbers | {"dynamic": True, "strategy": "token"}
    return {
        "quant_method": "compressed-tensors",
        "format": _LAYOUTS[format_].name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "score", *(f"re:.*{re.escape(name)}$" for name in ROUTERS)],
    }


def _is_packed(name: str, stored: Stored) -> bool:
    router = is_router(name.removesuffix(".weight"))
    return len(stored.shape) == 2 and name not in _WIDE and not router


def _check(name: str, stored: Stored, format_: Format) -> None:
    step = NIBBLES_STEP if format_ == "int4" else BYTES_STEP
    if stored.shape[1] % step:
        words = f"is {list(stored.shape)}: {format_} needs rows of a multiple of {step}"
        raise UnsupportedModel(f"tensor {name} {words}")
    if "int4" in stored.held and format_ != "int4":
        raise UnsupportedModel(f"tensor {name} has 4 bits already ({stored.kind})")


def _write(file: BinaryIO, tensors: Mapping[str, Stored], format_: Format) -> None:
    """safetensors: the header's size, the header, the tensors one behind the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, stored in tensors.items():
        for own, (dtype, shape) in _parts(name, stored, format_).items():
            begin, end = end, end + int(np.prod(shape)) * np.dtype(TYPES[dtype]).itemsize
            header[own] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    told = json.dumps(header).encode()
    told += b" " * (-len(told) % 8)
    file.write(len(told).to_bytes(8, "little") + told)
    for name, stored in tensors.items():
        if _is_packed(name, stored):
            for content in _packed(stored, format_):
                file.write(np.ascontiguousarray(content).data)
        else:
            for first, last in _strips(stored.shape):
                file.write(np.ascontiguousarray(_wide(stored, first, last)).data)


def _parts(name: str, stored: Stored, format_: Format) -> dict[str, tuple[str, Shape]]:
    """Tensors that stand for one, and their types and shapes."""
    if not _is_packed(name, stored):
        return {name: (_type(stored), stored.shape)}
    n, k = stored.shape
    scales = ("F16", (n, k // GROUP)) if format_ == "int4" else ("F32", (n, 1))
    if own := _LAYOUTS[format_].type:
        return {name: (own, (n, k)), f"{name}_scale": scales}
    return {
        f"{name}_packed": ("I32", (n, k * _LAYOUTS[format_].bits // 32)),
        f"{name}_scale": scales,
        f"{name}_shape": ("I64", (2,)),
    }


def _packed(stored: Stored, format_: Format) -> Iterator[NDArray[Any]]:
    scales = []
    for first, last in _strips(stored.shape):
        numbers, of_rows = _numbers(stored, first, last, format_)
        scales.append(of_rows.reshape(len(of_rows), -1))
        if _LAYOUTS[format_].type:
            yield numbers
        elif format_ == "int8":
            yield numbers.view(np.uint8) ^ np.uint8(0x80)  # as many above 0
        else:
            yield numbers[:, ::2] | numbers[:, 1::2] << np.uint8(4)
    yield np.concatenate(scales)
    if not _LAYOUTS[format_].type:
        yield np.array(stored.shape, np.int64)


def _numbers(
    stored: Stored, first: int, last: int, format_: Format
) -> tuple[NDArray[Any], NDArray[Any]]:
    """As the engine has them when it is told to round what it loads."""
    if format_ in stored.held:
        numbers, scales = stored.narrow(first, last, format_)
        return numbers, scales
    return _ROUNDED[format_](stored.float32(first, last))


def _type(stored: Stored) -> str:
    if isinstance(stored, Plain):
        return stored.dtype
    return "BF16" if stored.fits_bfloat16 else "F32"


def _wide(stored: Stored, first: int, last: int) -> NDArray[Any]:
    if isinstance(stored, Plain):
        return stored.values(first, last)
    return (stored.bfloat16 if stored.fits_bfloat16 else stored.float32)(first, last)


def _strips(shape: Shape) -> Iterator[tuple[int, int]]:
    rows = max(1, _STRIP // int(np.prod(shape[1:], initial=1)))
    for first in range(0, shape[0], rows):
        yield first, min(first + rows, shape[0])
