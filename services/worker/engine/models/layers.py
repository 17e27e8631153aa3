"""What a model family is written in: tensors that it asks for, operations that it is made of.

A family (llama.py) says both once. `Weights` gives it its tensors: of a checkpoint, in the order
that a processor's kernels read, or just their names and shapes. `Ops` computes: at once on torch
tensors, or taken down for the C++ kernels. Matrices and rows are the implementation's own; a family
only hands them on.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from kernels.heads import QkNorm, Scores
from kernels.mixture import Mixture

Matrix = Any
Vector = Any
Rows = Any
"""[rows of the step, features]"""


class Weights(Protocol):
    """Sizes are checked against the checkpoint's. Raises UnsupportedModel."""

    def table(self, name: str, rows: int, width: int) -> Matrix:
        """The tensor `name`.weight, [rows, width], whose rows `Ops.embed` takes."""

    def vector(self, name: str, size: int, plus: float = 0.0) -> Vector:
        """The tensor `name`.weight, [size], and `plus`."""

    def matrix(self, layers: Mapping[str, int], width: int, bias: bool = False) -> Matrix:
        """Linear layers of one input, by name and output size, as one: `name`.weight is
        [size, width], and `name`.bias [size] where they have biases."""


class Ops(Protocol):
    """A step's operations. Tokens are one flat dimension T, whatever sequences they belong to."""

    def embed(self, table: Matrix, scale: float = 1.0) -> Rows:
        """Rows of the table, by the step's token ids, times `scale`: [T, width]."""

    def norm(self, x: Rows, weight: Vector, epsilon: float) -> Rows:
        """x / sqrt(mean(x²) + epsilon) * weight."""

    def linear(self, x: Rows, weights: Matrix) -> Rows:
        """x W^T + bias."""

    def add(self, x: Rows, y: Rows) -> Rows:
        """x + y, of which y was computed last, by `linear`, `experts` or `norm`, and x is not used
        again."""

    def add_norm(self, x: Rows, y: Rows, weight: Vector, epsilon: float) -> tuple[Rows, Rows]:
        """`add`, and the `norm` of that."""

    def silu_mul(self, x: Rows) -> Rows:
        """silu of the first half of each row, times the second."""

    def gelu_mul(self, x: Rows) -> Rows:
        """gelu, by tanh, of the first half of each row, times the second."""

    def experts(self, x: Rows, mixture: Mixture[Matrix]) -> Rows:
        """Of each row the sum of what its chosen experts make of it: [rows, width]."""

    def rotary(self, qkv: Rows, layer: int, rope: int = 0, norm: QkNorm | None = None) -> Rows:
        """Of [heads + 2 kv_heads, dim] a token: norms queries and keys, turns them by the
        positions, as the model's rotary embedding number `rope` does, and stores keys and values
        in the layer's cache. Gives what `attention` takes."""

    def attention(self, queries: Rows, layer: int, width: int, scores: Scores) -> Rows:
        """Of each token over its sequence's tokens up to itself: [T, width = heads * dim]."""

    def cap(self, x: Rows, cap: float) -> Rows:
        """cap * tanh(x / cap); x is not used again."""

    def wanted(self, x: Rows) -> Rows:
        """Of the tokens after which one is sampled, and behind them of those that are pooled:
        [R + N, width]."""

    def pooled(self, x: Rows) -> Rows:
        """Takes the N of them, normed for the last time, as what is wanted of pooled sequences;
        gives the R."""
