"""A model's forward pass, taken down as a list of operations.

A model says once what it computes, by the methods of `Recorder`; what these return stands for rows
of a step that has not come yet. Between operations rows are float32, whatever the weights are.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.cpu import structures as c
from kernels.cpu.matrix import Matrix

Floats = NDArray[np.float32]


@dataclass(eq=False)
class Rows:
    """Stands for float32 [rows of the step, width]."""

    width: int
    sampled: bool
    """The step's sampled rows, and not all of its tokens."""
    prelude: tuple[int, Floats | None, float] = (c.PLAIN, None, 0.0)
    """What the linear that takes it does with its rows first."""
    origin: "Rows | None" = None
    """Of a norm or an activation: what it is of."""
    added: int = 0
    """Times that something was added to it. Of a norm or an activation: before it was taken."""


class Recorder:
    """Takes down what a model computes, operation by operation."""

    def __init__(self) -> None:
        self.ops: list[dict[str, Any]] = []

    def embed(self, table: Matrix) -> Rows:
        """Rows of the table [vocab, width] by the step's token ids."""
        return self._emit(c.EMBED, table.k, False, matrix=table)

    def norm(self, x: Rows, weight: Floats, epsilon: float) -> Rows:
        """x / sqrt(mean(x²) + epsilon) * weight."""
        return Rows(x.width, x.sampled, (c.NORM, weight, epsilon), x, x.added)

    def silu_mul(self, x: Rows) -> Rows:
        """silu of the row's first half times its second half."""
        return Rows(x.width // 2, x.sampled, (c.SILU_MUL, None, 0.0), x, x.added)

    def linear(self, x: Rows, weights: Matrix) -> Rows:
        """x W^T + bias."""
        if x.width != weights.k:
            raise ValueError(f"rows of {x.width} meet a matrix of {weights.k}")
        if x.origin is not None and x.origin.added != x.added:
            raise ValueError("a norm or activation is of rows that were added to since")
        return self._emit(
            c.LINEAR,
            weights.n,
            x.sampled,
            source=x.origin or x,
            prelude=x.prelude,
            matrix=weights,
            epilogue=c.PUT,
        )

    def add(self, x: Rows, y: Rows) -> Rows:
        """x + y, where y is what the last `linear` gave; x is no more."""
        op = self.ops[-1]
        if op["target"] is not y or op["kind"] != c.LINEAR or x.width != y.width:
            raise ValueError("only what a linear just gave is added, to rows of its width")
        op["target"], op["epilogue"] = x, c.ADD
        x.added += 1
        return x

    def add_norm(self, x: Rows, y: Rows, weight: Floats, epsilon: float) -> tuple[Rows, Rows]:
        """`add`, and the sum's `norm`."""
        x = self.add(x, y)
        return x, self.norm(x, weight, epsilon)

    def rotary(self, qkv: Rows, layer: int) -> Rows:
        """Queries and keys of [heads + 2 kv_heads, dim] turned by their positions, in place; keys
        and values stored in the cache."""
        self.ops.append({"kind": c.ROTARY, "source": qkv, "target": qkv, "layer": layer})
        return qkv

    def attention(self, qkv: Rows, layer: int, width: int) -> Rows:
        """Each token's queries over its sequence's tokens in the cache, itself included."""
        return self._emit(c.ATTENTION, width, False, source=qkv, layer=layer)

    def sampled(self, x: Rows) -> Rows:
        """The rows whose logits are wanted: what comes after is computed for them alone."""
        return self._emit(c.GATHER, x.width, True, source=x)

    def _emit(self, kind: int, width: int, sampled: bool, **fields: Any) -> Rows:
        rows = Rows(width, sampled)
        self.ops.append({"kind": kind, "target": rows, **fields})
        return rows
