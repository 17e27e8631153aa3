"""A layer of experts (arXiv 1701.06538): each row meets a few of them."""

from dataclasses import dataclass
from typing import Generic, TypeVar

Matrix = TypeVar("Matrix")


@dataclass(frozen=True, slots=True)
class Shared(Generic[Matrix]):
    """An expert of every row: sigmoid(gate x) times what it computes."""

    gate: Matrix
    """[1, width]"""
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class Mixture(Generic[Matrix]):
    """Of each row the softmax of `router` tells how much of it is whose; the `chosen` experts of
    the largest shares compute down(silu(gate) * up), and their shares' sum of that is the result.
    """

    router: Matrix
    """[experts, width]"""
    gate_up: Matrix
    """[experts * 2 * inner, width], one expert behind the other, of each first gate, then up"""
    down: Matrix
    """[experts * width, inner], so, too"""
    experts: int
    chosen: int
    normed: bool
    """The chosen ones' shares are made to sum up to 1."""
    shared: Shared[Matrix] | None = None
