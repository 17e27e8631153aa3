"""How many requests run at once, and the end of new ones when the gateway drains."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from services.common.errors import PenstockError, unavailable
from services.gateway import metrics


class Intake:
    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._idle = asyncio.Event()
        self._idle.set()
        self.running = 0
        self.draining = False

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Holds a place among the running requests.

        Raises RESOURCE_EXHAUSTED ("too_many_requests") or UNAVAILABLE ("draining").
        """
        if self.draining:
            raise unavailable("this gateway is shutting down", stage="gateway", reason="draining")
        if self.running >= self._max_requests:
            raise PenstockError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"this gateway serves {self.running} requests, its limit",
                stage="gateway",
                reason="too_many_requests",
                retry_after_s=1.0,
            )
        self.running += 1
        self._idle.clear()
        metrics.running.inc()
        try:
            yield
        finally:
            self.running -= 1
            metrics.running.dec()
            if not self.running:
                self._idle.set()

    async def drain(self, grace_s: float) -> None:
        """Refuses new requests; returns when none runs, or after `grace_s`."""
        self.draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            return
