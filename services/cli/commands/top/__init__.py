"""`penstock top`: what a running Penstock does, live in the terminal; plain text elsewhere."""

import argparse
import asyncio
import sys
from collections import deque
from contextlib import suppress

import httpx
from rich.console import Console, Group
from rich.live import Live

from services.cli.arguments import SORTS
from services.cli.commands.top.keyboard import pressed
from services.cli.commands.top.samples import Sample, Span, look
from services.cli.commands.top.view import view
from services.cli.console import console
from services.cli.interruptible import run
from services.cli.registry import Registry, settings_here
from services.common.config import Settings
from services.common.locks.secrets import redacted
from services.common.transport import Transport

_WINDOW_S = 10.0
"""Rates and quantiles are of so long at least: of two seconds they jump about."""


def main(arguments: argparse.Namespace) -> int:
    with suppress(KeyboardInterrupt):
        return run(_Top(arguments).run())
    return 0


class _Top:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._once, self._interval_s = arguments.once, arguments.interval
        self._sort = arguments.sort
        self._samples: deque[Sample] = deque()
        self._over = asyncio.Event()
        self._turned = asyncio.Event()  # a key was pressed

    async def run(self) -> int:
        settings = settings_here()
        registry = Registry(settings)
        self._transport = Transport.of(settings, "cli")
        try:
            async with httpx.AsyncClient(trust_env=False) as self._http:
                await self._look(registry)
                _check_there_is_one(self._samples[0], settings)
                if self._once or not sys.stdout.isatty():
                    await self._in_lines(registry)
                else:
                    await self._live(registry)
        finally:
            await registry.close()
        return 0

    async def _look(self, registry: Registry) -> None:
        self._samples.append(await look(registry, self._transport, self._http))
        while len(self._samples) > 2 and self._samples[1].at < self._samples[-1].at - _WINDOW_S:
            self._samples.popleft()

    async def _in_lines(self, registry: Registry) -> None:
        """For pipes and files: one view after the other."""
        out = console()
        while not self._over.is_set():
            await asyncio.sleep(self._interval_s)
            await self._look(registry)
            out.print(self._view(out, interactive=False))
            if self._once:
                return
            out.print()

    async def _live(self, registry: Registry) -> None:
        screen = Console()
        with pressed(self._key), Live(console=screen, screen=True, auto_refresh=False) as live:
            while not self._over.is_set():
                live.update(self._view(screen, interactive=True), refresh=True)
                if await self._turn():
                    continue  # the same figures in another order
                await self._look(registry)

    async def _turn(self) -> bool:
        """Waits for the next look; True when a key was pressed meanwhile."""
        self._turned.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._turned.wait(), self._interval_s)
            return True
        return False

    def _view(self, out: Console, *, interactive: bool) -> Group:
        span = Span(self._samples[0], self._samples[-1])
        return view(span, width=out.width, sort=self._sort, interactive=interactive)

    def _key(self, key: str) -> None:
        if key in ("q", "Q"):
            self._over.set()
        elif key in ("s", "S"):
            self._sort = SORTS[(SORTS.index(self._sort) + 1) % len(SORTS)]
        else:
            return
        self._turned.set()


def _check_there_is_one(sample: Sample, settings: Settings) -> None:
    """Raises RuntimeError where there is nothing to see."""
    shown = redacted(settings.redis_dsn)
    if not sample.fresh:
        raise RuntimeError(f"Redis at {shown} cannot be reached; `penstock doctor` says more")
    if not sample.replicas:
        raise RuntimeError(f"nothing is registered in Redis at {shown}; `penstock up` starts it")
