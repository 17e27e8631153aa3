"""Where gRPC calls' messages come in: after their callers are known, and looked over before they
are parsed: a field without content is two bytes on the wire and a hundred when parsed."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import grpc
from google.protobuf.message import DecodeError, Message

from services.common.config import GatewaySettings
from services.common.errors import PenstockError, invalid
from services.gateway.api.rest.body import Pace
from services.gateway.intake import Place, refused

M = TypeVar("M", bound=Message)

MESSAGE_TIMEOUT_S = 30.0  # for a call's message to arrive
_READS_AT_ONCE = 8  # messages of one tenant
_UPLOADS_AT_ONCE = 4  # of one tenant: each has a message on its way most of the time
_OTHER_FIELDS = 4096  # of a message, beside a chat's: texts to embed are the most
_FIELDS_PER_CHAT_MESSAGE = 4
_DEPTH = 100  # of messages in each other, as protobuf reads them
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5  # protobuf's wire types


def max_fields(limits: GatewaySettings) -> int:
    """Of a message."""
    return _FIELDS_PER_CHAT_MESSAGE * limits.max_messages + _OTHER_FIELDS


class Inbox:
    """A few messages of a tenant at a time: how large one is shows when it is here, so each has the
    place of the largest until then."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._uploads: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def take(self, place: Place, context: Any) -> bytes:
        """The call's one message. Raises RESOURCE_EXHAUSTED ("too_many_bytes") or
        INVALID_ARGUMENT ("body_timeout"); CancelledError when the client goes away before."""
        limit = self._settings.body_limit_bytes
        turn = self._turns.setdefault(place.tenant, asyncio.Semaphore(_READS_AT_ONCE))
        try:
            async with asyncio.timeout(MESSAGE_TIMEOUT_S), turn:
                place.hold(limit)
                message = await context.read()
        except TimeoutError:
            text = f"The message did not arrive within {MESSAGE_TIMEOUT_S:.0f} s."
            raise invalid(text, "", reason="body_timeout") from None
        if message is grpc.aio.EOF:
            raise no_message()
        place.release(limit - len(message))
        return bytes(message)

    async def pieces(self, place: Place, context: Any) -> AsyncGenerator[bytes, None]:
        """The messages of a call that has several, of which the place holds what came. Raises
        RESOURCE_EXHAUSTED ("too_many_uploads", "too_many_bytes"), INVALID_ARGUMENT
        ("body_timeout")."""
        limit = self._settings.body_limit_bytes
        turn = self._uploads.setdefault(place.tenant, asyncio.Semaphore(_UPLOADS_AT_ONCE))
        try:
            async with asyncio.timeout(MESSAGE_TIMEOUT_S):
                await turn.acquire()
        except TimeoutError:
            why = f"{_UPLOADS_AT_ONCE} of your uploads are under way at this gateway"
            raise refused("too_many_uploads", why) from None
        try:
            pace, received = Pace(self._settings), 0
            while True:
                place.hold(limit)
                message = await pace.keep(context.read(), received)
                size = 0 if message is grpc.aio.EOF else len(message)
                place.release(limit - size)
                if message is grpc.aio.EOF:
                    return
                received += size
                yield bytes(message)
        finally:
            turn.release()

    def parse(self, kind: type[M], message: bytes) -> M:
        """Raises INVALID_ARGUMENT for what is none, or has more fields than any within the limits
        ("body_too_large")."""
        most = max_fields(self._settings)
        try:
            if _count_fields(memoryview(message), kind.DESCRIPTOR, most) > most:
                text = f"The message has more than {most} fields."
                raise invalid(text, "", reason="body_too_large")
            return kind.FromString(message)
        except (DecodeError, IndexError):
            raise _no(kind) from None


def _count_fields(message: memoryview, kind: Any, most: int, depth: int = _DEPTH) -> int:
    """How many there are by the descriptor `kind`, in submessages too; hardly more than `most` are
    looked at. Raises DecodeError for what lies deeper than protobuf reads."""
    if not depth:
        raise DecodeError
    at = count = 0
    while at < len(message) and count <= most:
        tag, at = _varint(message, at)
        count += 1
        wire_type = tag & 7
        if wire_type == _LENGTH:
            size, at = _varint(message, at)
            field = kind.fields_by_number.get(tag >> 3)
            if field is not None and field.message_type is not None:
                inner = message[at : at + size]
                count += _count_fields(inner, field.message_type, most - count, depth - 1)
            at += size
        elif wire_type == _VARINT:
            _, at = _varint(message, at)
        elif wire_type in (_FIXED64, _FIXED32):
            at += 8 if wire_type == _FIXED64 else 4
        else:
            raise DecodeError
    return count


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """The number at `at`, and where it ends. Raises IndexError where the data ends first."""
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
        if shift > 63:
            raise DecodeError


def no_message() -> PenstockError:
    return invalid("The call has no message.", "", reason="no_message")


def _no(kind: type[Message]) -> PenstockError:
    return invalid(f"This is not a {kind.DESCRIPTOR.name}.", "", reason="invalid_message")
