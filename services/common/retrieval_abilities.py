"""What a retrieval replica registers that it understands of requests, beyond the first version's.

An earlier version leaves out what it does not know, without a word: a search with a filter would
find what the filter keeps away. So a caller asks only those that registered it.
"""

from collections.abc import Iterable, Mapping

FACT = "understands"
BLOBS = "blobs"  # Index: the document's bytes are in the blob store
FILTERS = "filters"  # Search: only what has these attributes
RANKING = "ranking"  # Search: how meaning and words are weighed
READING = "reading"  # Read: what a document says
LATE = "late"  # Search: how much late interaction counts
MARKS = "marks"  # SetAttributes: filters by what is equal find them, beside all others
EMBEDDERS = "embedders"  # Index, Search: by one of several embedding models
REINDEXING = "reindexing"  # Index: nothing, where the present model has the document whole
VECTORS = "vectors"  # IndexServed, Search: by a served model, of which the caller tells vectors
ALL = frozenset({BLOBS, FILTERS, RANKING, READING, LATE, MARKS, EMBEDDERS, REINDEXING, VECTORS})


def told(abilities: Iterable[str] = ALL) -> dict[str, str]:
    """The fact, to be registered."""
    return {FACT: ",".join(sorted(abilities))}


def of(facts: Mapping[str, str]) -> frozenset[str]:
    return frozenset(facts.get(FACT, "").split(","))
