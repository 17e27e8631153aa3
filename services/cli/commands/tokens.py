"""`penstock tokens`: those of the OIDC issuer that hold no more."""

import argparse
from functools import partial

from services.cli.console import console, folding_table
from services.cli.granting import Stores, found, local, with_stores


def main(arguments: argparse.Namespace) -> int:
    actions = {"revoke": _revoke, "list": _list}
    return with_stores(partial(actions[arguments.action], arguments=arguments))


async def _revoke(stores: Stores, arguments: argparse.Namespace) -> None:
    tenant = arguments.tenant
    if tenant is not None:
        found(await stores.tenants.find(tenant), "tenant", tenant)
    await stores.revoked_tokens.revoke(tenant, arguments.user, arguments.token, stores.by)
    whose = f"tenant {tenant}" if tenant is not None else "an administrator's"
    if arguments.user is not None:
        print(f"{arguments.user}, {whose}: tokens issued until now are revoked")
    else:
        print(f"token {arguments.token}, {whose}: revoked, if there is such a one")


async def _list(stores: Stores, arguments: argparse.Namespace) -> None:
    table = folding_table("tenant", "user", "token", "revoked", "kept until")
    for one in await stores.revoked_tokens.list():
        table.add_row(
            one.tenant or "", one.user or "", one.token or "", local(one.revoked), local(one.until)
        )
    console().print(table)
