"""Passages as an answer holds them."""

from collections.abc import Sequence
from itertools import zip_longest

from protos import common_pb2
from services.retrieval.index.points import Hit

MAX_PASSAGE_BYTES = 256 * 2**10  # in one answer


def passages_of(hits: Sequence[Hit], threshold: float) -> list[common_pb2.Passage]:
    """Those of at least this score. A threshold of 0 is none."""
    return [_passage(hit) for hit in hits if not threshold or hit.score >= threshold]


def in_turns(*ways: Sequence[common_pb2.Passage]) -> list[common_pb2.Passage]:
    """The first of each, then the second: their scores are not of a kind."""
    rows = zip_longest(*ways)
    return [passage for row in rows for passage in row if passage is not None]


def bounded(passages: list[common_pb2.Passage]) -> list[common_pb2.Passage]:
    """The best ones that fit an answer; the first in any case."""
    size = 0
    for number, passage in enumerate(passages):
        size += passage.ByteSize()
        if number and size > MAX_PASSAGE_BYTES:
            return passages[:number]
    return passages


def _passage(hit: Hit) -> common_pb2.Passage:
    pages, rows = (hit.payload.get(name) for name in ("pages", "rows"))
    return common_pb2.Passage(
        title=hit.payload["title"],
        text=hit.payload["text"],
        score=hit.score,
        source_id=hit.payload["source_id"],
        position=hit.payload["position"],
        pages=pages and common_pb2.Range(first=pages[0], last=pages[1]),
        rows=rows and common_pb2.Range(first=rows[0], last=rows[1]),
    )
