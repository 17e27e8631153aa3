"""`penstock jobs`: durable jobs that wait and run, and those that nobody will try again."""

import argparse
import json
from functools import partial

from services.cli.console import console, folding_table
from services.cli.granting import Stores, local, with_stores
from services.gateway.jobs.queue import KINDS, Queues


def main(arguments: argparse.Namespace) -> int:
    return with_stores(partial(_show, arguments=arguments))


async def _show(stores: Stores, arguments: argparse.Namespace) -> None:
    settings = stores.settings
    queues = Queues(stores.redis, settings.namespace, "", settings.jobs.lease_s)
    dead = (await queues.dead(arguments.last))[::-1]
    if arguments.json:
        for one in dead:
            print(json.dumps(one.as_told()))
        return
    table = folding_table("jobs", "waiting", "running")
    for kind, what in KINDS.items():
        waiting, running = await queues.counts(kind)
        table.add_row(what, str(waiting), str(running))
    out = console()
    out.print(table)
    if not dead:
        return out.print("no dead jobs")
    table = folding_table("when", "what", "tenant", "queue", "job", "why", title="Dead")
    for one in dead:
        table.add_row(
            local(one.at_s), one.queue.kind, one.queue.tenant, one.queue.name, one.body, one.why
        )
    out.print(table)
