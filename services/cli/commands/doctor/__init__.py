"""`penstock doctor`: examines an installation, one that runs or one that is to be started.

Each line is one finding: ok, warning, or failed with what to do. It changes nothing, shows no
secret, and no part of it waits longer than `findings.LIMIT_S`.
"""

import argparse
import asyncio
import json
import os

from rich.text import Text

from services.cli.commands.doctor import (
    certificates,
    checkpoints,
    data,
    door,
    host,
    identity,
    qdrant,
    redis,
    replicas,
)
from services.cli.commands.doctor.findings import Finding, bounded, warning
from services.cli.commands.doctor.installation import Installation
from services.cli.console import console
from services.cli.interruptible import run
from services.common.config import Settings, unknown_names

_CHECKS = {
    "host": host.check,
    "data directory": data.check,
    "models": checkpoints.check,
    "certificates": certificates.check,
    "redis": redis.check,
    "qdrant": qdrant.check,
    "services": replicas.check,
    "door": door.check,
    "identity": identity.check,
}
_COLOURS = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def main(arguments: argparse.Namespace) -> int:
    findings = run(examine(Settings()))
    if arguments.json:
        print(json.dumps([finding.as_json() for finding in findings], indent=1))
    else:
        _print(findings)
    states = {finding.state for finding in findings}
    return int("failed" in states or (arguments.strict and "warning" in states))


async def examine(settings: Settings) -> list[Finding]:
    """All findings, in the order of the checks."""
    installation = await Installation.find(settings)
    try:
        checks = (bounded(about, check(installation)) for about, check in _CHECKS.items())
        found = await asyncio.gather(*checks)
    finally:
        await installation.close()
    return [*_misspelt(), *(finding for some in found for finding in some)]


def _misspelt() -> list[Finding]:
    return [
        warning("settings", f"{name} is set, but there is no such setting", "docs/settings.md")
        for name in unknown_names(os.environ)
    ]


def _print(findings: list[Finding]) -> None:
    out = console()
    width = max(len(finding.about) for finding in findings)
    for finding in findings:
        line = Text(f"{finding.state:8}", style=_COLOURS[finding.state])
        line.append(f"{finding.about:{width}}  ", style="bold")
        line.append(finding.told, style="default")
        out.print(line, soft_wrap=True)
        if finding.advice:
            out.print(Text(f"{'':{8 + width}}  → {finding.advice}"), soft_wrap=True)
    counts = {state: sum(f.state == state for f in findings) for state in ("failed", "warning")}
    out.print(Text(_summary(**counts)), soft_wrap=True)


def _summary(failed: int, warning: int) -> str:
    if not failed and not warning:
        return "all is well"
    return f"{failed} failed, {warning} warning{'' if warning == 1 else 's'}"
