"""Clients behind what a load balancer does: it looks at /readyz of all gateways, now and then."""

import asyncio
from collections import Counter
from contextlib import suppress
from typing import Any

import httpx

from tests.support.waiting import until

LOOK_EVERY_S = 0.1
CLIENTS = 6


class Clients:
    """Streams one after the other, each to one of the gateways that were last seen ready."""

    def __init__(self, urls: list[str], key: str) -> None:
        self.urls = urls
        self._http = httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=60.0)
        self.ready: set[str] = set(urls)
        self.failures: list[str] = []
        self.texts: set[str] = set()
        self.answered: Counter[str] = Counter()  # by gateway
        self._over = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Clients":
        self._tasks = [asyncio.create_task(self._look())]
        self._tasks += [asyncio.create_task(self._ask(number)) for number in range(CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)
        await self._http.aclose()

    async def more(self, requests: int, url: str = "") -> None:
        """Returns after so many more answers, of one gateway or of any."""
        aim = self._count(url) + requests
        await until(lambda: self._count(url) >= aim or bool(self.failures), 120)
        assert not self.failures

    def _count(self, url: str) -> int:
        return self.answered[url] if url else self.answered.total()

    async def _look(self) -> None:
        while not self._over:
            for url in list(self.urls):
                well = False
                with suppress(httpx.TransportError):
                    well = (await self._http.get(f"{url}/readyz")).status_code == 200
                (self.ready.add if well else self.ready.discard)(url)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _ask(self, number: int) -> None:
        body: dict[str, Any] = {
            "model": "tiny",
            "prompt": "the water at the end of the penstock",
            "max_tokens": 60,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        turn = number
        while not self._over:
            if not self.ready:  # for a moment, on a machine that is busy
                await asyncio.sleep(LOOK_EVERY_S)
                continue
            turn += 1
            url = sorted(self.ready)[turn % len(self.ready)]
            try:
                answer = await self._http.post(f"{url}/v1/completions", json=body)
                if answer.status_code != 200 or '"error"' in answer.text:
                    self.failures.append(answer.text[-300:])
                if not answer.text.endswith("data: [DONE]\n\n"):
                    self.failures.append("cut: " + answer.text[-100:])
            except httpx.TransportError as error:
                self.failures.append(f"{url}: {error!r}")
            self.answered[url] += 1
