"""What the fronts of generations over HTTP have in common."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping

from services.common.config import Settings
from services.gateway.api.rest.http import Exchange
from services.gateway.api.rest.keep_alive import KeepAlive
from services.gateway.identity.principal import Principal
from services.gateway.intake import Place
from services.gateway.runs.prompt import Prompt


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

    async def _begin(self) -> None:
        if not self._exchange.status:
            await self._exchange.start_events()
