"""A model's checkpoint is replaced under load, through real tokenizers and routers: no request
fails, and what a worker computes on was tokenized for its own checkpoint."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from protos.common_pb2 import Caller, Sampling
from protos.tokenizer_pb2 import PromptRequest, TextDelta
from services.common.config import RouterSettings, Settings
from services.common.link import LinkClient
from services.common.redis import Redis
from services.common.served_models import Checkpoint
from services.common.service import Host
from services.router.server import RouterService
from services.tokenizer.server import TokenizerService
from tests.support.fake_worker import FakeWorker, Transfers, continuation
from tests.support.prompts import prompt_of
from tests.support.served import checkpoint_of, listing
from tests.support.tokenizer_bed import METHOD, renumber, write_model
from tests.support.transport import TRANSPORT
from tests.support.waiting import until

TEXT = "What is the pressure of the water? " * 8
TOKENS = 12


def written(folder: Path, *, other_ids: bool) -> Path:
    """A tokenizer; with `other_ids` its tokens are numbered from behind."""
    folder.mkdir()
    write_model(folder)
    if other_ids:
        renumber(folder)
    return folder


@dataclass
class Served:
    """One checkpoint: its workers, and the prompt and answer that it should have."""

    checkpoint: Checkpoint
    workers: list[FakeWorker] = field(default_factory=list)

    @property
    def prompt(self) -> list[int]:
        tokenizer = Tokenizer.from_file(str(Path(self.checkpoint.path) / "tokenizer.json"))
        found: list[int] = tokenizer.encode(TEXT).ids
        return found

    @property
    def answer(self) -> list[int]:
        return continuation(self.prompt, TOKENS, seed=7)

    @property
    def requests(self) -> int:
        return sum(len(worker.requests) for worker in self.workers)


@dataclass
class House:
    settings: Settings
    redis: Redis
    links: list[LinkClient]
    exits: AsyncExitStack
    transfers: Transfers = field(default_factory=Transfers)
    failed: list[str] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    over: bool = False

    async def serve(self, folder: Path) -> Served:
        """Lists it with a prefill and a decode worker."""
        made = Served(checkpoint_of(folder, "tiny"))
        for role in ("prefill", "decode"):
            worker = FakeWorker(
                self.redis,
                self.settings.namespace,
                f"{role}-{folder.name}",
                role,
                transfers=self.transfers,
                model="tiny",
                checkpoint=made.checkpoint.digest,
            )
            worker.replica.facts["began"] = f"{time.time():.3f}"
            made.workers.append(await worker.start())
            self.exits.push_async_callback(worker.stop)
        entry = await listing(self.redis, self.settings, made.checkpoint)
        self.exits.push_async_callback(entry.stop)
        return made

    async def ask(self, link: LinkClient) -> None:
        deltas: list[TextDelta] = []
        request = PromptRequest(
            caller=Caller(request_id="r", tenant="t", priority=2, weight=1),
            model="tiny",
            text=TEXT,
            sampling=Sampling(max_tokens=TOKENS, seed=7, top_p=1),
        )
        opened = link.open(
            request.SerializeToString(),
            deadline=time.monotonic() + 30,
            on_item=lambda payload: deltas.append(TextDelta.FromString(payload)),
        )
        end = await opened.ended()
        if end.status.code:
            self.failed.append(f"{end.status.stage}: {end.status.reason} {end.status.message}")
        self.answers.append([id for delta in deltas for id in delta.token_ids])

    async def ask_on(self, link: LinkClient) -> None:
        while not self.over:
            await self.ask(link)


@pytest.fixture
async def house(redis: Redis, redis_url: str, namespace: str) -> AsyncIterator[House]:
    options: Any = {"split": "always", "split_min_tokens": 1}
    settings = Settings(
        redis_url=redis_url, namespace=namespace, lease_s=1.0, router=RouterSettings(**options)
    )
    async with AsyncExitStack() as exits:
        links = []
        for service in (RouterService, RouterService, TokenizerService, TokenizerService):
            host = Host(service, settings)
            replica = await host.start()
            exits.push_async_callback(host.stop, 0)
            if service is TokenizerService:
                link = LinkClient(replica.address, METHOD, transport=TRANSPORT, peer_id="gateway")
                await link.start()
                exits.push_async_callback(link.close)
                await link.wait_ready(60)
                links.append(link)
        yield House(settings, redis, links, exits)


async def test_no_request_fails_and_none_is_of_both(house: House, tmp_path: Path) -> None:
    old = await house.serve(written(tmp_path / "old", other_ids=False))
    clients = [asyncio.create_task(house.ask_on(link)) for link in house.links for _ in range(4)]
    await until(lambda: len(house.answers) > 20, 30)
    new = await house.serve(written(tmp_path / "new", other_ids=True))
    assert new.prompt != old.prompt
    await until(lambda: new.requests > 20, 30, "new requests are for the new one")
    for worker in old.workers:
        await worker._registration.stop()
        await worker.links.drain(10)
    count = len(house.answers)
    await until(lambda: len(house.answers) > count + 40, 30)
    house.over = True
    await asyncio.gather(*clients)
    assert house.failed == []
    assert all(answer in (old.answer, new.answer) for answer in house.answers)
    assert house.answers[-1] == new.answer
    for served in (old, new):
        for worker in served.workers:
            for work in worker.requests:
                assert work.checkpoint == served.checkpoint.digest
                assert prompt_of(work)[: len(served.prompt)] == served.prompt


async def test_one_that_vanishes_at_once_takes_no_waiting_request_along(
    house: House, tmp_path: Path
) -> None:
    """Without a drain, and with requests that wait for it: they are tokenized anew."""
    old = await house.serve(written(tmp_path / "old", other_ids=False))
    await house.ask(house.links[0])
    assert house.answers == [old.answer]
    for worker in old.workers:
        await worker.kill()
    asked = [asyncio.create_task(house.ask(link)) for link in house.links for _ in range(3)]
    new = await house.serve(written(tmp_path / "new", other_ids=True))
    await asyncio.gather(*asked)
    assert house.failed == []
    assert house.answers[1:] == [new.answer] * len(asked)
