"""Runs in Redis (runs.lua), as a gateway calls it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from protos.runs_pb2 import RunEvent, StoredRun
from services.common.config import RunsSettings
from services.common.redis import Redis
from services.common.script_pipe import ScriptPipe
from services.gateway.runs.lasting.stored import events_of, run_of

SOURCE = Path(__file__).with_name("runs.lua").read_text()
_AT_ONCE = 200  # entries of a stream in one read

Verdict = Literal["ok", "lost", "cancelled", "full"]
Place = tuple[str, str]
"""Whose run: tenant and id."""


class Page(NamedTuple):
    """What of a run's events was read. `after`: where the next read begins."""

    events: list[RunEvent]
    after: str
    exists: bool


class RunStore:
    """Every call may be carried out twice, which is the same as once. Raises one of `RedisAway`.

    A run has one owner, who alone may write: what a gateway writes that was taken for dead is not
    taken ("lost")."""

    def __init__(self, redis: Redis, namespace: str, owner: str, settings: RunsSettings) -> None:
        self._redis = redis
        self._pipe = ScriptPipe(redis, SOURCE)
        self._root = f"{namespace}:{{runs}}"
        self._owner = owner
        own = settings
        lease = round(own.lease_s * 1e6)
        self._bounds = (round(own.kept_s), own.kept, own.max_bytes_per_tenant, lease)

    async def begin(self, place: Place, body: str, name: str, digest: str) -> list[str]:
        """["begun", id], ["same", another's id], ["other"] or ["full"]; `name`: an idempotency
        key's hash, or empty."""
        return list(await self._call("begin", *place, self._owner, body, name, digest))

    async def add(
        self, place: Place, seq: int, events: str, ids: Mapping[int, Sequence[int]]
    ) -> Verdict:
        """Its write number `seq`. `ids`: tokens of answers, by their index."""
        told = [piece for index, of in ids.items() for piece in (index, _as_text(of))]
        verdict: Verdict = await self._call("add", *place, self._owner, seq, events, *told)
        return verdict

    async def finish(self, place: Place, seq: int, events: str, *, forget: bool) -> Verdict:
        """`forget`: a retry of the request is a new run."""
        verdict: Verdict = await self._call("finish", *place, self._owner, seq, events, int(forget))
        return verdict

    async def renew(self, place: Place) -> Verdict:
        verdict: Verdict = await self._call("renew", *place, self._owner)
        return verdict

    async def release(self, place: Place, after_s: float = 0.0) -> None:
        await self._call("release", *place, self._owner, round(after_s * 1e6))

    async def claim(self) -> tuple[Place, int] | None:
        """A run whose owner is dead or has left it, and how many owners it has killed."""
        told = await self._call("claim", self._owner)
        return ((told[0], told[1]), int(told[2])) if told else None

    async def keep(self, place: Place, body: str, events: str) -> Verdict:
        """A run that is whole already."""
        verdict: Verdict = await self._call("keep", *place, body, events)
        return verdict

    async def cancel(self, place: Place) -> Literal["none", "ended", "cancelled"]:
        verdict: Literal["none", "ended", "cancelled"] = await self._call("cancel", *place)
        return verdict

    async def drop(self, place: Place) -> bool:
        return bool(await self._call("drop", *place))

    # ---- reading ------------------------------------------------------------------------------

    async def find(self, place: Place) -> StoredRun | None:
        body = await self._redis.hget(self._key("run", *place), "body")
        return None if body is None else run_of(str(body))

    async def read(self, place: Place, after: str = "-") -> Page:
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.exists(self._key("run", *place))
            pipe.xrange(self._key("events", *place), min=after, count=_AT_ONCE)
            exists, entries = await pipe.execute()
        events = [event for _, fields in entries for event in events_of(fields["e"])]
        return Page(events, f"({entries[-1][0]}" if entries else after, bool(exists))

    async def progress(self, place: Place, answers: int) -> tuple[int, list[list[int]]]:
        """The number of its last write, and the tokens of each answer so far."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hget(self._key("run", *place), "seq")
            for index in range(answers):
                pipe.get(self._key("ids", *place, str(index)))
            seq, *ids = await pipe.execute()
        return int(seq or 0), [[int(id) for id in (of or "").split()] for of in ids]

    def _key(self, *parts: str) -> str:
        return ":".join((self._root, *parts))

    async def _call(self, op: str, *args: Any) -> Any:
        return await self._pipe([self._root], [op, *self._bounds, *args])


def _as_text(ids: Sequence[int]) -> str:
    return "".join(f"{id} " for id in ids)
