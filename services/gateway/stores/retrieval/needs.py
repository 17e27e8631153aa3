"""What a replica must have for a request: what it is to understand, and a connection."""

import asyncio
from contextlib import suppress
from typing import Any

import grpc
from grpc import ChannelConnectivity

from protos.retrieval_pb2 import IndexRequest, ReadRequest, SearchRequest, SetAttributesRequest
from services.common.errors import PenstockError, unavailable
from services.common.retrieval_abilities import (
    BLOBS,
    EMBEDDERS,
    FILTERS,
    LATE,
    MARKS,
    RANKING,
    READING,
    REINDEXING,
    VECTORS,
)

_CONNECT_S = 5.0


def needs(method: str, request: Any) -> frozenset[str]:
    """Which abilities; without them it would leave out a part of the request."""
    found = set[str]({VECTORS} if method == "IndexServed" else ())
    if isinstance(request, SearchRequest | IndexRequest):
        found.update({EMBEDDERS} if request.embedder else ())
    if isinstance(request, SearchRequest):
        found.update({FILTERS} if request.HasField("filter") else ())
        found.update({RANKING} if request.HasField("ranking") else ())
        found.update({LATE} if request.ranking.late_weight else ())
        found.update({VECTORS} if request.HasField("vector") else ())
    if isinstance(request, IndexRequest):
        found.update({BLOBS} if request.blob else ())
        found.update({REINDEXING} if request.reindexing else ())
    if isinstance(request, ReadRequest):
        found.add(READING)
    if isinstance(request, SetAttributesRequest):
        found.add(MARKS)
    return frozenset(found)


def outdated(missing: frozenset[str]) -> PenstockError:
    return unavailable(
        f"retrieval is of an earlier version, which knows no {' and no '.join(sorted(missing))}",
        stage="retrieval",
        reason="retrieval_outdated",
    )


async def connected(channel: grpc.aio.Channel) -> bool:
    """Whether there is a connection, or one comes about: what is sent without one is not lost, but
    cannot be told from what is.
    """
    with suppress(TimeoutError, grpc.aio.UsageError):  # the latter of a channel that is closed
        async with asyncio.timeout(_CONNECT_S):
            while True:
                state = channel.get_state(try_to_connect=True)
                if state is ChannelConnectivity.READY:
                    return True
                if state in (ChannelConnectivity.TRANSIENT_FAILURE, ChannelConnectivity.SHUTDOWN):
                    return False
                await channel.wait_for_state_change(state)
    return False
