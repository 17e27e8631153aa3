"""Four gateways as processes of their own, with one Redis: limits hold over all of them, and one
that is killed loses nobody's count."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import pytest_asyncio

from protos.tokenizer_pb2 import PromptRequest
from services.common.config import MeteringSettings
from services.common.embedded_redis import EmbeddedRedis
from services.common.link import LinkCall
from services.gateway.identity.limits import Limit
from services.gateway.metering.ledger import Entry, Ledger
from tests.support.another_gateway import gateways
from tests.support.gateway_rig import MODEL, Rig, finish, gateway_rig, plan, send
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "When does the harbour open?"}],
    "max_tokens": 20,
    "stream": True,
}
PROMPT, BEFORE, ALL = 8, 2, 5  # tokens: of the prompt, that come at once, of the whole answer
METERING = MeteringSettings(lease_s=2.0, prices={MODEL: {"prompt": 2, "output": 10}})  # type: ignore[dict-item]
pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Stack:
    rig: Rig
    processes: list[asyncio.subprocess.Process]
    urls: list[str]
    http: httpx.AsyncClient
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """While it is closed answers have begun and do not end."""

    async def key(self, *limits: Limit) -> str:
        return (await self.rig.keys.create("acme", limits=limits))[0]

    async def ledger(self) -> list[Entry]:
        ledger = Ledger(self.rig.redis, self.rig.settings.namespace)
        return [entry async for entry in ledger.entries()]


@dataclass
class Asked:
    """One stream, as its client sees it."""

    http: httpx.AsyncClient
    url: str
    key: str
    status: int = 0
    id: str = ""
    tokens: int = 0
    ended: bool = False

    async def read(self) -> None:
        headers = {"Authorization": f"Bearer {self.key}"}
        asking = self.http.stream("POST", self.url + CHAT, json=ASK, headers=headers)
        with suppress(httpx.HTTPError):
            async with asking as answer:
                self.id = answer.headers["x-request-id"]
                self.status = answer.status_code
                async for line in answer.aiter_lines():
                    self._take(line)

    def _take(self, line: str) -> None:
        self.ended = self.ended or line == "data: [DONE]"
        if line.startswith("data: {"):
            for choice in json.loads(line[6:]).get("choices", ()):
                self.tokens += len(choice["delta"].get("content") or "")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(redis_server: EmbeddedRedis) -> AsyncIterator[Stack]:
    async with (
        gateway_rig(redis_server.url, "four-gateways", metering=METERING) as rig,
        gateways(rig, 4) as (processes, urls),
        httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=100)) as http,
    ):
        made = Stack(rig, processes, urls, http)

        async def script(call: LinkCall, request: PromptRequest) -> None:
            for number in range(BEFORE):
                known = {"plan": plan(request), "usage": {"prompt_tokens": PROMPT}}
                send(call, "w", **({} if number else known))
            await made.gate.wait()
            for _ in range(BEFORE, ALL):
                send(call, "w")
            finish(call, ALL)

        rig.tokenizer.script = script
        yield made
        made.gate.set()


def limit(of: str, most: float, per: str | None) -> Limit:
    return Limit(name=of, of=of, most=most, per=per)  # type: ignore[arg-type]


async def begun(asked: list[Asked]) -> None:
    """All that were let in have their first tokens."""
    await until(
        lambda: all(one.status not in (0, 200) or one.tokens == BEFORE for one in asked),
        60,
        "each is refused or answered",
    )


async def _held(stack: Stack) -> int:
    """Tokens, of each request while it runs."""
    key = await stack.key(limit("tokens", 1000, "day"))
    headers = {"Authorization": f"Bearer {key}"}
    stack.gate.set()
    answer = await stack.http.post(stack.urls[0] + CHAT, json=ASK, headers=headers)
    return 1000 - int(answer.headers["x-ratelimit-remaining-tokens"])


@pytest.mark.parametrize(
    ("of", "per"),
    [("requests", "day"), ("concurrent", None), ("tokens", "hour"), ("cost", "month")],
)
async def test_a_limit_holds_over_four_processes_to_the_request(
    stack: Stack, of: str, per: str | None
) -> None:
    """Sixty at once, to each gateway fifteen."""
    tokens = await _held(stack)
    assert 25 < tokens < 35
    each = {"tokens": tokens, "cost": (2 * (tokens - 20) + 10 * 20) * 1e-6}.get(of, 1)
    rule = limit(of, 7 * each + (5e-6 if of == "cost" else 0), per)
    stack.gate.clear()
    key = await stack.key(rule)
    asked = [Asked(stack.http, url, key) for _ in range(15) for url in stack.urls]
    reading = [asyncio.create_task(one.read()) for one in asked]
    await begun(asked)
    assert Counter(one.status for one in asked) == {200: 7, 429: 53}
    stack.gate.set()
    await asyncio.gather(*reading)
    assert [one.tokens for one in asked if one.status == 200] == [ALL] * 7


async def test_a_killed_gateway_loses_no_count_and_none_is_made_twice(stack: Stack) -> None:
    """The ledger is what its clients were sent, to the token; what it held comes back."""
    stack.gate.clear()
    key = await stack.key(limit("concurrent", 12, None), limit("requests", 100, "day"))
    before = {entry.entry for entry in await stack.ledger()}
    asked = [Asked(stack.http, url, key) for _ in range(3) for url in stack.urls]
    reading = [asyncio.create_task(one.read()) for one in asked]
    await begun(asked)
    assert {one.status for one in asked} == {200}
    await _told_again(stack, len(asked))
    stack.processes[0].kill()
    await stack.processes[0].wait()
    await until(lambda: sum(task.done() for task in reading) == 3, 20, "its clients are cut off")
    lost = [one for one, task in zip(asked, reading, strict=True) if task.done()]
    assert len({one.url for one in lost}) == 1
    left = [url for url in stack.urls if url != lost[0].url]

    stack.gate.set()
    await asyncio.gather(*reading)
    assert sum(one.ended for one in asked) == 9
    stack.gate.clear()
    more = [Asked(stack.http, left[n % 3], key) for n in range(12)]
    for one in more:  # as many at once as there may be, as soon as the lease of the lost is over
        reading.append(asyncio.create_task(_until_let_in(one)))
    await until(lambda: all(one.tokens == BEFORE for one in more), 60, "all of them are let in")
    stack.gate.set()
    await asyncio.gather(*reading)

    asked += more
    entries = [entry for entry in await stack.ledger() if entry.entry not in before]
    assert {entry.id for entry in entries} == {one.id for one in asked}
    assert len(entries) == len(asked), "each once"
    charged = {entry.id: (entry.status, entry.prompt, entry.output) for entry in entries}
    for one in asked:
        status = "ok" if one.ended else "lost"
        assert charged[one.id] == (status, PROMPT, one.tokens), one
    sent = sum(2 * PROMPT + 10 * one.tokens for one in asked)
    assert sum(entry.nanos for entry in entries) == 1000 * sent


async def _until_let_in(one: Asked) -> None:
    async def let_in() -> bool:
        await one.read()
        return one.status == 200

    await until(let_in, 60, "it is let in")


async def _told_again(stack: Stack, count: int) -> None:
    """All that run now have been told of to Redis since, with what they have used."""
    due = f"{stack.rig.settings.namespace}:{{meter}}:due"
    last: dict[str, float] = {}
    renewed: Counter[str] = Counter()

    async def all_twice() -> bool:
        for id, score in await stack.rig.redis.zrange(due, 0, -1, withscores=True):
            renewed[id] += last.get(id) != score
            last[id] = score
        return sum(times > 2 for times in renewed.values()) == count

    await until(all_twice, 30, "leases are renewed")
