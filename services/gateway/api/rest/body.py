"""A request's body: bounded in size, in time and in the memory that its tenant may take."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

from starlette.datastructures import Headers
from starlette.types import Message, Receive

from services.common.config import GatewaySettings
from services.common.errors import PenstockError, invalid
from services.gateway.intake import Place

LINGER_S = 2.0  # for the rest of a refused body


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


class RequestBody:
    """Read once, by whoever answers the request, or not at all.

    Its bytes are held at the tenant's place: as many as were announced before the first is read, or
    what arrives when none were.
    """

    def __init__(self, headers: Headers, receive: Receive, settings: GatewaySettings) -> None:
        self.complete = False  # all of it has arrived
        self._headers = headers
        self._receive = receive
        self._settings = settings
        self._began = time.monotonic()
        self._received = self._held = 0

    async def pieces(self, place: Place) -> AsyncGenerator[bytes, None]:
        """The body as it arrives. Raises INVALID_ARGUMENT ("body_too_large", "body_timeout") or
        RESOURCE_EXHAUSTED ("too_many_bytes"), the first and the last of them before a byte is read
        where its size is announced."""
        announced = self._headers.get("content-length", "")
        self._expect(int(announced) if announced.isdecimal() else 0, place)
        while not self.complete:
            message = await self._next()
            piece = message.get("body", b"")
            self._received += len(piece)
            self._expect(self._received, place)
            self.complete = not message.get("more_body", False)
            yield piece

    async def whole(self, place: Place) -> bytes:
        return b"".join([piece async for piece in self.pieces(place)])

    async def skim(self) -> bool:
        """Whether all of it is here; waits for nothing."""
        waits = "expect" in self._headers  # for our leave to send, which reading would give
        if not self.complete and not waits:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0):
                    self.complete = not (await self._receive()).get("more_body", False)
        return self.complete

    async def discard(self) -> None:
        """Reads on for a while before the connection is closed.

        Closing it on a client that still sends would reset it, and the client might never see the
        answer.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while not self.complete:
                    self.complete = not (await self._receive()).get("more_body", False)

    def _expect(self, size: int, place: Place) -> None:
        limit = self._settings.body_limit_bytes
        if size > limit:
            raise invalid(f"The body is larger than {limit} bytes.", "", reason="body_too_large")
        if size > self._held:
            place.hold(size - self._held)
            self._held = size

    async def _next(self) -> Message:
        """ASGI's `receive`, without a silent end."""
        rate = self._settings.body_min_bytes_per_s
        due = self._began + self._settings.body_grace_s + self._received / rate
        try:
            async with asyncio.timeout(due - time.monotonic()):
                message = await self._receive()
        except TimeoutError:
            raise _too_slow(rate) from None
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        return message


def _too_slow(rate: int) -> PenstockError:
    message = f"The body did not arrive in time; send at least {rate} bytes per second."
    return invalid(message, "", reason="body_timeout")
