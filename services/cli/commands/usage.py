"""`penstock usage`: what was used and what it cost, from the ledger in Redis.

Entries of one request add up: what was lost with a gateway and what was corrected count once as a
request. Times are UTC, as budgets are.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from services.cli.console import console, folding_table
from services.cli.granting import Stores, tell, with_stores
from services.cli.usage_files import writer
from services.gateway.metering.ledger import Entry, Ledger
from services.gateway.metering.prices import NANO

_DAY = len("2026-11-22")
_MONTH = len("2026-11")

_COLUMNS: dict[str, Callable[[Entry], str]] = {
    "tenant": lambda entry: entry.tenant,
    "user": lambda entry: entry.user,
    "model": lambda entry: entry.model,
    "tier": lambda entry: entry.tier,
    "route": lambda entry: entry.route,
    "status": lambda entry: entry.status,
    "day": lambda entry: _when(entry)[:_DAY],
    "month": lambda entry: _when(entry)[:_MONTH],
}


@dataclass
class _Sum:
    requests: int = 0
    prompt: int = 0
    cached: int = 0
    output: int = 0
    nanos: int = 0

    def add(self, entry: Entry) -> None:
        self.requests += entry.status != "correction"
        self.prompt += entry.prompt
        self.cached += entry.cached
        self.output += entry.output
        self.nanos += entry.nanos


def main(arguments: argparse.Namespace) -> int:
    async def work(stores: Stores) -> None:
        ledger = Ledger(stores.redis, stores.settings.namespace)
        if arguments.remove and not (arguments.export and not _chosen(arguments)):
            raise ValueError("--remove: with --export of the whole ledger, up to --until, alone")
        if arguments.export:
            await _export(ledger, arguments)
        else:
            await _show(ledger, arguments, stores.settings.metering.currency)

    return with_stores(work)


async def _show(ledger: Ledger, arguments: argparse.Namespace, currency: str) -> None:
    sums: dict[tuple[str, ...], _Sum] = defaultdict(_Sum)
    total = _Sum()
    async for entry in ledger.entries(arguments.since or 0.0, arguments.until):
        if _wanted(entry, arguments):
            sums[tuple(_COLUMNS[name](entry) for name in arguments.by)].add(entry)
            total.add(entry)
    table = folding_table(
        *arguments.by, "requests", "prompt", "cached", "output", f"cost, {currency}"
    )
    for group in sorted(sums):
        table.add_row(*group, *_told(sums[group]))
    if len(sums) > 1:
        table.add_row("all", *[""] * (len(arguments.by) - 1), *_told(total))
    console().print(table)


def _told(sum_: _Sum) -> list[str]:
    counts = (sum_.requests, sum_.prompt, sum_.cached, sum_.output)
    return [*(str(count) for count in counts), cost_text(sum_.nanos)]


def cost_text(nanos: int) -> str:
    """Exact, to a billionth."""
    sign, size = "-" * (nanos < 0), abs(nanos)
    return f"{sign}{size // NANO}.{size % NANO:09d}"


async def _export(ledger: Ledger, arguments: argparse.Namespace) -> None:
    """All entries, or those asked for, to a file; then out of the ledger, if that is asked for."""
    last, count = "", 0
    with writer(arguments.export) as write:
        async for entry in ledger.entries(arguments.since or 0.0, arguments.until):
            last = entry.entry
            if _wanted(entry, arguments):
                write(entry)
                count += 1
    tell(f"{count} entries in {arguments.export}")
    if arguments.remove and last:
        tell(f"{await ledger.remove(last)} entries removed from the ledger")


def _chosen(arguments: argparse.Namespace) -> bool:
    """Whether entries are left out but for their time."""
    return any((arguments.tenant, arguments.user, arguments.model, arguments.since))


def _wanted(entry: Entry, arguments: argparse.Namespace) -> bool:
    asked = (arguments.tenant, arguments.user, arguments.model)
    own = (entry.tenant, entry.user, entry.model)
    return all(one is None or one == its for one, its in zip(asked, own, strict=True))


def _when(entry: Entry) -> str:
    return datetime.fromtimestamp(entry.time_s, UTC).isoformat()
