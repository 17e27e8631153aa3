"""`penstock tenants`: who owns keys, data and caches, and what all of one's callers are granted."""

import argparse
import time
from functools import partial
from typing import Any

from services.cli.console import console, folding_table
from services.cli.granting import Stores, found, limits_given, local, models_given, with_stores


def main(arguments: argparse.Namespace) -> int:
    actions = {
        "add": _add,
        "change": _change,
        "suspend": _suspend,
        "resume": _suspend,
        "list": _list,
    }
    return with_stores(partial(actions[arguments.action], arguments=arguments))


async def _add(stores: Stores, arguments: argparse.Namespace) -> None:
    given = await _given(stores, arguments) | {
        "limits": await limits_given(arguments.limit, "--limit", stores),
        "user_limits": await limits_given(arguments.each_limit, "--each-limit", stores),
    }
    if await stores.tenants.add(arguments.name, given, stores.by) is None:
        raise ValueError(f"there is a tenant {arguments.name!r} already")
    print(f"{arguments.name}: added; `penstock keys create --tenant {arguments.name}`")


async def _change(stores: Stores, arguments: argparse.Namespace) -> None:
    given = await _given(stores, arguments)
    if not given:
        raise ValueError("nothing is to be changed: give one of the options")
    await _update(stores, arguments.name, "tenant.change", given)
    print(f"{arguments.name}: changed; all gateways know it")


async def _suspend(stores: Stores, arguments: argparse.Namespace) -> None:
    ends = arguments.action == "suspend"
    given = {"suspended": int(time.time()) if ends else None}
    await _update(stores, arguments.name, f"tenant.{arguments.action}", given)
    told = "suspended; nobody of it is let in" if ends else "its keys and users are let in"
    print(f"{arguments.name}: {told}")


async def _given(stores: Stores, arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("note", "priority", "weight")
    given = {name: getattr(arguments, name) for name in names}
    changes = {name: value for name, value in given.items() if value is not None}
    if arguments.model is not None:
        changes["models"] = await models_given(arguments.model, stores)
    return changes


async def _update(stores: Stores, name: str, action: str, changes: dict[str, Any]) -> None:
    record = await stores.tenants.change(name, action, lambda _: changes, stores.by)
    found(record, "tenant", name)


async def _list(stores: Stores, arguments: argparse.Namespace) -> None:
    keys = await stores.keys.list()
    table = folding_table(
        "name", "note", "models", "priority", "weight", "limits", "keys", "suspended"
    )
    for tenant in await stores.tenants.list():
        names = [limit.name for limit in tenant.limits]
        names += [f"each: {limit.name}" for limit in tenant.user_limits]
        table.add_row(
            tenant.name,
            tenant.note,
            ", ".join(tenant.models) if tenant.models is not None else "all",
            tenant.priority,
            f"{tenant.weight:g}",
            ", ".join(names),
            str(sum(key.holds for key in keys if key.tenant == tenant.name)),
            local(tenant.suspended) if tenant.suspended else "",
        )
    console().print(table)
