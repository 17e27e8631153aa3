"""Chunks that a search brought become passages: those that follow on each other are one.

It is done last, when it is known which chunks are told: a limit and a reranking model's scores are
of chunks, of several searches too.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from protos.common_pb2 import Passage, Range
from protos.retrieval_pb2 import SearchReply, Stretch
from services.common.text.copies import words_of

_MOST_JOINED = 4  # chunks in a passage


class Chunk(NamedTuple):
    passage: Passage  # it alone
    stretch: Stretch


def chunks_of(reply: SearchReply) -> list[Chunk]:
    """Of a service that tells none of where they stand, no neighbours are found."""
    stretches = [*reply.stretches] or [Stretch()] * len(reply.passages)
    return [Chunk(*placed) for placed in zip(reply.passages, stretches, strict=True)]


def put(chunks: Iterable[Chunk], reply: SearchReply) -> None:
    """Instead of those that it has."""
    some = list(chunks)
    del reply.passages[:], reply.stretches[:]
    reply.passages.extend(chunk.passage for chunk in some)
    reply.stretches.extend(chunk.stretch for chunk in some)


def best_of(replies: Sequence[SearchReply], limit: int) -> list[Chunk]:
    """The best chunks that any of several queries found, each by the query that it answers best,
    and copies once."""
    if len(replies) == 1:
        return chunks_of(replies[0])
    found = [chunk for reply in replies for chunk in chunks_of(reply)]
    found.sort(key=lambda chunk: -chunk.passage.score)
    best: dict[str, Chunk] = {}
    for chunk in found:
        best.setdefault(words_of(chunk.passage.text), chunk)
    return list(best.values())[:limit]


def joined(best_first: Sequence[Chunk]) -> list[Passage]:
    """Neighbours of the same document, below the same headings, are one passage, which has the
    place and the score of the best of them."""
    runs: list[list[tuple[int, Chunk]]] = []
    for rank, chunk in sorted(enumerate(best_first), key=lambda ranked: _place(ranked[1])):
        last = runs[-1] if runs else []
        if last and len(last) < _MOST_JOINED and _rest(last[-1][1], chunk) is not None:
            last.append((rank, chunk))
        else:
            runs.append([(rank, chunk)])
    return [_passage([chunk for _, chunk in run], min(run)[1]) for run in sorted(runs, key=min)]


def _place(chunk: Chunk) -> tuple[Any, ...]:
    passage, stretch = chunk
    return stretch.collection, passage.source_id, stretch.revision, passage.position


def _rest(one: Chunk, other: Chunk) -> str | None:
    """What the other's text adds behind this one's; None if it does not go on there."""
    (a, first), (b, second) = one, other
    *document, position = _place(one)
    if not first.collection or _place(other) != (*document, position + 1) or a.title != b.title:
        return None
    text, both = b.text[second.lead :], first.end - second.start
    if both <= 0:
        return text if not both else f"\n{text}"
    return text[both:] if a.text.endswith(text[:both]) else None


def _passage(run: Sequence[Chunk], best: Chunk) -> Passage:
    made = Passage()
    made.CopyFrom(run[0].passage)
    made.text += "".join(_rest(one, other) or "" for one, other in pairwise(run))
    made.score = best.passage.score
    made.scores.CopyFrom(best.passage.scores)
    for name in ("pages", "rows"):
        ranges = [getattr(p, name) for p, _ in run if p.HasField(name)]
        if ranges:
            getattr(made, name).CopyFrom(Range(first=ranges[0].first, last=ranges[-1].last))
    return made
