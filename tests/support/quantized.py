"""Quantized checkpoints of Hugging Face form as their tools write them, number by number."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

Array = NDArray[Any]
Parts = dict[str, Array]
"""A layer's tensors by the ends of their names."""
Made = tuple[Parts, NDArray[np.float32]]
"""And the matrix that they stand for."""


def write(
    folder: Path, to: Path, config: dict[str, Any], layer: Callable[[Array, int], Made]
) -> dict[str, Array]:
    """A copy whose linear layers are quantized; gives what its tensors stand for. `layer`: of a
    matrix and a seed."""
    shutil.copytree(folder, to)
    told = json.loads((to / "config.json").read_text()) | {"quantization_config": config}
    (to / "config.json").write_text(json.dumps(told))
    tensors, values = {}, {}
    for seed, (name, tensor) in enumerate(sorted(load_file(to / "model.safetensors").items())):
        if not name.endswith("_proj.weight"):
            tensors[name] = values[name] = tensor
            continue
        parts, values[name] = layer(tensor, seed)
        stem = name.removesuffix("weight")
        tensors |= {stem + end: np.ascontiguousarray(part) for end, part in parts.items()}
    save_file(tensors, to / "model.safetensors")
    return values


def packed(bits: int, group: int, zeros: bool = False) -> Callable[[Array, int], Made]:
    """compressed-tensors' pack-quantized."""

    def layer(weight: Array, seed: int) -> Made:
        n, k = weight.shape
        numbers, zero, scale, values = drawn(weight.shape, bits, group or k, seed, zeros)
        half = 1 << bits - 1
        parts = {
            "weight_packed": words(numbers + half, bits),
            "weight_scale": scale,
            "weight_shape": np.array([n, k]),
        }
        if zeros:
            parts["weight_zero_point"] = words((zero + half).T, bits).T
        return parts, values

    return layer


def bytes_(weight: Array, seed: int) -> Made:
    """Its int-quantized, by row."""
    numbers, _, scale, values = drawn(weight.shape, 8, weight.shape[1], seed)
    return {"weight": numbers.astype(np.int8), "weight_scale": scale.astype(np.float32)}, values


def gptq(
    bits: int, group: int, zeros: bool = False, order: bool = False, less: int = 1
) -> Callable[[Array, int], Made]:
    """`order`: desc_act. `less`: what is taken off zeros when they are stored."""

    def layer(weight: Array, seed: int) -> Made:
        k = weight.shape[1]
        numbers, zero, scale, _ = drawn(weight.shape, bits, group or k, seed, zeros)
        of_column = np.arange(k) // (group or k)
        if order:
            of_column = np.random.default_rng(seed).permutation(of_column)
        values = (numbers - zero[:, of_column]).astype(np.float32)
        values *= scale[:, of_column].astype(np.float32)
        half = 1 << bits - 1
        stored = (zero + half - less) % (1 << bits)
        return {
            "qweight": words(numbers + half, bits).T,
            "qzeros": words(stored.T, bits),
            "scales": scale.T,
            "g_idx": of_column.astype(np.int32),
        }, values

    return layer


def awq(group: int, zeros: bool = True) -> Callable[[Array, int], Made]:
    def layer(weight: Array, seed: int) -> Made:
        numbers, zero, scale, values = drawn(weight.shape, 4, group, seed, zeros)
        order = [0, 2, 4, 6, 1, 3, 5, 7]

        def in_order(rows: Array) -> Array:
            return rows.reshape(len(rows), -1, 8)[:, :, order].reshape(rows.shape)

        return {
            "qweight": words(in_order(numbers.T + 8), 4),
            "qzeros": words(in_order(zero.T + 8), 4),
            "scales": scale.T,
        }, values

    return layer


def drawn(
    shape: tuple[int, int], bits: int, group: int, seed: int, zeros: bool = False
) -> tuple[Array, Array, Array, NDArray[np.float32]]:
    """Numbers [n, k], zeros and scales [n, k / group], and the values."""
    rng, (n, k) = np.random.default_rng(seed), shape
    half = 1 << bits - 1
    numbers = rng.integers(-half, half, (n, k))
    zero = (
        rng.integers(1 - half, half, (n, k // group)) if zeros else np.zeros((n, k // group), int)
    )
    scale = (rng.uniform(0.5, 1.5, (n, k // group)) * 0.3 / half).astype(np.float16)
    wide, zeros_wide = (np.repeat(one, group, axis=1) for one in (scale, zero))
    return numbers, zero, scale, (numbers - zeros_wide).astype(np.float32) * wide.astype(np.float32)


def words(rows: Array, bits: int) -> Array:
    """[rows, numbers] of unsigned numbers in int32, the first one lowest."""
    per = 32 // bits
    filled = np.zeros((len(rows), -(-rows.shape[1] // per) * per), np.uint32)
    filled[:, : rows.shape[1]] = rows
    found = np.zeros((len(rows), filled.shape[1] // per), np.uint32)
    for at in range(per):
        found |= filled[:, at::per] << np.uint32(bits * at)
    return found.view(np.int32)
