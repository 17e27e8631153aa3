"""Runs in Redis (runs.lua), as a gateway calls it."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from protos.runs_pb2 import RunEvent, StoredRun
from services.common.config import RunsSettings
from services.common.redis import Redis
from services.common.script_line import ScriptLine
from services.gateway.runs.lasting.stored import events_of, run_of

SOURCE = Path(__file__).with_name("runs.lua").read_text()
_AT_ONCE = 200  # entries of a stream in one read

Verdict = Literal["ok", "lost", "cancelled", "full"]
Place = tuple[str, str]
"""Whose run: tenant and id."""


class Hold(NamedTuple):
    """A run as its owner has it. Whoever takes it over has it by another epoch."""

    tenant: str
    id: str
    epoch: int = 1

    @property
    def place(self) -> Place:
        return self.tenant, self.id


class Entry(NamedTuple):
    """One write of a run: its number, from 1 on."""

    seq: int
    events: Sequence[RunEvent]
    size: int  # bytes, as stored


class Page(NamedTuple):
    entries: list[Entry]
    exists: bool
    more: bool  # there may be, behind these

    @property
    def events(self) -> list[RunEvent]:
        return [event for entry in self.entries for event in entry.events]


class RunStore:
    """Every call may be carried out twice, which is the same as once. Raises one of `RedisAway`.

    A run has one owner, who alone may write: what a gateway writes that was taken for dead is not
    taken ("lost")."""

    def __init__(self, redis: Redis, namespace: str, owner: str, settings: RunsSettings) -> None:
        self._redis = redis
        self._line = ScriptLine(redis, SOURCE)
        self.root = f"{namespace}:{{runs}}"
        self._owner = owner
        own = settings
        lease = round(own.lease_s * 1e6)
        self._bounds = (round(own.kept_s), own.kept, own.max_bytes_per_tenant, lease)

    async def begin(
        self,
        place: Place,
        body: str,
        name: str,
        digest: str,
        *,
        resumes: bool = False,
        about: str = "",
    ) -> list[str]:
        """["begun", id], which is this gateway's by the first epoch, ["same", another's id],
        ["other"], ["full"], or ["none"] where `resumes` goes on with one that is not there; `name`:
        an idempotency key's hash, or empty; `about`: of one that lists tell of. Until the first
        write of it nobody else runs it: left alone it is dropped."""
        told = (body, name, digest, int(resumes), about)
        return list(await self._call("begin", *place, self._owner, *told))

    async def add(
        self, hold: Hold, seq: int, events: str, ids: Mapping[int, Sequence[int]]
    ) -> Verdict:
        """Its write number `seq`. `ids`: tokens of answers, by their index."""
        told = [piece for index, of in ids.items() for piece in (index, _as_text(of))]
        verdict: Verdict = await self._call("add", *hold, seq, events, *told)
        return verdict

    async def seal(self, hold: Hold) -> Verdict:
        """Its answer is whole: from here on it is not cancelled."""
        verdict: Verdict = await self._call("seal", *hold)
        return verdict

    async def finish(self, hold: Hold, seq: int, events: str) -> Verdict | Literal["gone"]:
        """Its last write: the answer is whole. "gone": it was deleted, perhaps behind this very
        write."""
        verdict: Verdict | Literal["gone"] = await self._call("finish", *hold, seq, events)
        return verdict

    async def fail(self, hold: Hold, events: str) -> Verdict:
        """Its last write, whichever number it has; a retry of the request is a new run."""
        verdict: Verdict = await self._call("fail", *hold, events)
        return verdict

    async def refuse(self, hold: Hold, events: str) -> None:
        """It was not let in. Those who wait for it under its idempotency key hear `events`; without
        any it was never there."""
        await self._call("refuse", *hold, events)

    async def renew(self, hold: Hold) -> Verdict:
        verdict: Verdict = await self._call("renew", *hold)
        return verdict

    async def release(self, hold: Hold, after_s: float = 0.0) -> None:
        await self._call("release", *hold, round(after_s * 1e6))

    async def claim(self) -> tuple[Hold, int] | None:
        """A run whose owner is dead or has left it, and how many owners it has killed."""
        told = await self._call("claim", self._owner)
        return (Hold(told[0], told[1], int(told[2])), int(told[3])) if told else None

    async def keep(self, place: Place, body: str, events: str, about: str = "") -> Verdict:
        """A run that is whole already."""
        verdict: Verdict = await self._call("keep", *place, body, events, about)
        return verdict

    async def cancel(
        self, place: Place, events: str
    ) -> Literal["none", "ended", "sealed", "cancelled"]:
        """Ends what runs, at once: `events` are its last, and its owner writes no more. Nothing of
        what is sealed: that ends soon."""
        verdict: Literal["none", "ended", "sealed", "cancelled"]
        verdict = await self._call("cancel", *place, events)
        return verdict

    async def drop(self, place: Place) -> bool:
        return bool(await self._call("drop", *place))

    async def describe(
        self, place: Place, before: str, after: str
    ) -> Literal["ok", "gone", "changed", "full"]:
        """Tells something else about one that lists tell of, where that is still `before`."""
        outcome: Literal["ok", "gone", "changed", "full"]
        outcome = await self._call("describe", *place, before, after)
        return outcome

    # ---- reading ------------------------------------------------------------------------------

    async def named(self, tenant: str, name: str) -> str:
        """The id of the run that was begun under an idempotency key's hash; empty: there is
        none."""
        return str(await self._redis.get(self._key("name", tenant, name)) or "").partition(" ")[0]

    async def written(self, place: Place) -> AsyncGenerator[RunEvent, None]:
        """All that there is now, from the first on."""
        after, more = 0, True
        while more:
            page = await self.read(place, after)
            for event in page.events:
                yield event
            after, more = page.entries[-1].seq if page.entries else after, page.more

    async def ids(self, tenant: str) -> list[str]:
        """Of all the tenant's, first to last; some may be gone."""
        return list(map(str, await self._redis.zrange(self._key("all", tenant), 0, -1)))

    async def about(self, tenant: str, ids: Sequence[str]) -> list[str | None]:
        """Of each what is told about it; None of what is in no list, or gone."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for id in ids:
                pipe.hget(self._key("run", tenant, id), "about")
            return list(await pipe.execute())

    async def listed(self, tenant: str, ids: Sequence[str]) -> list[tuple[str | None, int]]:
        """As `about`, and bytes that are kept of it beside its request."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for id in ids:
                pipe.hget(self._key("run", tenant, id), "about")
                pipe.hget(self._key("sizes", tenant), id)
                pipe.hstrlen(self._key("run", tenant, id), "body")
            told = await pipe.execute()
        each = zip(told[0::3], told[1::3], told[2::3], strict=True)
        return [(about, int(size or 0) - body) for about, size, body in each]

    async def find(self, place: Place) -> StoredRun | None:
        body = await self._redis.hget(self._key("run", *place), "body")
        return None if body is None else run_of(str(body))

    async def size(self, place: Place) -> int:
        """Bytes that are kept of it: its request, and its events so far."""
        tenant, id = place
        return int(await self._redis.hget(self._key("sizes", tenant), id) or 0)

    async def read(self, place: Place, after: int = 0) -> Page:
        """What was written behind number `after`, some of it at once."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.exists(self._key("run", *place))
            pipe.xrange(self._key("events", *place), min=f"({after}", count=_AT_ONCE)
            exists, entries = await pipe.execute()
        found = [
            Entry(int(number.partition("-")[0]), events_of(fields["e"]), len(fields["e"]))
            for number, fields in entries
        ]
        return Page(found, bool(exists), len(found) == _AT_ONCE)

    async def progress(self, place: Place, answers: int) -> tuple[int, list[list[int]]]:
        """The number of its last write, and the tokens of each answer so far."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hget(self._key("run", *place), "seq")
            for index in range(answers):
                pipe.get(self._key("ids", *place, str(index)))
            seq, *ids = await pipe.execute()
        return int(seq or 0), [[int(id) for id in (of or "").split()] for of in ids]

    def channel(self, place: Place) -> str:
        """Where each write of it is told; see `entry_of`."""
        return self._key("told", *place)

    def _key(self, *parts: str) -> str:
        return ":".join((self.root, *parts))

    async def _call(self, op: str, *args: Any) -> Any:
        return await self._line([self.root], [op, *self._bounds, *args])


def entry_of(message: str) -> Entry | None:
    """Of a run's channel. None: the run is gone."""
    if not message:
        return None
    seq, _, events = message.partition(" ")
    return Entry(int(seq), events_of(events), len(events))


def _as_text(ids: Sequence[int]) -> str:
    return "".join(f"{id} " for id in ids)
