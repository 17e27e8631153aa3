"""`penstock audit`: who changed keys, tenants, limits and models, when, and from where."""

import argparse
import json
from dataclasses import asdict
from functools import partial

from services.cli.console import console, folding_table
from services.cli.granting import Stores, local, with_stores


def main(arguments: argparse.Namespace) -> int:
    return with_stores(partial(_show, arguments=arguments))


async def _show(stores: Stores, arguments: argparse.Namespace) -> None:
    lines = (await stores.audit.read(arguments.last, what=arguments.about or ""))[::-1]
    if arguments.json:
        for line in lines:
            print(json.dumps(asdict(line)))
        return
    table = folding_table("when", "who", "from", "did", "to", "before", "after")
    for line in lines:
        before, after = (json.dumps(one) if one else "" for one in (line.before, line.after))
        table.add_row(local(line.at), line.who, line.source, line.action, line.what, before, after)
    console().print(table)
