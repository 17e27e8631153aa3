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
from kernels.heads import QkNorm, Scores
from kernels.mixture import Mixture

Floats = NDArray[np.float32]
MEET = -1
"""No operation of the kernels: Python's own, between two of them (`Program`)."""


@dataclass(eq=False)
class Rows:
    """Stands for float32 [rows of the step, width]."""

    width: int
    which: int
    """Of the step's rows: one for each token, those that are sampled or pooled behind their last
    layer, or the sampled ones alone (structures.py)."""
    prelude: tuple[int, Floats | None, float] = (c.PLAIN, None, 0.0)
    """What the linear that takes it does with its rows first."""
    origin: "Rows | None" = None
    """Of a norm or an activation: what it is of."""
    added: int = 0
    """Times that something was added to it. Of a norm or an activation: before it was taken."""
    choices: int = 1
    """So many for each of the step's rows: of experts (native/experts.h)."""


class Recorder:
    """Takes down what a model computes, operation by operation."""

    def __init__(self) -> None:
        self.ops: list[dict[str, Any]] = []

    def embed(self, table: Matrix, scale: float = 1.0) -> Rows:
        """Rows of the table [vocab, width] by the step's token ids, times `scale`."""
        return self._emit(c.EMBED, table.k, c.ALL, matrix=table, factor=scale)

    def norm(self, x: Rows, weight: Floats, epsilon: float) -> Rows:
        """x / sqrt(mean(x²) + epsilon) * weight."""
        return Rows(x.width, x.which, (c.NORM, weight, epsilon), x, x.added)

    def silu_mul(self, x: Rows) -> Rows:
        """silu of the row's first half times its second half."""
        return Rows(x.width // 2, x.which, (c.SILU_MUL, None, 0.0), x, x.added)

    def gelu_mul(self, x: Rows) -> Rows:
        """gelu of the row's first half, by tanh, times its second half."""
        return Rows(x.width // 2, x.which, (c.GELU_MUL, None, 0.0), x, x.added)

    def linear(self, x: Rows, weights: Matrix) -> Rows:
        """x W^T + bias."""
        return self._linear(x, weights)

    def experts(self, x: Rows, mixture: Mixture[Matrix]) -> Rows:
        """Of each row the sum of what its chosen experts make of it."""
        inner, width = (m.n // mixture.experts for m in (mixture.gate_up, mixture.down))
        beside: dict[str, Any] = {}
        if shared := mixture.shared:
            beside["shared_gate"] = self._linear(x, shared.gate)
            y = self._linear(x, shared.gate_up)
            beside["shared"] = self._linear(self.silu_mul(y), shared.down)
        logits = self._linear(x, mixture.router)
        self.ops.append({"kind": c.ROUTE, "source": logits, "target": logits, "mixture": mixture})
        of_each = {"mixture": mixture, "choices": mixture.chosen}
        y = self._product(c.EXPERTS, x, mixture.gate_up, inner, gathers=True, **of_each)
        y = self._product(c.EXPERTS, self.silu_mul(y), mixture.down, width, **of_each)
        return self._emit(
            c.MIX, width, x.which, source=y, mixture=mixture, epilogue=c.PUT, **beside
        )

    def _linear(self, x: Rows, weights: Matrix) -> Rows:
        return self._product(c.LINEAR, x, weights, weights.n)

    def _product(self, kind: int, x: Rows, weights: Matrix, width: int, **fields: Any) -> Rows:
        if x.width != weights.k:
            raise ValueError(f"rows of {x.width} meet a matrix of {weights.k}")
        self._check_fresh(x)
        fields |= {"source": x.origin or x, "prelude": x.prelude, "matrix": weights}
        return self._emit(kind, width, x.which, epilogue=c.PUT, **fields)

    def add(self, x: Rows, y: Rows) -> Rows:
        """x + y, where y is what the last `linear` or `experts` gave, or the norm of rows; x is no
        more."""
        op, (prelude, weight, epsilon) = self.ops[-1], y.prelude
        if prelude == c.NORM and x.width == y.width:
            self._check_fresh(y)
            fields = {"source": y.origin, "target": x, "norm": weight, "epsilon": epsilon}
            self.ops.append({"kind": c.ADD_NORM, **fields})
        elif op["target"] is y and op["kind"] in (c.LINEAR, c.MIX) and x.width == y.width:
            op["target"], op["epilogue"] = x, c.ADD
        else:
            raise ValueError(
                "only what linears or experts just gave is added, to rows of its width"
            )
        x.added += 1
        return x

    def add_norm(self, x: Rows, y: Rows, weight: Floats, epsilon: float) -> tuple[Rows, Rows]:
        """`add`, and the sum's `norm`."""
        x = self.add(x, y)
        return x, self.norm(x, weight, epsilon)

    def rotary(self, qkv: Rows, layer: int, rope: int = 0, norm: QkNorm | None = None) -> Rows:
        """Queries and keys of [heads + 2 kv_heads, dim] normed, where there is a norm, and turned
        by their positions (of the program's tables, those of number `rope`), in place; keys and
        values stored in the cache."""
        fields = {"layer": layer, "rope": rope, "qk_norm": norm}
        self.ops.append({"kind": c.ROTARY, "source": qkv, "target": qkv, **fields})
        return qkv

    def attention(self, qkv: Rows, layer: int, width: int, scores: Scores) -> Rows:
        """Each token's queries over its sequence's tokens in the cache, itself included."""
        return self._emit(c.ATTENTION, width, c.ALL, source=qkv, layer=layer, scores=scores)

    def cap(self, x: Rows, cap: float) -> Rows:
        """cap * tanh(x / cap), in place."""
        self.ops.append({"kind": c.CAP, "source": x, "target": x, "factor": cap})
        x.added += 1
        return x

    def wanted(self, x: Rows) -> Rows:
        """The rows that are sampled or pooled: what comes after is computed for them alone."""
        return self._emit(c.GATHER, x.width, c.WANTED, source=x)

    def pooled(self, x: Rows) -> Rows:
        """Sums up the norm's pooled rows; gives the sampled ones."""
        kind, weight, epsilon = x.prelude
        if kind != c.NORM or x.which != c.WANTED:
            raise ValueError("only the norm of wanted rows is pooled")
        self._check_fresh(x)
        fields = {"source": x.origin, "target": x.origin, "norm": weight, "epsilon": epsilon}
        self.ops.append({"kind": c.POOL, **fields})
        return Rows(x.width, c.SAMPLED, x.prelude, x.origin, x.added)

    def _check_fresh(self, x: Rows) -> None:
        if x.origin is not None and x.origin.added != x.added:
            raise ValueError("a norm or activation is of rows that were added to since")

    def _emit(self, kind: int, width: int, which: int, choices: int = 1, **fields: Any) -> Rows:
        rows = Rows(width, which, choices=choices)
        self.ops.append({"kind": kind, "target": rows, **fields})
        return rows
