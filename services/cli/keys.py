"""`penstock keys`: API keys, straight in Redis; a key's text is shown once, when it is made."""

import argparse
import asyncio
import time

from services.cli.console import console, folding_table
from services.cli.running import find_running
from services.common.config import Settings
from services.common.redis import RedisAway, connect
from services.gateway.keys import KeyStore


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    create = actions.add_parser("create", help="make a key and print it, once")
    create.add_argument("--tenant", required=True, help="whose requests these are")
    create.add_argument("--name", default="", help="a note of what the key is for")
    create.add_argument("--priority", choices=["high", "normal", "low"], default="normal")
    create.add_argument(
        "--weight",
        type=float,
        default=1.0,
        help="the tenant's share when requests wait (default 1)",
    )
    create.add_argument(
        "--model",
        action="append",
        metavar="NAME",
        help="a model the key may use, may be repeated (default: all)",
    )
    actions.add_parser("list", help="all keys, without their texts")
    revoke = actions.add_parser("revoke", help="end a key")
    revoke.add_argument("id", help="as listed")


def main(arguments: argparse.Namespace) -> int:
    try:
        return asyncio.run(_main(arguments))
    except RedisAway as away:
        raise RuntimeError(f"Redis cannot be reached: {away}") from away


async def _main(arguments: argparse.Namespace) -> int:
    settings = Settings()
    running = find_running(settings)
    url, namespace = settings.redis_url, settings.namespace
    if running is not None and "redis_url" not in settings.model_fields_set:
        url, namespace = running.redis_url, running.namespace
    redis = connect(url)
    try:
        return await _act(KeyStore(redis, namespace), arguments)
    finally:
        await redis.aclose()


async def _act(store: KeyStore, arguments: argparse.Namespace) -> int:
    if arguments.action == "create":
        key, record = await store.create(
            tenant=arguments.tenant,
            name=arguments.name,
            priority=arguments.priority,
            weight=arguments.weight,
            models=arguments.model,
        )
        print(key)
        return 0
    if arguments.action == "revoke":
        if not await store.revoke(arguments.id):
            raise ValueError(f"there is no key {arguments.id!r}")
        return 0
    table = folding_table(
        "id", "tenant", "name", "priority", "weight", "models", "created", "revoked"
    )
    for record in await store.list():
        table.add_row(
            record.id,
            record.tenant,
            record.name,
            record.priority,
            f"{record.weight:g}",
            ", ".join(record.models) if record.models else "all",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(record.created)),
            "yes" if record.revoked else "",
        )
    console().print(table)
    return 0
