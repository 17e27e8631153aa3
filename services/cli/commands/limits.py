"""`penstock limits`: what tenants and keys may use; metering holds them to it."""

import argparse
from collections.abc import Callable
from functools import partial

from services.cli.console import console, folding_table
from services.cli.granting import Stores, found, warn_of_unserved, with_stores
from services.gateway.identity.limits import Limit, Limits


def main(arguments: argparse.Namespace) -> int:
    actions = {"set": _set, "remove": _remove, "list": _list}
    return with_stores(partial(actions[arguments.action], arguments=arguments))


async def _set(stores: Stores, arguments: argparse.Namespace) -> None:
    names = ("name", "of", "most", "per", "model", "without_redis")
    limit = Limit(**{name: getattr(arguments, name) for name in names})
    await warn_of_unserved([limit], stores)

    def with_it(limits: Limits) -> Limits:
        return (*(one for one in limits if one.name != limit.name), limit)

    await _update(stores, arguments, with_it)
    print(f"{arguments.name}: set; all gateways know it")


async def _remove(stores: Stores, arguments: argparse.Namespace) -> None:
    def without_it(limits: Limits) -> Limits:
        left = tuple(one for one in limits if one.name != arguments.name)
        if len(left) == len(limits):
            raise ValueError(f"there is no limit {arguments.name!r} there")
        return left

    await _update(stores, arguments, without_it)
    print(f"{arguments.name}: removed; all gateways know it")


async def _update(
    stores: Stores, arguments: argparse.Namespace, new: Callable[[Limits], Limits]
) -> None:
    if arguments.key is not None:
        key = await stores.keys.change(
            arguments.key,
            "key.limits",
            lambda one: {"limits": new(one.limits)},
            stores.by,
        )
        found(key, "key", arguments.key)
        return
    field = "limits" if arguments.tenant is not None else "user_limits"
    name = arguments.tenant if arguments.tenant is not None else arguments.each_of
    tenant = await stores.tenants.change(
        name,
        "tenant.limits",
        lambda one: {field: new(getattr(one, field))},
        stores.by,
    )
    found(tenant, "tenant", name)


async def _list(stores: Stores, arguments: argparse.Namespace) -> None:
    of: list[tuple[str, Limits]] = []
    if arguments.key is None:
        for tenant in await stores.tenants.list():
            if arguments.tenant in (None, tenant.name):
                of += [(tenant.name, tenant.limits), (f"{tenant.name}, each", tenant.user_limits)]
    own = arguments.tenant
    for key in await (stores.keys.list() if own is None else stores.keys.list_of(own)):
        chosen = arguments.key == key.id or (arguments.key is None and arguments.tenant is None)
        if chosen or (arguments.tenant is not None and key.tenant == arguments.tenant):
            of.append((key.id, key.limits))
    table = folding_table("of", "name", "most", "what", "per", "model", "without Redis")
    for whose, limits in of:
        for limit in limits:
            table.add_row(
                whose,
                limit.name,
                f"{limit.most:g}",
                limit.of,
                limit.per or "",
                limit.model or "all",
                limit.without_redis,
            )
    console().print(table)
