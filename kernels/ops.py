"""Operations on torch tensors that a model needs beside plain GEMMs.

Each function here is a contract; `reference.py` is its plain-PyTorch meaning, against which every
faster implementation is tested. `_backend` picks the implementation by device.

Shapes: T tokens of a step, S sequences, H query heads, G key-value heads (G divides H), D
head_dim.

The KV cache of a layer is two tensors, keys and values, [num_blocks, block_size, G, D] each, of
which a head's tokens and dims lie together in memory (`services/worker/engine/kv_cache.py` says
why). A kernel takes the strides from the tensor. `slot = block * block_size + offset` names a
token's place.
"""

from types import ModuleType

import torch
from torch import Tensor

from kernels import reference
from kernels.paged_batch import PagedBatch

__all__ = [
    "PagedBatch",
    "implementation",
    "paged_attention",
    "rms_norm",
    "rotary",
    "silu_and_mul",
    "store_kv",
]


def _backend(device: torch.device) -> ModuleType:
    """Every device runs the reference as yet."""
    return reference


def implementation(device: torch.device) -> str:
    """Which one runs on a device, for people."""
    return _backend(device).__name__.rpartition(".")[2]


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x², last dim) + epsilon) * weight, of x's dtype; the mean is taken in float32.

    x: [..., N]; weight: [N].
    """
    result: Tensor = _backend(x.device).rms_norm(x, weight, epsilon)
    return result


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x[..., i], x[..., i + D/2]) by their angles; the result is of x's dtype.

    x: [T, heads, D]; cos, sin: float32 [T, D/2].
    """
    result: Tensor = _backend(x.device).rotary(x, cos, sin)
    return result


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise."""
    result: Tensor = _backend(gate.device).silu_and_mul(gate, up)
    return result


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Writes the keys and values of T tokens to their slots.

    k, v: [T, G, D]; slots: int64 [T], distinct.
    """
    _backend(k.device).store_kv(k, v, k_cache, v_cache, slots)


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, scale: float
) -> Tensor:
    """Causal attention of each sequence's newest tokens over all its tokens in the cache, theirs
    included (so `store_kv` comes first).

    q and the result: [T, H, D]; query heads h * H/G to (h + 1) * H/G - 1 share key-value head h.
    Cache content outside the sequences' lengths has no influence, not even when it is NaN.
    """
    result: Tensor = _backend(q.device).paged_attention(q, k_cache, v_cache, batch, scale)
    return result
