"""What a filter asks of the embedded store, in which one call runs at a time: whoever asks for a
minute of it has all other searches wait for that.
"""

from services.common.errors import PenstockError, invalid
from services.retrieval.index.points import Condition, Either, Every, Not, Within

_LOOKED_UP = 0.05  # of what a comparison by order takes of a chunk, what is in an index does
MOST = 400_000.0  # comparisons by order: 2.4 s of processor time, and a search has 4


def of_each_chunk(condition: Condition) -> float:
    """Comparisons by order, at most."""
    if isinstance(condition, Every | Either):
        return sum(map(of_each_chunk, condition.conditions))
    if isinstance(condition, Not):
        return of_each_chunk(condition.condition)
    return 1.0 if isinstance(condition, Within) else _LOOKED_UP


def refusal(chunks: int) -> PenstockError:
    """Of a filter of a search among so many."""
    return invalid(
        f"These filters are more than a search among {chunks:,} chunks has time for: compare fewer "
        "attributes, by 'eq' or 'in' where you can.",
        "filters",
        reason="filters_too_costly",
        stage="retrieval",
    )
