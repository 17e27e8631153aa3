"""Lines of batches, one after the other as they are claimed: a kind of jobs."""

from dataclasses import replace
from typing import Literal

import grpc
import orjson

from services.common.errors import PenstockError
from services.common.redis import RedisAway
from services.gateway import metrics
from services.gateway.api.rest.http import error_body, http_status, internal
from services.gateway.batches.answering import Reply, answer, line_id, request_id
from services.gateway.batches.record import Batch, BatchRecord, Fault
from services.gateway.batches.store import Answered
from services.gateway.batches.validation import Entry
from services.gateway.identity.principal import Principal, Refused
from services.gateway.ids import not_found
from services.gateway.jobs.jobs import Dead, Later, backoff_s
from services.gateway.jobs.queue import Claimed
from services.gateway.jobs.window import Window
from services.gateway.parts import Gateway

LINE = "line"
_STOPPED_S = 1.0  # by then nobody claims from it any more
_FULL_S = 10.0  # between two looks whether a full tenant has room again
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
_FINAL = frozenset({"insufficient_quota"})
"""What a line waits for no longer than an interactive request."""
_LOSSES = frozenset({"engine_died", "engine_killed", "peer_stalled", "peer_lost", "broken_off"})
"""How workers are lost over a request, more often than the router tries another: it may be why."""
_OWN_LIMIT = "rate_limit_exceeded"  # which tells nothing of the room for others' lines


class Lines:
    """jobs.Kind."""

    name = LINE

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._settings = gateway.settings.jobs
        self.places = Window(self._settings.in_flight)

    async def run(self, job: Claimed) -> None:
        batches, entry = self._gateway.batches, Entry.of(job.body)
        tenant, id = job.queue.tenant, job.queue.name
        batch = await self._batch(tenant, id)
        if batch is None or batch.ended or await batches.store.answered(tenant, id, entry.line):
            return
        if batch.into:
            raise Later(job.body, _STOPPED_S)  # it is left to who ends the batch
        principal = await self._principal(batch.record, job)
        if not await self._gateway.files.has_room(tenant):
            raise Later(job.body, _FULL_S, pauses=True)
        try:
            reply = await self._answered(batch.record, entry, principal)
        except RedisAway:
            raise
        except PenstockError as error:
            reply = self._failed(batch.record, entry, error)
        await self._tell(batch.record, entry, reply)

    async def give_up(self, job: Claimed, why: str) -> None:
        """The line's answer is that it has none."""
        batch, entry = await self._batch(job.queue.tenant, job.queue.name), Entry.of(job.body)
        if batch is not None:
            told = unanswered(batch.record, entry, "server_error", why)
            await self._note(batch.record, told)

    async def _batch(self, tenant: str, id: str) -> Batch | None:
        try:
            return await self._gateway.batches.store.find(tenant, id)
        except PenstockError:  # its record is gone
            return None

    async def _principal(self, batch: BatchRecord, job: Claimed) -> Principal:
        """Who made the batch, as he stands now, in the low lane. One who holds no more ends it."""
        try:
            principal = await self._gateway.identity.standing.of(batch.who)
        except Refused as refused:
            fault = Fault(code="invalid_api_key", message=str(refused))
            await self._gateway.batches.stop(batch.who.tenant, batch.id, "failed", [fault])
            raise Later(job.body, _STOPPED_S) from None
        return replace(principal, priority="low")

    async def _answered(self, batch: BatchRecord, entry: Entry, principal: Principal) -> Reply:
        tenant, files = batch.who.tenant, self._gateway.files
        line = await files.piece(tenant, batch.input_file_id, entry.at, entry.size)
        if not line:
            raise not_found("file", batch.input_file_id, "input_file_id")
        try:
            reply = await answer(self._gateway, batch, entry, line, principal)
        except (PenstockError, *RedisAway):
            raise
        except Exception:
            raise internal() from None
        journal = self._gateway.records.find(reply.request_id, tenant)
        if journal is not None:
            self.places.went(batch.id, journal.admission_s, journal.pace_s)
            metrics.jobs_window.set(self.places.size)
        return reply

    def _failed(self, batch: BatchRecord, entry: Entry, error: PenstockError) -> Reply:
        """The reply that says so. Raises Later, or Dead."""
        deadly = error.stage == "worker" and error.reason in _LOSSES
        if error.code in _AWAY and error.reason not in _FINAL and not deadly:
            if error.reason != _OWN_LIMIT:
                self.places.push_back()
            waits = entry.waits + 1
            delay_s = error.retry_after_s or backoff_s(self._settings.backoff_s, waits)
            raise Later(entry._replace(waits=waits).body(), delay_s, pauses=True)
        status = http_status(error)
        if status >= 500:
            tries = entry.tries + 1
            if tries >= self._settings.tries:
                raise Dead(f"failed {tries} times, at last: {error.message}")
            delay_s = backoff_s(self._settings.backoff_s, tries)
            raise Later(entry._replace(tries=tries).body(), delay_s)
        return Reply(status, request_id(batch, entry), error_body(error))

    async def _tell(self, batch: BatchRecord, entry: Entry, reply: Reply) -> None:
        told = {
            "id": line_id(batch, entry.line),
            "custom_id": entry.custom_id,
            "response": {
                "status_code": reply.status,
                "request_id": reply.request_id,
                "body": reply.body,
            },
            "error": None,
        }
        file: Literal["output", "error"] = "output" if reply.status < 400 else "error"
        await self._note(batch, Answered(entry.line, file, _json_line(told)))

    async def _note(self, batch: BatchRecord, answered: Answered) -> None:
        if await self._gateway.batches.store.answer(batch.who.tenant, batch.id, [answered]):
            metrics.batches.labels("completed").inc()
            await self._gateway.batches.over(batch.who.tenant, batch.id)


def unanswered(batch: BatchRecord, entry: Entry, code: str, message: str) -> Answered:
    told = {
        "id": line_id(batch, entry.line),
        "custom_id": entry.custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return Answered(entry.line, "error", _json_line(told))


def _json_line(told: object) -> str:
    return orjson.dumps(told, option=orjson.OPT_APPEND_NEWLINE).decode()
