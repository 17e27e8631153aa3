"""A request's body: bounded in size, in time and in the memory that its tenant may take."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.types import Message, Receive

from services.common.config import GatewaySettings
from services.common.errors import PenstockError, invalid
from services.gateway.intake import Place

T = TypeVar("T")

LINGER_S = 2.0  # for the rest of a refused body


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


class Pace:
    """How long what comes in pieces may take: some grace, and longer at its rate."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._grace_s = settings.body_grace_s
        self._bytes_per_s = settings.body_min_bytes_per_s
        self._began = time.monotonic()

    async def keep(self, piece: Awaitable[T], received: int) -> T:
        """The next one, behind so many bytes. Raises INVALID_ARGUMENT ("body_timeout")."""
        due = self._began + self._grace_s + received / self._bytes_per_s
        try:
            async with asyncio.timeout(due - time.monotonic()):
                return await piece
        except TimeoutError:
            rate = self._bytes_per_s
            message = f"The body did not arrive in time; send at least {rate} bytes per second."
            raise invalid(message, "", reason="body_timeout") from None


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
        self._pace = Pace(settings)
        self._received = self._held = 0

    async def pieces(self, place: Place, limit: int = 0) -> AsyncGenerator[bytes, None]:
        """The body as it arrives; `limit` 0: every body's. Raises INVALID_ARGUMENT
        ("body_too_large", "body_timeout") or RESOURCE_EXHAUSTED ("too_many_bytes"), the first and
        the last of them before a byte is read where its size is announced."""
        limit = limit or self._settings.body_limit_bytes
        announced = self._headers.get("content-length", "")
        self._expect(int(announced) if announced.isdecimal() else 0, place, limit)
        while not self.complete:
            message = await self._next()
            piece = message.get("body", b"")
            self._received += len(piece)
            self._expect(self._received, place, limit)
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

    def _expect(self, size: int, place: Place, limit: int) -> None:
        if size > limit:
            raise too_large(limit)
        if size > self._held:
            place.hold(size - self._held)
            self._held = size

    async def _next(self) -> Message:
        """ASGI's `receive`, without a silent end."""
        message = await self._pace.keep(self._receive(), self._received)
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        return message


def too_large(limit: int, param: str = "") -> PenstockError:
    return invalid(f"The body is larger than {limit} bytes.", param, reason="body_too_large")
