"""What a model does with its heads between the products, as kernels of all devices take it."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class QkNorm:
    """Root mean square norm of queries and of keys, by weights [width] each: as wide as a head, of
    each head; as wide as all heads together, over them all."""

    q: Any
    k: Any
    epsilon: float


@dataclass(frozen=True, slots=True)
class Scores:
    """What becomes of a query times a key on its way to the softmax."""

    scale: float
    cap: float = 0.0
    """c > 0: of a score s comes c tanh(s / c)."""
    window: int = 0
    """Tokens that one sees, itself included; 0: all before it."""
