"""What a replica answers that is told to drain (protos/host.proto)."""

import asyncio
from collections.abc import Callable
from typing import Any

from protos import host_pb2, host_pb2_grpc

HOST_SERVICE = "penstock.host.v1.Host"


class HostServicer(host_pb2_grpc.HostServicer):
    """`drain` begins the drain, or gives the one that has begun; it takes `at_most_s`."""

    def __init__(self, drain: Callable[[], asyncio.Task[None]], at_most_s: float) -> None:
        self._drain = drain
        self._at_most_s = at_most_s

    async def Drain(self, request: host_pb2.DrainRequest, context: Any) -> host_pb2.DrainReply:
        task = self._drain()
        if request.wait:
            await asyncio.shield(task)  # who waits may go away, the drain goes on
        return host_pb2.DrainReply(drained=task.done(), at_most_s=self._at_most_s)
