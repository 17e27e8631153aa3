"""The order in Redis (order.lua), as one router calls it and hears of it."""

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from services.common.config import Settings
from services.common.redis import Redis, RedisAway, RedisError
from services.common.script_line import ScriptLine
from services.router.admission.fair_order import Decided
from services.router.admission.ticket import Ticket

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("order.lua").read_text()
_LISTEN_AGAIN_S = 1.0
_WORDS = ("granted", "displaced", "recalled")


@dataclass
class Reply(Decided):
    """`first` and `second` are the operation's own, see order.lua. `advice_s`: when a request that
    came now would have its turn."""

    advice_s: float = 0.0
    first: Any = None
    second: Any = None


class SharedOrder:
    """Raises one of `RedisAway`, or RedisError, when a call cannot be made."""

    def __init__(
        self,
        redis: Redis,
        settings: Settings,
        router_id: str,
        capacity: Callable[[str], int],
        hear: Callable[[str, int, int], None] = lambda model, held, waiting: None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """`hear`: told with each reply of how many hold a slot of the model, and how many wait.
        `before`: called before anything is asked, to `tell` what is to be known by then."""
        self._redis = redis
        self._script = ScriptLine(redis, SOURCE)
        self._namespace = settings.namespace
        self._root = f"{settings.namespace}:{{admission:"  # the braces: one slot of a Redis cluster
        self._settings = settings.router
        self._router_id = router_id
        self._capacity = capacity
        self._hear = hear
        self._before = before

    async def enter(self, ticket: Ticket, limit: int) -> Reply:
        """Asks for a slot, or a place with `ticket.waited_s`; `first` is what it got."""
        return await self._ask(ticket.model, "enter", *self._facts(ticket), ticket.waited_s, limit)

    def tell(
        self, model: str, held: Sequence[Ticket], left: Iterable[tuple[str, float]]
    ) -> Coroutine[Any, Any, Reply]:
        """Tells of slots `held` that Redis does not know, or has given away; then of slots and
        places that were `left`, of each the id, and the work missed when it was charged. It hears
        so before whatever is called from now on, whenever the reply is awaited."""
        facts = chain.from_iterable(map(self._facts, held))
        return self._call(model, "tell", len(held), *facts, *chain.from_iterable(left))

    async def give_back(self, ticket: Ticket, left_over: float) -> Reply:
        """Gives a recalled slot back for a place; `first` is "waiting" if it was still wanted."""
        left = left_over / ticket.weight
        return await self._ask(
            ticket.model, "yield", ticket.id, ticket.missed, left, ticket.waited_s
        )

    async def renew(self, model: str, held: Sequence[str], waiting: Sequence[str]) -> Reply:
        """Keeps the leases. `first`: held ids, `second`: waiting ids that Redis does not know."""
        return await self._ask(model, "renew", len(held), *held, *waiting)

    async def look(self, model: str) -> Reply:
        """`first` hold a slot, `second` wait, over all routers."""
        return await self._ask(model, "status")

    async def listen(self, on_word: Callable[[str, Reply], None]) -> None:
        """Hears for ever what other routers' calls decided, and of which model."""
        while True:
            try:
                async with self._redis.pubsub(ignore_subscribe_messages=True) as heard:
                    await heard.subscribe(self.channel(self._router_id))
                    while True:
                        message = await heard.get_message(timeout=_LISTEN_AGAIN_S)
                        if message and (told := self._read(message["data"])) is not None:
                            on_word(*told)
            except (*RedisAway, RedisError):
                await asyncio.sleep(_LISTEN_AGAIN_S)

    def _read(self, word: str) -> tuple[str, Reply] | None:
        """A word, and of which model. Of another version, or junk, is None: what it was to tell,
        the next renewal finds."""
        try:
            what, root, id, advice = json.loads(word)
            if what not in _WORDS:
                raise ValueError(what)
            return str(root)[len(self._root) : -1], Reply(**{what: [id]}, advice_s=float(advice))
        except (ValueError, TypeError):
            log.warning("a word of admission cannot be read")
            return None

    async def probe(self) -> None:
        """Raises while Redis is away."""
        await self._redis.ping()

    def channel(self, router_id: str) -> str:
        """Where a router is told of its requests."""
        return f"{self._namespace}:admission-word:{router_id}"

    def _facts(self, ticket: Ticket) -> list[object]:
        return [
            ticket.id,
            ticket.tenant,
            ticket.lane,
            ticket.work,
            ticket.weight,
            ticket.recalls,
        ]

    def _ask(self, model: str, op: str, *args: object) -> Coroutine[Any, Any, Reply]:
        self._before()
        return self._call(model, op, *args)

    def _call(self, model: str, op: str, *args: object) -> Coroutine[Any, Any, Reply]:
        settings = self._settings
        common = [self._capacity(model), settings.slot_lease_s, settings.ageing_s]
        recalls = [settings.recall_after_s, settings.max_recalls]
        called = self._script(
            [self._root + model + "}"],
            [op, self._router_id, self.channel(""), *common, *recalls, *args],
        )
        return self._reply(model, called)

    async def _reply(self, model: str, called: "asyncio.Future[str]") -> Reply:
        said = await called
        granted, displaced, recalled, advice, held, waiting, first, second = json.loads(said)
        self._hear(model, held, waiting)
        return Reply(granted, displaced, recalled, float(advice), first, second)
