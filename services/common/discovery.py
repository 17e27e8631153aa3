"""The registry of replicas in Redis: each holds a lease, each caller watches the next service.

A replica that stops renewing disappears after its lease. While Redis is away the last view stands;
when it comes back empty, replicas have one lease's time to appear again before they are dropped.
"""

import asyncio
import json
import logging
import re
import secrets
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter

from services.common.redis import Redis, RedisAway, RedisError, Script
from services.common.script_line import ScriptLine
from services.common.telemetry.metrics import REDIS_REACHABLE

log = logging.getLogger(__name__)

# Expiry by Redis's own clock: the replicas' clocks may differ.
_RENEW = """
if ARGV[4] and redis.call('HGET', KEYS[2], ARGV[1]) == ARGV[4] then return 0 end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
return 1
"""
# The first write changes nothing: where Redis refuses the renewals (it is full, or read-only), it
# must refuse the look as well, which would else see one lease after the other run out.
_LIST = """
redis.call('ZADD', KEYS[1], 'XX', 0, '')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local dead = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now)
if #dead > 0 then
  redis.call('ZREM', KEYS[1], unpack(dead))
  redis.call('HDEL', KEYS[2], unpack(dead))
end
local ids = redis.call('ZRANGE', KEYS[1], 0, -1)
if #ids == 0 then return {} end
return redis.call('HMGET', KEYS[2], unpack(ids))
"""
_LEAVE = """
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
return 1
"""
# Whatever Redis answers, these loops must go on: a lease that is no longer renewed takes a healthy
# replica away, and a view that is no longer looked at grows stale without a word.
_NOT_NOW = (*RedisAway, RedisError)


SERVICES = ("gateway", "retrieval", "tokenizer", "router", "worker")
DRAINING = "draining"  # listed under it, instead of their service's name, are replicas that drain
REPLICA_ID = re.compile(rf"\b({'|'.join(SERVICES)})-[0-9a-f]{{8}}\b")


def new_replica_id(service: str) -> str:
    """Of one replica's life; REPLICA_ID is the shape."""
    return f"{service}-{secrets.token_hex(4)}"


def machine_id() -> str:
    """Equal for processes that share memory: the kernel's boot id plus the IPC namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/ipc")
    if not boot.exists():
        return f"node-{uuid.getnode():x}"
    return f"{boot.read_text().strip()}/{namespace.readlink() if namespace.exists() else ''}"


def host_id(host: str) -> str:
    """Of a replica whose peers reach it at `host`. Two nodes of a cluster are two hosts, also where
    they have addresses of one machine: what is tried there holds for two machines."""
    return f"{machine_id()}/{host}"


@dataclass(frozen=True)
class Replica:
    """One running replica as its peers see it."""

    service: str  # gateway, retrieval, tokenizer, router, worker
    id: str
    address: str  # host:port of its gRPC server
    host_id: str
    pid: int
    metrics_url: str = ""
    facts: dict[str, str] = field(default_factory=dict)  # the service's own: role, model, url, ...
    version: str = ""  # of Penstock


_records = TypeAdapter(Replica)


def _read(record: str | None) -> Replica | None:
    """A registered record; fields that a newer version added are left out, junk is None."""
    try:
        return _records.validate_json(record or "")
    except ValueError:
        log.warning("a record in the registry cannot be read")
        return None


def _keys(namespace: str, service: str) -> list[str]:
    # The braces keep both keys of a service in one slot of a Redis cluster.
    return [f"{namespace}:{{registry:{service}}}:leases", f"{namespace}:{{registry:{service}}}"]


async def leave(client: Redis, namespace: str, listed_under: str, id: str) -> None:
    """Takes one entry out of the registry. Raises one of `RedisAway`."""
    await Script(client, _LEAVE)(_keys(namespace, listed_under), [id])


async def end(client: Redis, namespace: str, listed_under: str, id: str, told_s: float) -> None:
    """Says of one entry that it is over, for so long: each view's next look has it, where one that
    is merely gone could be back in a moment, and nobody who held it renews it any more; who begins
    to hold it does. Raises one of `RedisAway`."""
    told = [id, _over(listed_under, id), int(told_s * 1000)]
    await Script(client, _RENEW)(_keys(namespace, listed_under), told)


def _over(listed_under: str, id: str) -> str:
    """The record of an entry that is over: it has no facts."""
    return json.dumps(asdict(Replica(listed_under, id, address="", host_id="", pid=0)))


class Registration:
    """Keeps one replica's lease alive, three renewals a lease, until `stop`.

    It is listed under its service, or where it is not to be found by callers, `under` a name.
    `outlives_loss_s`, `outlives_stop_s`: how long the entry stays after its last renewal if the
    replica is lost, and after `stop`.
    """

    def __init__(
        self,
        client: Redis,
        namespace: str,
        replica: Replica,
        lease_s: float,
        under: str = "",
        outlives_loss_s: float = 0.0,
        outlives_stop_s: float = 0.0,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._under = under or replica.service
        self._renew = Script(client, _RENEW)
        self._keys = _keys(namespace, self._under)
        self._replica = replica
        self._lease_s = lease_s
        self._outlives_loss_s = max(lease_s, outlives_loss_s)
        self._outlives_stop_s = outlives_stop_s
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Registers now if Redis answers; renewing goes on in the background either way."""
        await self._write(self._outlives_loss_s, anew=True)
        self._task = asyncio.create_task(self._loop(), name=f"lease {self._replica.id}")

    async def stop(self) -> None:
        """Leaves the registry, at once unless the entry outlives it."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        if self._outlives_stop_s:
            return await self._write(self._outlives_stop_s)
        try:
            await leave(self._client, self._namespace, self._under, self._replica.id)
        except _NOT_NOW as away:
            log.warning("could not leave the registry, the lease will run out: %s", away)

    async def _loop(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            await self._once()

    async def tell(self, facts: dict[str, str]) -> None:
        """Replaces the facts, now if Redis answers. Who watches sees the entry go and come."""
        self._replica = replace(self._replica, facts=facts)
        if self._task is not None:
            await self._once()

    async def _once(self) -> None:
        await self._write(self._outlives_loss_s)

    async def _write(self, stays_s: float, anew: bool = False) -> None:
        told = [self._replica.id, json.dumps(asdict(self._replica)), int(stays_s * 1000)]
        if not anew:
            told.append(_over(self._under, self._replica.id))
        try:
            await self._renew(self._keys, told)
            REDIS_REACHABLE.set(1)
        except _NOT_NOW as away:
            REDIS_REACHABLE.set(0)
            log.warning("lease not renewed, Redis is away: %s", away)


class Directory:
    """A live view of one service's replicas.

    `on_change(added, removed)` runs on the event loop whenever the view changes; a replica that
    registers again under its id with another address counts as removed and added.
    """

    def __init__(
        self,
        client: Redis,
        namespace: str,
        service: str,
        lease_s: float,
        on_change: Callable[[list[Replica], list[Replica]], None] | None = None,
    ) -> None:
        self._rounds = _Rounds.of(client)
        self._list = self._rounds.list
        self._keys = _keys(namespace, service)
        self._service = service
        self._lease_s = lease_s
        self._on_change = on_change
        self._seen: dict[str, float] = {}  # id → when last listed, monotonic
        self._changed = asyncio.Event()
        self._over = False
        self.replicas: dict[str, Replica] = {}
        self.reachable = False  # whether the last look at Redis succeeded

    async def start(self) -> None:
        self._over = False
        await self.refresh()
        self._rounds.join(self, self._lease_s / 6)

    async def stop(self) -> None:
        self._over = True
        await self._rounds.leave(self)

    async def changed(self) -> None:
        """Returns after the next change of the view."""
        self._changed.clear()
        await self._changed.wait()

    async def refresh(self) -> None:
        """Looks once, now."""
        try:
            records = await self._list(self._keys)
        except _NOT_NOW as away:
            if self.reachable and not self._over:
                log.warning(
                    "the view of %s stands as it was, Redis is away: %s", self._service, away
                )
            self.reachable = False
            return
        if self._over:
            return
        if not self.reachable:  # back, perhaps empty: everyone has one lease to register again
            self._seen = dict.fromkeys(self._seen, time.monotonic())
        self.reachable = True
        self._apply([replica for record in records if (replica := _read(record)) is not None])

    def _apply(self, listed: list[Replica]) -> None:
        now = time.monotonic()
        fresh = {r.id: r for r in listed}
        self._seen.update(dict.fromkeys(fresh, now))
        kept = {
            id: old
            for id, old in self.replicas.items()
            if id not in fresh and self._in_grace(id, now)
        }
        before, self.replicas = self.replicas, {**kept, **fresh}
        added = [r for id, r in self.replicas.items() if before.get(id) != r]
        removed = [r for id, r in before.items() if self.replicas.get(id) != r]
        self._seen = {id: at for id, at in self._seen.items() if id in self.replicas}
        if added or removed:
            self._changed.set()
            if self._on_change is not None:
                self._on_change(added, removed)

    def _in_grace(self, id: str, now: float) -> bool:
        # A listing that lacks a replica seen moments ago is news of its leaving, unless Redis
        # itself just restarted; one lease of patience covers both at little cost, because links
        # to a replica that has really gone notice by themselves.
        return now - self._seen.get(id, 0.0) < self._lease_s


class _Rounds:
    """All views of one process look at the same moments, and so in one round trip to Redis. A
    process wakes for its views twice a second, for ever: that is time which engines lack."""

    def __init__(self, client: Redis) -> None:
        self.list = ScriptLine(client, _LIST)
        self._views: dict[float, set[Directory]] = defaultdict(set)  # by the time between two looks
        self._tasks: dict[float, asyncio.Task[None]] = {}

    @classmethod
    def of(cls, client: Redis) -> "_Rounds":
        """The client's, for as long as it lives: they have one of its connections."""
        own: dict[str, _Rounds] = vars(client)
        if (rounds := own.get("rounds")) is None:
            rounds = own["rounds"] = cls(client)
        return rounds

    def join(self, view: Directory, every_s: float) -> None:
        self._views[every_s].add(view)
        if every_s not in self._tasks:
            round_ = self._run(every_s)
            self._tasks[every_s] = asyncio.create_task(round_, name="registry views")

    async def leave(self, view: Directory) -> None:
        """The last one ends the rounds."""
        for every_s, views in list(self._views.items()):
            views.discard(view)
            if not views and (task := self._tasks.pop(every_s, None)):
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _run(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            looks = [view.refresh() for view in self._views[every_s]]
            for failed in await asyncio.gather(*looks, return_exceptions=True):
                if isinstance(failed, Exception):
                    log.error("a view of the registry failed", exc_info=failed)
