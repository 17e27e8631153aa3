"""`penstock keys`: API keys, straight in Redis; a key's text is shown once, when it is made.

`create` prints the key alone on standard output, for `KEY=$(penstock keys create …)`; its id and
whatever else is worth knowing go to standard error.
"""

import argparse
import asyncio
import sys
import time

from pydantic import ValidationError

from services.cli.console import console, folding_table
from services.cli.running import find_running
from services.common.config import Settings
from services.common.discovery import Directory
from services.common.redis import OutOfMemoryError, ReadOnlyError, Redis, RedisAway, connect
from services.common.served_models import listed
from services.gateway.identity.keys import KeyStore
from services.gateway.identity.tenants import TenantRecord, TenantStore


def main(arguments: argparse.Namespace) -> int:
    try:
        return asyncio.run(_main(arguments))
    except RedisAway as away:
        raise RuntimeError(_told(away)) from away


def _told(away: Exception) -> str:
    if isinstance(away, OutOfMemoryError | ReadOnlyError):
        return f"Redis takes no writes for now: {away}"
    return f"Redis cannot be reached: {away}; start a Penstock with `penstock up`"


async def _main(arguments: argparse.Namespace) -> int:
    settings = Settings()
    running = find_running(settings)
    url, namespace = settings.redis_dsn, settings.namespace
    if running is not None and "redis_url" not in settings.model_fields_set:
        url, namespace = running.redis_url, running.namespace
    redis = connect(url)
    try:
        await redis.ping()  # what no key can be called is answered without asking
        store = KeyStore(redis, namespace)
        if arguments.action == "create":
            if arguments.model:
                settings = settings.model_copy(update={"namespace": namespace})
                served = await _served(redis, settings)
                _check_models(arguments.model, served)
            await _create(store, arguments)
        elif arguments.action == "revoke":
            await _revoke(store, arguments.id)
        else:
            await _list(store, TenantStore(redis, namespace))
        return 0
    finally:
        await redis.aclose()


async def _served(redis: Redis, settings: Settings) -> set[str]:
    """The models of the Penstock that runs with this Redis, embeddings' too; empty if none does."""
    names = {served.model for served in await listed(redis, settings)}
    view = Directory(redis, settings.namespace, "retrieval", settings.lease_s)
    await view.refresh()
    embeds = (replica.facts.get("embedding_model", "") for replica in view.replicas.values())
    return names | set(filter(None, embeds))


def _check_models(wanted: list[str], served: set[str]) -> None:
    """Raises ValueError for a model that is not served, where it is known which are."""
    if not served:
        _tell("no Penstock runs with this Redis: whether these models are served is not known")
        return
    unknown = [name for name in wanted if name not in served]
    if unknown:
        raise ValueError(
            f"--model: {', '.join(unknown)} is not served; these are: {', '.join(sorted(served))}"
        )


async def _create(store: KeyStore, arguments: argparse.Namespace) -> None:
    try:
        key, record = await store.create(
            tenant=arguments.tenant,
            name=arguments.name,
            priority=arguments.priority,
            weight=arguments.weight,
            models=arguments.model,
            expires_in_s=arguments.expires,
        )
    except ValidationError as error:
        problem = error.errors()[0]
        argument = str(problem["loc"][0]).removesuffix("s")  # `models` are of --model
        raise ValueError(f"--{argument}: {problem['msg']}") from None
    print(key)
    models = ", ".join(record.models) if record.models else "all models"
    until = f", until {_local(record.expires)}" if record.expires else ""
    _tell(f"{record.id}, tenant {record.tenant}, {models}{until}; the key is not shown again")


async def _revoke(store: KeyStore, id: str) -> None:
    record = await store.find_id(id)
    if record is None:
        raise ValueError(f"there is no key {id!r}; `penstock keys list` shows all")
    await store.revoke(id)  # the gateways are told again, if it was revoked before
    whose = f"{id}, tenant {record.tenant}" + (f", {record.name}" if record.name else "")
    if record.revoked is not None:
        print(f"{whose}: was revoked already, {_local(record.revoked)}")
    else:
        print(f"{whose}: revoked; no gateway takes it from now on")


def _tell(line: str) -> None:
    print(line, file=sys.stderr)


def _local(unix_s: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s))


async def _list(store: KeyStore, tenants: TenantStore) -> None:
    known = {tenant.name: tenant for tenant in await tenants.list()}
    table = folding_table(
        "id", "tenant", "name", "priority", "weight", "models", "created", "expires", "revoked"
    )
    for record in await store.list():
        tenant = known.get(record.tenant) or TenantRecord(name=record.tenant)
        table.add_row(
            record.id,
            record.tenant,
            record.name,
            record.priority or tenant.priority,
            f"{record.weight or tenant.weight:g}",
            ", ".join(record.models) if record.models else "all",
            _local(record.created),
            _local(record.expires) if record.expires else "",
            _local(record.revoked) if record.revoked else "",
        )
    console().print(table)
