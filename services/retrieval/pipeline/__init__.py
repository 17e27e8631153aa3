"""What retrieval does for each of its calls, step by step; each step is a span."""

from services.retrieval.pipeline.changes import remove, set_attributes
from services.retrieval.pipeline.embedding import embed
from services.retrieval.pipeline.indexing import index
from services.retrieval.pipeline.judging import judge
from services.retrieval.pipeline.parts import Parts
from services.retrieval.pipeline.reading import read
from services.retrieval.pipeline.searching import search

__all__ = ["Parts", "embed", "index", "judge", "read", "remove", "search", "set_attributes"]
