"""`penstock keys`: API keys; a key's text is shown once, when it is made.

`create` and `rotate` print the key alone on standard output, for `KEY=$(penstock keys create …)`;
its id and whatever else is worth knowing go to standard error.
"""

import argparse
from functools import partial
from typing import Any

from services.cli.console import console, folding_table
from services.cli.granting import (
    Stores,
    found,
    limits_given,
    local,
    models_given,
    tell,
    with_stores,
)
from services.cli.plain import plain
from services.gateway.identity.key_record import KeyRecord
from services.gateway.identity.principal import Role
from services.gateway.identity.tenants import TenantRecord


def main(arguments: argparse.Namespace) -> int:
    actions = {
        "create": _create,
        "change": _change,
        "rotate": _rotate,
        "revoke": _revoke,
        "list": _list,
    }
    return with_stores(partial(actions[arguments.action], arguments=arguments))


async def _create(stores: Stores, arguments: argparse.Namespace) -> None:
    if arguments.admin and arguments.limit:
        raise ValueError("--limit: an administrator's key has none")
    given: dict[str, Any] = {
        "tenant": arguments.tenant,
        "name": arguments.name,
        "role": arguments.role or (Role.READ_ONLY if arguments.admin else Role.MEMBER),
        "scopes": arguments.scope,
        "priority": arguments.priority,
        "weight": arguments.weight,
        "models": await models_given(arguments.model, stores),
        "limits": await limits_given(arguments.limit, "--limit", stores),
    }
    KeyRecord.model_validate({**given, "id": "", "created": 0})  # before its tenant is made
    new = arguments.tenant and await stores.tenants.add(arguments.tenant, by=stores.by)
    key, record = await stores.keys.create(**given, expires_in_s=arguments.expires, by=stores.by)
    print(key)
    usable = "all that the tenant may use" if record.tenant is not None else "no models"
    if record.models is not None:
        usable = ", ".join(record.models)
    until = f", until {local(record.expires)}" if record.expires else ""
    tell(f"{record.id}, {_whose(record)}, {plain(usable)}{until}; the key is not shown again")
    if new:
        tell(f"{record.tenant} is a new tenant")


async def _change(stores: Stores, arguments: argparse.Namespace) -> None:
    given: dict[str, Any] = {
        "name": arguments.name,
        "role": arguments.role,
        "scopes": arguments.scope,
        "priority": arguments.priority,
        "weight": arguments.weight,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    if arguments.model is not None:
        changes["models"] = await models_given(arguments.model, stores)
    if not changes:
        raise ValueError("nothing is to be changed: give one of the options")
    record = await stores.keys.change(arguments.id, "key.change", lambda _: changes, stores.by)
    found(record, "key", arguments.id)
    print(f"{arguments.id}: changed; all gateways know it")


async def _rotate(stores: Stores, arguments: argparse.Namespace) -> None:
    made = await stores.keys.rotate(arguments.id, arguments.overlap, stores.by)
    key, record = found(made, "key", arguments.id)
    print(key)
    [listed] = [one for one in await stores.keys.list_of(record.tenant) if one.id == record.id]
    old = f"until {local(listed.old_until)}" if listed.old_until else "no more"
    tell(f"{record.id}, {_whose(record)}; the key before it holds {old}")


async def _revoke(stores: Stores, arguments: argparse.Namespace) -> None:
    id = arguments.id
    record = found(await stores.keys.find_id(id), "key", id)
    await stores.keys.revoke(id, stores.by)  # the gateways are told again, if it was before
    whose = f"{id}, {_whose(record)}" + (f", {record.name}" if record.name else "")
    if record.revoked is not None:
        print(f"{whose}: was revoked already, {local(record.revoked)}")
    else:
        print(f"{whose}: revoked; no gateway takes it from now on")


def _whose(record: KeyRecord) -> str:
    return f"tenant {record.tenant}" if record.tenant is not None else "an administrator's"


async def _list(stores: Stores, arguments: argparse.Namespace) -> None:
    known = {tenant.name: tenant for tenant in await stores.tenants.list()}
    table = folding_table(
        "id",
        "tenant",
        "name",
        "priority",
        "weight",
        "models",
        "role",
        "created",
        "used",
        "expires",
        "revoked",
    )
    for record in await stores.keys.list():
        whose = record.tenant or ""
        tenant = known.get(whose) or TenantRecord.model_construct(name=whose)
        of_tenant = record.tenant is not None
        table.add_row(
            record.id,
            whose,
            record.name,
            (record.priority or tenant.priority) if of_tenant else "",
            f"{record.weight or tenant.weight:g}" if of_tenant else "",
            ", ".join(record.models) if record.models is not None else "all",
            _role(record),
            local(record.created),
            local(record.used) if record.used else "",
            _expires(record),
            local(record.revoked) if record.revoked else "",
        )
    console().print(table)


def _role(record: KeyRecord) -> str:
    return record.role if record.scopes is None else f"{record.role}: {', '.join(record.scopes)}"


def _expires(record: KeyRecord) -> str:
    ends = [local(record.expires)] if record.expires else []
    return ", ".join([*ends, *([f"old: {local(record.old_until)}"] if record.old_until else [])])
