"""Batches in Redis (batches.lua), as a gateway calls it."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import grpc
import orjson

from services.common.config import JobsSettings
from services.common.errors import PenstockError, invalid
from services.common.redis import Redis
from services.common.script_line import ScriptLine
from services.gateway.batches.record import Batch, BatchRecord, Ending, Fault
from services.gateway.ids import BATCH, not_found

SOURCE = Path(__file__).with_name("batches.lua").read_text()


class Answered(NamedTuple):
    """A line's place in the file, from 0 on, and what it came to: a line of JSON."""

    line: int
    file: Literal["output", "error"]
    text: str


class BatchStore:
    """Every call may be carried out twice, which is the same as once. Raises one of `RedisAway`."""

    def __init__(self, redis: Redis, namespace: str, settings: JobsSettings) -> None:
        self._redis = redis
        self._line = ScriptLine(redis, SOURCE)
        self._root = f"{namespace}:{{files}}"
        self._settings = settings

    async def create(self, record: BatchRecord) -> None:
        """Raises INVALID_ARGUMENT for a file that is not the tenant's or for something else, and
        RESOURCE_EXHAUSTED ("too_many_batches")."""
        own, file = self._settings, record.input_file_id
        text = record.model_dump_json(exclude_none=True)
        place = (record.who.tenant, record.id)
        what = await self._call("create", *place, text, file, own.kept, own.max_unfinished)
        if what == "no_file":
            raise not_found("file", file, "input_file_id")
        if what == "wrong_file":
            raise wrong_purpose(file)
        if what:
            raise too_many(own.max_unfinished)

    async def begin(self, tenant: str, id: str, total: int) -> str:
        """It is valid, with so many lines; the status that it has now."""
        return str(await self._call("begin", tenant, id, total))

    async def refuse(self, tenant: str, id: str, faults: Sequence[Fault]) -> None:
        """It is not valid."""
        await self._call("refuse", tenant, id, _errors(faults))

    async def stop(self, tenant: str, id: str, into: Ending, faults: Sequence[Fault] = ()) -> str:
        """It ends as `into` once nothing of it is under way; the status that it has now."""
        return str(await self._call("stop", tenant, id, into, _errors(faults)))

    async def answer(self, tenant: str, id: str, answers: Sequence[Answered]) -> bool:
        """Whether all lines have been answered with these, so that it is completed."""
        told = [field for one in answers for field in one]
        return bool(await self._call("answer", tenant, id, *told))

    async def finish(self, tenant: str, id: str) -> str:
        """One that was stopped ends; what as, or empty where it had ended before."""
        return str(await self._call("finish", tenant, id))

    # ---- looking ----------------------------------------------------------------------------

    async def find(self, tenant: str, id: str) -> Batch:
        """Raises NOT_FOUND."""
        if BATCH.fits(id):
            async with self._redis.pipeline(transaction=True) as both:
                both.hget(self._key(tenant, "batches"), id)
                both.hgetall(self._key(tenant, "batch", id))
                record, state = await both.execute()
            if record and state:
                return Batch(BatchRecord.model_validate_json(record), state)
        raise not_found("batch", id)

    async def answered(self, tenant: str, id: str, line: int) -> bool:
        key = self._key(tenant, "batch", id, "answered")
        return bool(await self._redis.getbit(key, line))

    async def some(self, tenant: str, ids: Sequence[str]) -> list[Batch]:
        """Those of them that there are."""
        found = []
        for id in ids:
            with suppress(PenstockError):  # gone a moment ago
                found.append(await self.find(tenant, id))
        return found

    async def ids(self, tenant: str) -> list[str]:
        return [str(id) for id in await self._redis.hkeys(self._key(tenant, "batches"))]

    async def unfinished(self, tenant: str) -> int:
        return int(await self._redis.scard(self._key(tenant, "batches", "open")))

    async def inputs_in_use(self, tenant: str) -> set[str]:
        """Of those that have not ended."""
        ids = list(await self._redis.smembers(self._key(tenant, "batches", "open")))
        records: Any = await self._redis.hmget(self._key(tenant, "batches"), ids) if ids else []
        return {orjson.loads(record)["input_file_id"] for record in records if record}

    def _key(self, *parts: str) -> str:
        return ":".join((self._root, *parts))

    async def _call(self, op: str, *args: Any) -> Any:
        return await self._line([self._root], [op, *args])


def wrong_purpose(file: str) -> PenstockError:
    message = f"The file '{file}' is not of purpose 'batch'."
    return invalid(message, "input_file_id", stage="gateway", reason="wrong_purpose")


def too_many(most: int) -> PenstockError:
    return PenstockError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"A tenant may have {most} batches under way; wait for one to end, or cancel it.",
        stage="gateway",
        reason="too_many_batches",
        retry_after_s=60.0,
    )


def _errors(faults: Sequence[Fault]) -> str:
    return orjson.dumps([fault.model_dump() for fault in faults]).decode() if faults else ""
