"""A search that is looked up before it is made, and told again where it cannot be made.

The key is the whole request: tenant, collections, query, limit, filters, ranking and whatever else
a request may say, so that a field which is added is in it. Left out are how old a result may be,
and what the policy says: passages are kept as the store has them and are judged anew each time.
"""

import time
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import NamedTuple

import grpc
import numpy as np

from protos.retrieval_pb2 import SearchReply, SearchRequest
from services.common.config import RetrievalSettings
from services.common.errors import PenstockError
from services.common.telemetry.spans import Span
from services.common.text.normal_form import normalized
from services.retrieval import metrics
from services.retrieval.cache.results import Result, Results
from services.retrieval.cache.revisions import Revisions, Seen

_OUTAGES = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.INTERNAL,
    }
)


class Embedded(NamedTuple):
    """A query, as the model reads it."""

    vector: np.ndarray  # at unit length; empty: there is none, its words are looked for alone
    tokens: int
    late: np.ndarray  # its tokens' vectors (token_vectors.py)


class Searches:
    def __init__(self, settings: RetrievalSettings, revisions: Revisions) -> None:
        self._settings = settings
        self._revisions = revisions
        self._results = Results(settings.cache_bytes)

    async def find(
        self,
        request: SearchRequest,
        embed: Callable[[], Awaitable[Embedded]],
        look: Callable[[Embedded], Awaitable[SearchReply]],
        span: Span,
    ) -> SearchReply:
        """What `look` finds for what `embed` makes of the query, or found before. Raises what they
        raise, where there is nothing earlier to tell."""
        began = time.monotonic()
        asked = _Asked.of(request, self._settings)
        seen = await self._revisions.seen(asked.tenant, asked.collections)
        if (hit := self._exact(asked, seen)) is not None:
            return self._told(hit, "exact", began, span)
        try:
            query = await embed()
            if (hit := self._similar(asked, seen, query)) is not None:
                return self._told(hit, "similar", began, span, query.tokens)
            reply = await look(query)
        except PenstockError as error:
            if error.code not in _OUTAGES or (hit := self._earlier(asked, seen)) is None:
                raise
            span.set_attribute("store", error.reason or error.code.name.lower())
            return self._told(hit, "stale", began, span)
        reply.tokens = query.tokens
        self._keep(asked, seen, query, reply, began)
        metrics.CACHE_LOOKS.labels("missed" if _usable(seen) else "unusable").inc()
        return reply

    def _exact(self, asked: "_Asked", seen: Seen | None) -> Result | None:
        result = self._results.get(asked.tenant, asked.key)
        return result if result is not None and self._is_fresh(result, asked, seen) else None

    def _similar(self, asked: "_Asked", seen: Seen | None, query: Embedded) -> Result | None:
        if not asked.similar_at_least or not _usable(seen):
            return None
        for cosine, result in self._results.alike(asked.tenant, asked.kind, query.vector):
            if cosine < asked.similar_at_least:
                return None
            if self._is_fresh(result, asked, seen):
                return result
        return None

    def _earlier(self, asked: "_Asked", seen: Seen | None) -> Result | None:
        """However old up to `cache_stale_s`; but nothing of which text may be gone for good."""
        result = self._results.get(asked.tenant, asked.key)
        if result is None or seen is None or not asked.max_age_s:
            return None
        known = [revision.removal for revision in result.revisions]
        gone = known != [revision.removal for revision in seen.revisions]
        late = _age_s(result) > self._settings.cache_stale_s
        return None if gone or late else result

    def _is_fresh(self, result: Result, asked: "_Asked", seen: Seen | None) -> bool:
        """Under the revision of a write that is under way nothing is kept."""
        if seen is None or result.revisions != seen.revisions:
            return False
        return _age_s(result) < asked.max_age_s

    def _keep(
        self, asked: "_Asked", seen: Seen | None, query: Embedded, reply: SearchReply, began: float
    ) -> None:
        """Under what was seen before the search: a write since then has made it another."""
        if seen is None or not seen.settled or not asked.max_age_s:
            return
        now = time.monotonic()
        self._results.put(
            Result(
                asked.tenant,
                asked.kind,
                asked.key,
                seen.revisions,
                now,
                now - began,
                reply.SerializeToString(),
                query.vector,
            )
        )
        metrics.CACHE_BYTES.set(self._results.held)
        metrics.CACHE_ENTRIES.set(len(self._results))

    def _told(
        self, hit: Result, how: str, began: float, span: Span, tokens: int | None = None
    ) -> SearchReply:
        """`tokens`: that were embedded for it; None: none were."""
        reply = SearchReply.FromString(hit.reply)
        reply.age_s, reply.stale, reply.cached = _age_s(hit), how == "stale", tokens is None
        if tokens is not None:
            reply.tokens = tokens
        metrics.CACHE_LOOKS.labels(how).inc()
        if how != "stale":
            metrics.CACHE_SAVED_SECONDS.inc(max(0.0, hit.took_s - (time.monotonic() - began)))
        span.set_attributes({"cache": how, "age_s": round(reply.age_s, 3)})
        return reply


class _Asked(NamedTuple):
    """What a request is known by in the cache."""

    tenant: str
    collections: tuple[str, ...]
    key: bytes
    kind: bytes  # the key without the query
    max_age_s: float
    similar_at_least: float  # cosine; 0: no other query's result will do

    @classmethod
    def of(cls, request: SearchRequest, settings: RetrievalSettings) -> "_Asked":
        told = SearchRequest()
        told.CopyFrom(request)
        for field in ("caller", "collections", "query", "judged", "policy", *_HOW_OLD):
            told.ClearField(field)
        if told.HasField("vector"):  # by a machine's rounding it is another each time
            del told.vector.values[:]
        told.caller.tenant = request.caller.tenant
        told.collections.extend(sorted(set(request.collections)))
        kind = told.SerializeToString(deterministic=True)
        told.query = normalized(request.query, "NFC")
        max_age_s, similar = settings.cache_max_age_s, settings.cache_similar_at_least
        return cls(
            request.caller.tenant,
            tuple(told.collections),
            _digest(told.SerializeToString(deterministic=True)),
            _digest(kind),
            request.max_age_s if request.HasField("max_age_s") else max_age_s,
            request.similar_at_least if request.HasField("similar_at_least") else similar,
        )


_HOW_OLD = ("max_age_s", "similar_at_least")


def _digest(told: bytes) -> bytes:
    return blake2b(told, digest_size=32).digest()


def _age_s(result: Result) -> float:
    return time.monotonic() - result.made


def _usable(seen: Seen | None) -> bool:
    return seen is not None and seen.settled
