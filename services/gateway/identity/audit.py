"""Who changed what: the audit log, and the one way in which what is granted is changed.

    {ns}:{identity}:audit          stream   a change each; its id begins with the Unix time in ms
    {ns}:{identity}:audit:<what>   stream   the ids of those about that; it goes with the latest

A change and its line are one function: there is neither without the other. Nothing takes a line
away but its age (`kept_s`), in the function that adds one. Each is also a line of the gateway's log
that made it, for whoever keeps those where Redis' owner cannot reach them.
"""

import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from services.common.redis import Redis, Script

log = logging.getLogger(__name__)

T = TypeVar("T")

_TRIES = 5  # of a change that another one came before
KEPT_S = 400 * 86_400

# KEYS: the log, what it has of this; then each change's hash. ARGV: all of it as JSON, seconds to
# keep lines, by Redis' own clock: that of a gateway which is years ahead would leave none. Returns
# 0 where something is no more as it was taken to be, -1 where a hash is full, and does nothing
# then. The line comes first: where it cannot be written (no memory, no disk), nothing is.
_CHANGE = """
local asked = cjson.decode(ARGV[1])
for i, change in ipairs(asked.changes) do
  if (redis.call('HGET', KEYS[i + 2], change.field) or '') ~= (change.before or '') then
    return 0
  end
  if change.most and redis.call('HLEN', KEYS[i + 2]) >= change.most then return -1 end
end
local oldest = string.format('%.0f', math.max(0, redis.call('TIME')[1] - ARGV[2]) * 1000)
local id = redis.call('XADD', KEYS[1], 'MINID', oldest, '*', unpack(asked.line))
redis.call('XADD', KEYS[2], 'MINID', oldest, id, 'of', 'log')
redis.call('EXPIRE', KEYS[2], ARGV[2])
for i, change in ipairs(asked.changes) do
  if change.after and change.after ~= change.before then
    redis.call('HSET', KEYS[i + 2], change.field, change.after)
  elseif not change.after then
    redis.call('HDEL', KEYS[i + 2], change.field)
  end
end
for _, message in ipairs(asked.news) do
  redis.call('PUBLISH', asked.channel, message)
end
return 1
"""


class Actor(NamedTuple):
    """Who changes something, and from where."""

    who: str
    source: str = ""


DIRECT = Actor("direct")  # by whoever has Redis' password, without a command of ours


class Act(NamedTuple):
    """What is done: for the log. `before` and `after` are what changes of it, as JSON."""

    by: Actor
    action: str  # "key.revoke"
    what: str  # "key_12ab…", "tenant:acme"
    before: Any = None
    after: Any = None


class Change(NamedTuple):
    """One field of a hash. None: it is not there; `before` and `after` alike: it shall stay so."""

    hash: str
    field: str
    before: str | None
    after: str | None
    most: int | None = None
    """Of the hash's fields before it; None: however many."""


@dataclass(frozen=True)
class Line:
    """One of the log's."""

    id: str
    at: float  # Unix seconds
    who: str
    source: str
    action: str
    what: str
    before: Any
    after: Any


class Conflict(Exception):
    """What was to be changed has changed meanwhile."""


class Full(Exception):
    """A hash has as many fields as it may."""


class AuditLog:
    """Raises `RedisAway` when Redis is away."""

    def __init__(self, redis: Redis, namespace: str, kept_s: float = KEPT_S) -> None:
        self._redis = redis
        self._stream = f"{namespace}:{{identity}}:audit"
        self._kept_s = kept_s
        self._change = Script(redis, _CHANGE)

    async def change(
        self, act: Act, changes: Sequence[Change], channel: str = "", news: Sequence[str] = ()
    ) -> None:
        """All changes and the line, or nothing. Raises Conflict, Full."""
        line = {
            "who": act.by.who,
            "source": act.by.source,
            "action": act.action,
            "what": act.what,
            "before": json.dumps(act.before),
            "after": json.dumps(act.after),
        }
        told = [
            {name: value for name, value in change._asdict().items() if value is not None}
            for change in changes
        ]
        asked = {
            "changes": told,
            "line": [part for field in line.items() for part in field],
            "channel": channel,
            "news": list(news),
        }
        keys = [self._stream, self._about(act.what), *(change.hash for change in changes)]
        done = await self._change(keys, [json.dumps(asked), round(self._kept_s)])
        if done == -1:
            raise Full
        if not done:
            raise Conflict
        log.info("audit: %s %s by %s %s", act.action, act.what, *act.by, extra={"audit": line})

    async def note(self, act: Act) -> None:
        """A line for what changes nothing here."""
        await self.change(act, ())

    async def read(self, limit: int, before: str = "", what: str = "") -> list[Line]:
        """The latest first; those before the line with the id `before`; of `what` alone."""
        newest = f"({before}" if before else "+"
        stream = self._about(what) if what else self._stream
        found: list[Any] = await self._redis.xrevrange(stream, newest, "-", count=limit)  # type: ignore[assignment]
        if what:
            async with self._redis.pipeline(transaction=False) as each:
                for id, _ in found:
                    each.xrange(self._stream, id, id)
                found = [line for lines in await each.execute() for line in lines]
        return [_line(id, fields) for id, fields in found]

    def _about(self, what: str) -> str:
        return f"{self._stream}:{what}"


async def until_first(attempt: Callable[[], Awaitable[T]]) -> T:
    """Anew while others' changes come first. Raises Conflict when they always do."""
    for _ in range(_TRIES - 1):
        with suppress(Conflict):
            return await attempt()
    return await attempt()


def differing(before: dict[str, Any], after: dict[str, Any]) -> tuple[Any, Any]:
    """Of two records what differs."""
    names = [name for name in before | after if before.get(name) != after.get(name)]
    return {name: before.get(name) for name in names}, {name: after.get(name) for name in names}


def _line(id: str, fields: dict[str, str]) -> Line:
    told = {name: fields[name] for name in ("who", "source", "action", "what")}
    before, after = json.loads(fields["before"]), json.loads(fields["after"])
    return Line(id, int(id.partition("-")[0]) / 1000, **told, before=before, after=after)
