"""What an adapter of low rank adds to some columns of a linear (arXiv 2106.09685)."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Delta:
    """To columns from `first` on of y = x W^T, x A^T B^T is added."""

    first: int
    down: Tensor
    """A: [ranks, k]"""
    up: Tensor
    """B, transposed: [ranks, columns]"""
