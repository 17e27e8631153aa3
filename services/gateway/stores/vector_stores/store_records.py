"""What is kept of tenants' vector stores and of the files in them, in Redis (records.lua).

Several gateways write one record at a time. Each reads it, makes a new one and has it written where
the first is there still; else it begins again. So no change is lost, and none is undone by another.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.common.errors import PenstockError, invalid
from services.common.redis import Redis, Script
from services.gateway import metrics
from services.gateway.ids import FILE, FILE_BATCH, STORE, not_found
from services.gateway.stores.files.storage_room import too_many
from services.gateway.stores.vector_stores.store_files import AttachedFile, Unready
from services.gateway.stores.vector_stores.store_record import (
    Facts,
    FileBatch,
    Store,
    StoreCache,
    StoreRecord,
)

_SOURCE = Path(__file__).with_name("records.lua").read_text()
_NAMED = 5  # files in one warning
_NONE: Mapping[str, str] = {}


def expired(id: str, param: str = "") -> PenstockError:
    message = f"The vector store '{id}' has expired: nothing is in it any more."
    return invalid(message, param, stage="gateway", reason="vector_store_expired")


class StoreRecords:
    """Methods raise `RedisAway` when Redis is away, NOT_FOUND for an unknown id."""

    def __init__(
        self, redis: Redis, namespace: str, max_files: int, max_attribute_bytes: int
    ) -> None:
        """Both are of all stores of a tenant together."""
        self._max_files = max_files
        self._max_attribute_bytes = max_attribute_bytes
        self._redis = redis
        self._namespace = namespace
        self._script = Script(redis, _SOURCE)

    # ---- stores -----------------------------------------------------------------------------

    async def create(self, tenant: str, record: StoreRecord, most: int) -> bool:
        """False: the tenant has as many as may be."""
        told = (record.id, record.model_dump_json(), _days(record), most)
        return bool(await self._call(tenant, "create", *told) == "ok")

    async def ids(self, tenant: str) -> list[str]:
        return [str(id) for id in await self._redis.hkeys(self._key(tenant, "stores"))]

    async def some(self, tenant: str, ids: Sequence[str]) -> list[Store]:
        """Those of them that there are."""
        told = await self._call(tenant, "show", *ids)
        return [
            Store(StoreRecord.model_validate_json(record), _facts(facts))
            for record, facts in zip(told[::2], told[1::2], strict=True)
            if record is not None
        ]

    async def store(self, tenant: str, id: str) -> Store:
        for found in await self.some(tenant, [STORE.checked(id)]):
            return found
        raise not_found("vector store", id)

    async def embedding_model(self, tenant: str, id: str) -> str:
        """That the store has chosen; empty: none, or it is gone."""
        for found in await self.some(tenant, [id]):
            return found.record.embedding_model
        return ""

    async def change(
        self, tenant: str, id: str, edit: Callable[[StoreRecord], StoreRecord]
    ) -> None:
        """`edit`: makes the new record of the one that is there. Raises INVALID_ARGUMENT for a
        store that expired."""
        while True:
            before = await self._redis.hget(self._key(tenant, "stores"), STORE.checked(id))
            if before is None:
                raise not_found("vector store", id)
            after = edit(StoreRecord.model_validate_json(before))
            told = (id, before, after.model_dump_json(), _days(after))
            outcome = await self._call(tenant, "change", *told)
            if outcome != "changed":
                return _check(id, outcome)

    async def searched(
        self,
        tenant: str,
        ids: Sequence[str],
        params: Sequence[str] | None = None,
        embedders: Mapping[str, str] = _NONE,
    ) -> Unready:
        """They are used now. Which files of them a search does not find, which earlier searches do
        for it, and which of them their embedders, of those that are told, are to embed anew; these
        are by the models' names, the installation's by ''. Raises NOT_FOUND
        for the first that is not the tenant's, INVALID_ARGUMENT for one that expired."""
        params = params or [""] * len(ids)
        for id, param in zip(ids, params, strict=True):
            STORE.checked(id, param)
        told = await self._call(tenant, "search", _NAMED, json.dumps(dict(embedders)), *ids)
        outcomes, total, found, caches, aged, models = told
        for id, param, outcome in zip(ids, params, outcomes, strict=True):
            _check(id, outcome, param)
        said = [StoreCache.model_validate_json(one) for one in caches]
        ages = [one.max_age_s for one in said if one.max_age_s is not None]
        alike = [one.similar_at_least for one in said if one.similar_at_least is not None]
        return Unready(
            _files(found),
            int(total),
            min(ages, default=None),
            (max(alike) if all(alike) else 0.0) if alike else None,
            tuple(aged),
            {id: model for id, model in zip(ids, models, strict=True) if model},
        )

    async def delete(self, tenant: str, id: str) -> tuple[bool, list[AttachedFile]]:
        """Returns whether it was there, and the files that were in it at that moment."""
        was_there, files = await self._call(tenant, "delete", STORE.checked(id))
        return bool(was_there), _files(files)

    async def clear(self, tenant: str, id: str) -> list[AttachedFile]:
        """Empties one that expired, whose record stays; returns what was in it."""
        return _files(await self._call(tenant, "clear", STORE.checked(id)))

    # ---- files that are embedded anew -------------------------------------------------------

    async def begin_reindexing(
        self, tenant: str, store: str, embedder: str, token: str, for_s: float, *, asked: bool
    ) -> bool:
        """Whether it is this token's now, for so long. False: no file is due, another has it, or it
        ended (`asked`: was cancelled) so that it is not to begin by itself. Raises NOT_FOUND,
        INVALID_ARGUMENT for a store that expired."""
        told = (STORE.checked(store), embedder, token, round(for_s), "1" if asked else "")
        outcome = await self._call(tenant, "begin", *told)
        _check(store, outcome)
        return bool(outcome == "ok")

    async def hold_reindexing(
        self, tenant: str, store: str, token: str, for_s: float, why: str = ""
    ) -> bool:
        """False: it is another's by now, cancelled, or the store is no more. `why`: it waits."""
        return bool(await self._call(tenant, "hold", store, token, why, round(for_s)))

    async def end_reindexing(
        self, tenant: str, store: str, token: str, state: str, why: str = "", for_s: float = 0.0
    ) -> None:
        """`for_s`: so long it does not begin by itself."""
        await self._call(tenant, "ended", store, token, state, why, round(for_s))

    async def stop_reindexing(self, tenant: str, store: str, embedder: str) -> None:
        """Raises NOT_FOUND, INVALID_ARGUMENT for a store that expired."""
        _check(store, await self._call(tenant, "stop", STORE.checked(store), embedder))

    # ---- files in a store -------------------------------------------------------------------

    async def put(
        self, tenant: str, store: str, files: Sequence[AttachedFile], batch: FileBatch | None = None
    ) -> None:
        """Begins attachments, each in the place of an earlier one of the same file. Raises
        NOT_FOUND where the store is gone, INVALID_ARGUMENT where it expired, RESOURCE_EXHAUSTED
        ("too_many_files_in_vector_stores", "too_many_bytes_of_attributes")."""
        told = [part for file in files for part in (file.id, file.model_dump_json())]
        of = (batch.id, batch.model_dump_json()) if batch is not None else ("", "")
        place = (STORE.checked(store), self._max_files, self._max_attribute_bytes)
        outcome = await self._call(tenant, "put", *place, *of, *told)
        self._check_room(outcome)
        _check(store, outcome)

    async def expect(self, tenant: str, files: int) -> None:
        """That so many more go into a store that is to be made. Raises RESOURCE_EXHAUSTED."""
        if files:
            self._check_room(await self._call(tenant, "room", self._max_files, files))

    def _check_room(self, outcome: str) -> None:
        if outcome == "full":
            metrics.files_refused.labels("tenant").inc()
            raise too_many("files in vector stores", self._max_files)
        if outcome == "attributes":
            metrics.files_refused.labels("tenant").inc()
            raise too_many("bytes of attributes", self._max_attribute_bytes)

    async def file_ids(self, tenant: str, store: str) -> list[str]:
        key = self._key(tenant, "store", STORE.checked(store))
        return [str(id) for id in await self._redis.hkeys(key)]

    async def files(self, tenant: str, store: str, ids: Sequence[str]) -> list[AttachedFile]:
        """Those of them that there are."""
        key = self._key(tenant, "store", STORE.checked(store))
        stored = await self._redis.hmget(key, list(ids)) if ids else []
        return _files(one for one in stored if one is not None)

    async def all_files(self, tenant: str, store: str) -> list[AttachedFile]:
        return _files(await self._redis.hvals(self._key(tenant, "store", STORE.checked(store))))

    async def file(self, tenant: str, store: str, id: str) -> AttachedFile:
        for found in await self.files(tenant, store, [id] if FILE.fits(id) else []):
            return found
        raise not_found("file in this vector store", id)

    async def change_file(
        self, tenant: str, store: str, id: str, edit: Callable[[AttachedFile], AttachedFile | None]
    ) -> AttachedFile:
        """`edit`: makes the new record of the one that is there; None: it is to stay. Returns what
        is there then. Raises RESOURCE_EXHAUSTED ("too_many_bytes_of_attributes") where they would
        grow beyond their bound."""
        key = self._key(tenant, "store", STORE.checked(store))
        while True:
            before = await self._redis.hget(key, id) if FILE.fits(id) else None
            if before is None:
                raise not_found("file in this vector store", id)
            file = AttachedFile.model_validate_json(before)
            after = edit(file)
            if after is None:
                return file
            told = (store, id, before, after.model_dump_json(), self._max_attribute_bytes)
            outcome = await self._call(tenant, "change_file", *told)
            self._check_room(outcome)
            if outcome == "ok":
                return after

    async def revise(self, tenant: str, store: str, file: str, attachment: str = "") -> int:
        """A number above all before it, of what is done to the file in retrieval from now on; 0
        where it is there by another attachment. Without one: where it is there at all."""
        told = (STORE.checked(store), FILE.checked(file), attachment)
        return int(await self._call(tenant, "revise", *told))

    async def drop(self, tenant: str, store: str, file: str, attachment: str) -> bool:
        """False: it is not there by this attachment any more."""
        told = (STORE.checked(store), FILE.checked(file), attachment)
        return bool(await self._call(tenant, "drop", *told))

    # ---- batches of files -------------------------------------------------------------------

    async def batch(self, tenant: str, store: str, id: str) -> tuple[FileBatch, Facts]:
        key = self._key(tenant, "store", STORE.checked(store))
        stored = await self._redis.hget(f"{key}:batches", FILE_BATCH.checked(id))
        if stored is None:
            raise not_found(FILE_BATCH.what, id)
        facts: Any = await self._redis.hgetall(f"{key}:facts")
        return FileBatch.model_validate_json(stored), facts

    async def cancel(self, tenant: str, batch: FileBatch) -> None:
        """It tells so from now on, unless it has ended; what becomes of its files is another
        step."""
        after = batch.model_copy(update={"cancelled": True})
        await self._call(tenant, "cancel", batch.store, batch.id, after.model_dump_json())

    async def _call(self, tenant: str, op: str, *args: Any) -> Any:
        return await self._script([self._key(tenant)], [op, *args])

    def _key(self, tenant: str, *parts: str) -> str:
        """The braces keep a tenant's stores in one slot of a Redis cluster."""
        return ":".join((self._namespace, "{" + tenant + "}", *parts))


def _check(id: str, outcome: str, param: str = "") -> None:
    if outcome == "gone":
        raise not_found("vector store", id, param)
    if outcome == "expired":
        raise expired(id, param)


def _days(record: StoreRecord) -> str:
    return "" if record.expires_days is None else str(record.expires_days)


def _facts(told: Sequence[str]) -> Facts:
    return dict(zip(told[::2], told[1::2], strict=True))


def _files(stored: Iterable[Any]) -> list[AttachedFile]:
    return [AttachedFile.model_validate_json(one) for one in stored]
