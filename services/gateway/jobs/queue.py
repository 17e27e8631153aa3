"""Queues of durable jobs in Redis (queue.lua), as a gateway calls them."""

import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from services.common.redis import Redis
from services.common.script_line import ScriptLine

SOURCE = Path(__file__).with_name("queue.lua").read_text()
DEAD_KEPT = 10_000
KINDS = {
    "line": "lines of batches",
    "batch": "batches: their beginnings and ends",
    "index": "files to be indexed",
    "remove": "files and vector stores to be taken out, where a gateway was lost over it",
    "cancel": "batches of files to be cancelled, likewise",
    "attributes": "attributes of files to be set where searches look, likewise",
    "reindex": "vector stores whose files another embedding model has indexed, to be so anew",
    "expire": "vector stores that end when nobody has used them for long",
}
"""Of jobs, and what they are."""
_AT_ONCE = 500  # jobs in one call
SHAPE = 2
"""Of what is stored of jobs. It is one more as soon as a gateway before could not read, or would
ignore, what is new in any kind's: such a gateway leaves them to others. Since 2 files that jobs are
about may lie in the blob store: who looks in Redis alone would say that they are gone."""
_TEXT = re.compile(r"(\d+)(?:\+(\d+))?:(.*)", re.DOTALL)


class Queue(NamedTuple):
    """`kind`: what is to be done with its jobs. No part of its name has a colon."""

    kind: str
    tenant: str
    name: str


class Claimed(NamedTuple):
    """One job that this gateway has. `claims`: how often somebody has had it and not said what
    became of it, this time included; `left`: how often somebody could not read it."""

    queue: Queue
    id: str
    body: str
    claims: int
    shape: int = SHAPE
    left: int = 0


class Dead(NamedTuple):
    """A job that nobody will try again, and why."""

    id: str  # its time in milliseconds since 1970, a dash, a number
    queue: Queue
    body: str
    why: str

    @property
    def at_s(self) -> int:
        """Unix seconds."""
        return int(self.id.partition("-")[0]) // 1000

    def as_told(self) -> dict[str, Any]:
        return {
            "object": "dead_job",
            "id": self.id,
            "at": self.at_s,
            "kind": self.queue.kind,
            "tenant": self.queue.tenant,
            "queue": self.queue.name,
            "job": self.body,
            "why": self.why,
        }


class Queues:
    """Every call may be carried out twice; of `add` there are two jobs then. Raises one of
    `RedisAway`."""

    def __init__(self, redis: Redis, namespace: str, owner: str, lease_s: float) -> None:
        self._redis = redis
        self._line = ScriptLine(redis, SOURCE)
        self._root = f"{namespace}:{{jobs}}"
        self._owner = owner
        self._lease_ms = round(lease_s * 1000)
        self.shape = SHAPE

    async def fill(self, queue: Queue, jobs: Sequence[str]) -> None:
        """All jobs of a queue that nobody claims from yet; to do it again changes nothing."""
        for first in range(0, len(jobs), _AT_ONCE):
            some = [self._text(job) for job in jobs[first : first + _AT_ONCE]]
            await self._call("fill", *queue, first + 1, *some)

    async def open(self, queue: Queue) -> None:
        """From here on it is claimed from."""
        await self._call("open", *queue)

    async def add(self, queue: Queue, *jobs: str, delay_s: float = 0.0) -> None:
        for first in range(0, len(jobs), _AT_ONCE):
            some = [self._text(job) for job in jobs[first : first + _AT_ONCE]]
            await self._call("add", *queue, _micros(delay_s), *some)

    async def hasten(self, queue: Queue, *jobs: str) -> None:
        """They are to be done now: of some with a delay."""
        now = {self._text(job): 0 for job in jobs}
        await self._redis.zadd(self._key("later", *queue), now, xx=True)

    async def put_off(self, queue: Queue, job: str, delay_s: float) -> None:
        """It is to be done so long after now, unless somebody has it already: of one with a
        delay."""
        await self._call("put_off", *queue, _micros(delay_s), self._text(job))

    async def withdraw(self, queue: Queue, job: str) -> None:
        """It is not to be done after all, unless somebody has it already: of one with a delay."""
        await self._redis.zrem(self._key("later", *queue), self._text(job))

    async def claim(self, kind: str, has: Mapping[str, int] = {}) -> Claimed | None:
        """`has`: how many jobs of the kind each tenant has under way here."""
        parts = [told for tenant, count in has.items() for told in (tenant, count)]
        told = await self._call("claim", kind, self._owner, self._lease_ms, *parts)
        if not told:
            return None
        tenant, name, id, text, claims = told
        shape, left, body = _read(text)
        return Claimed(Queue(kind, tenant, name), id, body, int(claims), shape, left)

    async def renew(self, job: Claimed) -> bool:
        """Whether it is still this gateway's."""
        return bool(await self._call("renew", *job.queue, job.id, self._owner) == "ok")

    async def done(self, job: Claimed) -> None:
        await self._call("done", *job.queue, job.id)

    async def later(self, job: Claimed, body: str, delay_s: float) -> None:
        """It is to be done after a while, as `body` says."""
        await self._later(job, self._text(body), delay_s)

    async def leave(self, job: Claimed, for_s: float) -> None:
        """It is as it was, after a while: for somebody who can read it."""
        await self._later(job, self._text(job.body, job.shape, job.left + 1), for_s)

    async def _later(self, job: Claimed, text: str, delay_s: float) -> None:
        await self._call("later", *job.queue, job.id, self._owner, text, _micros(delay_s))

    async def release(self, job: Claimed) -> None:
        """Another gateway may have it at once, as if this one had not had it."""
        await self._call("release", *job.queue, job.id, self._owner)

    async def pause(self, queue: Queue, for_s: float) -> None:
        await self._call("pause", *queue, _micros(for_s))

    async def bury(self, job: Claimed, why: str) -> None:
        await self._call("bury", *job.queue, job.id, self._owner, job.body, why, DEAD_KEPT)

    async def close(self, queue: Queue) -> int:
        """Nobody claims from it any more; how many are under way."""
        return int(await self._call("close", *queue, self._lease_ms))

    async def drop(self, queue: Queue) -> None:
        await self._call("drop", *queue)

    async def size(self, queue: Queue) -> int:
        """How many jobs are in it, those under way included."""
        async with self._redis.pipeline(transaction=True) as both:
            both.xlen(self._key("todo", *queue))
            both.zcard(self._key("later", *queue))
            return int(sum(await both.execute()))

    async def counts(self, kind: str) -> tuple[int, int]:
        """Waiting, under way."""
        waiting, running = await self._call("counts", kind)
        return int(waiting), int(running)

    async def rest(self, queue: Queue) -> AsyncIterator[list[str]]:
        """What is left in it and can be read, some at a time."""
        at = "-"
        while True:
            found: Any = await self._redis.xrange(self._key("todo", *queue), at, count=_AT_ONCE)
            if not found:
                break
            yield self._readable(fields["j"] for _, fields in found)
            at = f"({found[-1][0]}"
        due = await self._redis.zrange(self._key("later", *queue), 0, -1)
        for first in range(0, len(due), _AT_ONCE):
            yield self._readable(str(text) for text in due[first : first + _AT_ONCE])

    def _readable(self, texts: Iterable[str]) -> list[str]:
        read = [_read(text) for text in texts]
        return [body for shape, _, body in read if shape <= self.shape]

    def _text(self, body: str, shape: int = 0, left: int = 0) -> str:
        """As it is stored."""
        return f"{shape or self.shape}{f'+{left}' if left else ''}:{body}"

    async def dead(self, most: int, before: str = "") -> list[Dead]:
        """The latest first; `before`: the id of the last of the page before."""
        end = f"({before}" if before else "+"
        found: Any = await self._redis.xrevrange(self._key("dead"), end, "-", count=most)
        return [
            Dead(id, Queue(of["kind"], of["tenant"], of["queue"]), of["job"], of["why"])
            for id, of in found
        ]

    async def count_dead(self) -> int:
        return int(await self._redis.xlen(self._key("dead")))

    def _key(self, *parts: str) -> str:
        return ":".join((self._root, *parts))

    async def _call(self, op: str, *args: Any) -> Any:
        return await self._line([self._root], [op, *args])


def _read(text: str) -> tuple[int, int, str]:
    """Its shape, how often it was left, its body. What has no number is from before there were
    any."""
    if found := _TEXT.fullmatch(text):
        return int(found[1]), int(found[2] or 0), found[3]
    return 1, 0, text


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)
