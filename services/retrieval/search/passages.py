"""Passages as a reply holds them: chunks, none twice, within its bytes."""

from collections.abc import Iterable, Sequence
from typing import Any

from protos import common_pb2
from protos.retrieval_pb2 import SearchReply, Stretch
from services.common.text.copies import words_of
from services.retrieval.index.attributes import told
from services.retrieval.index.points import Hit

MAX_PASSAGE_BYTES = 256 * 2**10  # in one answer


def passages_of(ranked: Sequence[Hit], threshold: float, limit: int) -> SearchReply:
    """Up to `limit` chunks, the best first, each of at least this score (a threshold of 0 is none);
    and where they stand.
    """
    good = (one for one in ranked if not threshold or one.score >= threshold)
    some = _bounded([(_passage(one), _stretch(one)) for one in unlike(good, limit)])
    return SearchReply(
        passages=[passage for passage, _ in some], stretches=[stretch for _, stretch in some]
    )


def unlike(ranked: Iterable[Hit], limit: int) -> list[Hit]:
    """Up to so many. Of those that say the same, word for word, the best alone, whatever their
    documents are called; what differs by a number or a sign may be another answer.
    """
    found: dict[str, Hit] = {}
    for one in ranked:
        found.setdefault(words_of(one.payload["text"]), one)
        if len(found) == limit:
            break
    return list(found.values())


def _passage(one: Hit) -> common_pb2.Passage:
    held = one.payload
    return common_pb2.Passage(
        title=held["title"],
        text=held["text"],
        score=one.score,
        source_id=held["source_id"],
        position=held["position"],
        pages=_range(held.get("pages")),
        rows=_range(held.get("rows")),
        attributes=told(held),
        scores=common_pb2.Scores(dense=one.dense, sparse=one.sparse, late=one.late),
    )


def _range(ends: Sequence[int] | None) -> common_pb2.Range | None:
    return common_pb2.Range(first=ends[0], last=ends[1]) if ends else None


def _stretch(one: Hit) -> Stretch:
    held: Any = one.payload
    if "start" not in held:
        return Stretch()
    return Stretch(
        collection=held["collection"],
        revision=held["revision"],
        start=held["start"],
        end=held["end"],
        lead=held.get("lead", 0),
    )


def _bounded(
    chunks: list[tuple[common_pb2.Passage, Stretch]],
) -> list[tuple[common_pb2.Passage, Stretch]]:
    """The best ones that fit an answer; the first in any case."""
    size = 0
    for number, (passage, _) in enumerate(chunks):
        size += passage.ByteSize()
        if number and size > MAX_PASSAGE_BYTES:
            return chunks[:number]
    return chunks
