"""Passages as an answer holds them: none twice, neighbours as one, within its bytes."""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from protos import common_pb2
from services.retrieval.index.attributes import told
from services.retrieval.index.points import Hit

MAX_PASSAGE_BYTES = 256 * 2**10  # in one answer
_MOST_JOINED = 4  # chunks in a passage
# What may differ between copies of a text: marks of a list's entries, and stops behind words. Signs,
# symbols and marks within words may not: they tell -5 from 5, and a word from another.
_NO_WORDS = re.compile(r"^\s*[-*•–]\s+|[.,;:!?]+(?=\s|$)", re.MULTILINE)


def passages_of(ranked: Sequence[Hit], threshold: float, limit: int) -> list[common_pb2.Passage]:
    """Up to `limit` chunks, the best, each of at least this score (a threshold of 0 is none);
    neighbours among them are one passage, the best passage first.
    """
    good = [one for one in unlike(ranked) if not threshold or one.score >= threshold]
    runs = sorted(_joined(good[:limit]), key=lambda run: -max(one.score for one in run))
    return _bounded([_passage(run) for run in runs])


def unlike(ranked: Iterable[Hit]) -> list[Hit]:
    """Of those that say the same, word for word, the best alone, whatever their documents are
    called; what differs by a number or a sign may be another answer.
    """
    found: dict[str, Hit] = {}
    for one in ranked:
        found.setdefault(_words(one), one)
    return list(found.values())


def _words(one: Hit) -> str:
    return " ".join(_NO_WORDS.sub(" ", one.payload["text"]).casefold().split())


def _joined(chunks: Iterable[Hit]) -> list[list[Hit]]:
    """Those that follow on each other in their document, below the same headings, together."""
    runs: list[list[Hit]] = []
    for one in sorted(chunks, key=_place):
        if runs and len(runs[-1]) < _MOST_JOINED and _rest(runs[-1][-1], one) is not None:
            runs[-1].append(one)
        else:
            runs.append([one])
    return runs


def _place(one: Hit) -> tuple[Any, ...]:
    held = one.payload
    return held["collection"], held["source_id"], held["revision"], held["position"]


def _rest(one: Hit, other: Hit) -> str | None:
    """What the other's text adds behind this one's; None if it does not go on there."""
    a, b = one.payload, other.payload
    *document, position = _place(one)
    if _place(other) != (*document, position + 1) or a["title"] != b["title"]:
        return None
    text, both = b["text"][b.get("lead", 0) :], a["end"] - b["start"]
    if both <= 0:
        return f"\n{text}"
    return text[both:] if a["text"].endswith(text[:both]) else None


def _passage(run: Sequence[Hit]) -> common_pb2.Passage:
    best, first = max(run, key=lambda one: one.score), run[0].payload
    text = first["text"] + "".join(_rest(a, b) or "" for a, b in pairwise(run))
    return common_pb2.Passage(
        title=first["title"],
        text=text,
        score=best.score,
        source_id=first["source_id"],
        position=first["position"],
        pages=_range(run, "pages"),
        rows=_range(run, "rows"),
        attributes=told(first),
        scores=common_pb2.Scores(dense=best.dense, sparse=best.sparse, late=best.late),
    )


def _range(run: Sequence[Hit], key: str) -> common_pb2.Range | None:
    spans = [span for one in run if (span := one.payload.get(key))]
    return common_pb2.Range(first=spans[0][0], last=spans[-1][1]) if spans else None


def _bounded(passages: list[common_pb2.Passage]) -> list[common_pb2.Passage]:
    """The best ones that fit an answer; the first in any case."""
    size = 0
    for number, passage in enumerate(passages):
        size += passage.ByteSize()
        if number and size > MAX_PASSAGE_BYTES:
            return passages[:number]
    return passages
