"""What the fronts of generations over HTTP have in common."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping

from protos.tokenizer_pb2 import TextDelta
from services.common.config import Settings
from services.gateway.api.rest.http import Exchange
from services.gateway.api.rest.keep_alive import KeepAlive
from services.gateway.identity.principal import Principal
from services.gateway.intake import Place
from services.gateway.runs.prompt import Answer, Prompt


class HttpFront(ABC):
    """A request of one exchange, and its answer: whole, or server-sent events that are kept alive
    (front.Front, but for the answer itself)."""

    def __init__(self, exchange: Exchange, settings: Settings) -> None:
        self.request_id = exchange.request_id
        self.route = exchange.route
        self.endpoint = exchange.endpoint
        self.authorization = exchange.authorization
        self.traceparent = exchange.headers.get("traceparent")
        self.stream = False
        self._exchange = exchange
        self._settings = settings
        self._keeping = KeepAlive(settings.gateway.sse_keep_alive_s, self._keep_alive)
        self._writing = asyncio.Lock()  # answers come side by side, events one after the other

    async def read(self, principal: Principal, place: Place) -> list[Prompt]:
        self._exchange.place = place
        prompts = await self._understand(await self._exchange.json_body(), principal, place)
        self._exchange.watch_client()
        return prompts

    @abstractmethod
    async def _understand(
        self, body: bytes, principal: Principal, place: Place
    ) -> list[Prompt]: ...

    @abstractmethod
    async def _keep_alive(self) -> None:
        """The first one begins the answer: what fails from then on is an event."""

    def _at_once(self) -> Callable[[], Awaitable[None]] | None:
        """What is said as soon as the request is let in."""
        return None

    def admitted(self, headers: Mapping[str, str]) -> None:
        self._exchange.headers_out.update(headers)
        if self.stream:
            self._keeping.begin(self._at_once())

    def close(self) -> None:
        """Whatever the answer's end is, only that is written from here on."""
        self._keeping.close()

    # ---- out ------------------------------------------------------------------------------------

    @abstractmethod
    def _told_of(self, answer: Answer, deltas: list[TextDelta]) -> bytes:
        """The events of an answer's deltas; none of one that is not streamed. What they are
        depends on those before: to be sent in this order."""

    async def write(self, answer: Answer, deltas: list[TextDelta]) -> None:
        """All events that are ready leave in one write.

        The answer begins with the first delta, so what fails before it has its own HTTP status.
        """
        async with self._writing:
            if events := self._told_of(answer, deltas):
                await self._begin()
                await self._exchange.write(events)

    @property
    def write_now(self) -> Callable[[Answer, list[TextDelta]], None] | None:
        is_clear = self._exchange.is_clear and not self._writing.locked()
        return self._write_now if is_clear else None

    def _write_now(self, answer: Answer, deltas: list[TextDelta]) -> None:
        if events := self._told_of(answer, deltas):
            self._exchange.write_now(events)

    async def _begin(self) -> None:
        if not self._exchange.status:
            await self._exchange.start_events()
