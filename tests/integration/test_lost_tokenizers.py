"""Tokenizers are lost under a gateway: the client's answer is what it would have been.

The gateway and the tokenizers are real; a scripted router tells the story behind them.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio

from protos.router_pb2 import GenerateRequest
from protos.tokenizer_pb2 import PromptPlan
from protos.worker_pb2 import TokenDelta
from services.common.config import GatewaySettings, PolicySettings, Settings
from services.common.embedded_redis import EmbeddedRedis
from services.common.link import LinkCall
from services.common.policy import Policy, load_rules
from services.common.redis import connect
from services.common.service import Host
from services.gateway.identity.keys import KeyStore
from services.gateway.runs.text_stream import MAX_LOSSES
from services.gateway.server import GatewayService
from services.tokenizer.answers.detokenizer import detokenizer_factory
from services.tokenizer.answers.output import Output
from services.tokenizer.prompts.context import Prompt
from services.tokenizer.server import TokenizerService
from tests.support.link_peers import links_made_anew_at_once
from tests.support.served import checkpoint_of, listing
from tests.support.streams import Stream
from tests.support.tokenizer_bed import TOKENIZER, Story, cut_off, ids, router_class, write_model
from tests.support.waiting import until

TEXT = "The water 東京 🚰 is\n\nUse here.\n\nUser: and more"
STOP = "\n\nUser"
NEW = detokenizer_factory(TOKENIZER)
ASK: dict[str, Any] = {"model": "tiny", "prompt": "What is it?", "max_tokens": 90}


@dataclass
class House:
    """A gateway, its tokenizers and a router."""

    settings: Settings
    tokenizers: list[Host]
    gateway: Host
    api: httpx.AsyncClient
    story: Story

    async def tell(self, call: LinkCall, request: GenerateRequest) -> None:
        await self.story(call, request)

    def linked(self) -> list[Any]:
        return list(self.gateway.service.gateway.tokenizers.ready())  # type: ignore[attr-defined]

    def busy(self) -> TokenizerService:
        """The tokenizer that runs the request."""
        (busy,) = (h.service for h in self.tokenizers if h.service._links.running)  # type: ignore[attr-defined]
        assert isinstance(busy, TokenizerService)
        return busy

    async def lose(self, lost: TokenizerService, how: str = "lost") -> None:
        assert lost._links is not None
        if how == "draining":
            await lost._links.drain(0)
        else:
            cut_off(lost._links)

    async def stream(self, story: Story, **fields: Any) -> Stream:
        self.story = story
        await until(lambda: len(self.linked()) == len(self.tokenizers), what="tokenizers linked")
        return Stream(self.api, {**ASK, **fields})


async def paused(stream: Stream, story: Story, stops: Sequence[str] = (), times: int = 1) -> None:
    """Returns once the story has come to its pause, for the `times`-th time, and the client has
    all the text before it.
    """
    assert story.pauses_before is not None
    text = given_after(story.pauses_before, stops)
    await until(lambda: (story.pauses, story.waiting, stream.text) == (times, 1, text))


async def house(
    folder: Path, redis_url: str, namespace: str, tokenizers: int, policy: str = "", **gateway: Any
) -> AsyncIterator[House]:
    write_model(folder)
    (folder / "policy.yaml").write_text(policy or "rules: []")
    settings = Settings(
        redis_url=redis_url,
        namespace=namespace,
        lease_s=1.0,
        policy=PolicySettings(file=folder / "policy.yaml", look_every_s=0.05),
        gateway=GatewaySettings(port=0, **gateway),
    )
    async with AsyncExitStack() as stack:
        redis = connect(redis_url)
        stack.push_async_callback(redis.aclose)
        listed = await listing(redis, settings, checkpoint_of(folder, "tiny"))
        stack.push_async_callback(listed.stop)

        async def tell(call: LinkCall, request: GenerateRequest) -> None:
            await made.tell(call, request)

        async def started(service: Any) -> Host:
            host = Host(service, settings)
            await host.start()
            stack.push_async_callback(host.stop, 0)
            return host

        await started(router_class(tell))
        hosts = [await started(TokenizerService) for _ in range(tokenizers)]
        front = await started(GatewayService)
        key, _ = await KeyStore(redis, namespace).create("acme", "test")
        assert front.replica is not None
        api = httpx.AsyncClient(
            base_url=front.replica.facts["url"],
            headers={"Authorization": f"Bearer {key}"},
            timeout=30,
        )
        await stack.enter_async_context(api)
        made = House(settings, hosts, front, api, Story(""))
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(
    tmp_path_factory: pytest.TempPathFactory, redis_server: EmbeddedRedis
) -> AsyncIterator[House]:
    folder = tmp_path_factory.mktemp("two")
    with links_made_anew_at_once():
        async for made in house(folder, redis_server.url, "two-tokenizers", 2):
            yield made


@pytest.fixture
async def one(tmp_path: Path, redis_url: str, namespace: str) -> AsyncIterator[House]:
    async for made in house(tmp_path, redis_url, namespace, 1):
        yield made


def given_after(tokens: int, stops: Sequence[str]) -> str:
    """The text that so many tokens of the story let out."""
    output = Output(NEW(), stops, Prompt(np.array([1], np.uint32), 90, PromptPlan(), b"", ""))
    told = [output.push(TokenDelta(token_ids=[id])) for id in ids(TEXT)[:tokens]]
    return "".join(delta.text for delta in told if delta is not None)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("stops", [[], [STOP]], ids=["to its length", "to a stop string"])
async def test_wherever_a_tokenizer_is_lost_the_answer_is_the_same(
    two: House, stops: list[str]
) -> None:
    # Before the first token, within characters, within stop strings.
    undisturbed = await two.stream(Story(TEXT), stop=stops)
    expected = await undisturbed.finished()
    assert expected == (TEXT.split(STOP)[0] if stops else TEXT)
    assert undisturbed.usage is not None
    tokens = undisturbed.usage["completion_tokens"]
    for position in range(tokens):
        story = Story(TEXT, pauses_before=position)
        stream = await two.stream(story, stop=stops)
        await paused(stream, story, stops)
        await two.lose(two.busy())
        story.gate.set()
        assert await stream.finished() == expected, position
        assert (stream.finish_reason, stream.usage) == (
            undisturbed.finish_reason,
            undisturbed.usage,
        ), position
        assert stream.plan == undisturbed.plan
        record = await stream.record()
        (went_on,) = [d for d in record["decisions"] if d["subject"] == "tokenizer"]
        assert went_on["reasons"]["lost"].startswith("tokenizer ")
        assert went_on["reasons"]["lost"] != went_on["choice"]
        assert record["tokens"] == tokens


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("position", [0, 7])
async def test_both_tokenizers_are_lost_one_after_the_other(two: House, position: int) -> None:
    story = Story(TEXT, pauses_before=position)
    stream = await two.stream(story)
    for loss in range(2):
        await paused(stream, story, times=loss + 1)
        await two.lose(two.busy())
    await paused(stream, story, times=3)
    story.gate.set()
    assert await stream.finished() == TEXT


@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_that_tokenizers_die_of_ends(two: House) -> None:
    story = Story(TEXT, pauses_before=7)
    stream = await two.stream(story)
    for loss in range(MAX_LOSSES + 1):
        await paused(stream, story, times=loss + 1)
        await two.lose(two.busy())
    error = await stream.error()
    assert (error["stage"], error["code"]) == ("tokenizer", "peer_lost")
    assert TEXT.startswith(stream.text)
    assert stream.text


@pytest.mark.asyncio(loop_scope="module")
async def test_an_answer_that_is_not_streamed_goes_on_too(two: House) -> None:
    two.story = story = Story(TEXT, pauses_before=9)
    await until(lambda: len(two.linked()) == 2)
    asked = asyncio.create_task(two.api.post("/v1/completions", json=ASK))
    await until(lambda: story.waiting == 1)
    await two.lose(two.busy())
    story.gate.set()
    answer = (await asked).json()
    assert answer["choices"][0]["text"] == TEXT
    assert answer["usage"]["completion_tokens"] == len(ids(TEXT))


@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_lost_behind_the_finish_is_no_error(two: House) -> None:
    told = asyncio.Event()

    class Silent(Story):
        async def __call__(self, call: LinkCall, request: GenerateRequest) -> None:
            await super().__call__(call, request)
            told.set()
            await asyncio.Event().wait()  # its end, and so its tokenizer's, does not come

    stream = await two.stream(Silent(TEXT))
    await told.wait()
    await until(lambda: stream.text == TEXT)
    await two.lose(two.busy())
    assert await stream.finished() == TEXT
    assert stream.usage is not None
    assert stream.usage["completion_tokens"] == len(ids(TEXT))
    assert (await stream.record())["status"] == "ok"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_changed_policy_does_not_cut_what_it_had_allowed(two: House) -> None:
    story = Story(TEXT, pauses_before=7)
    stream = await two.stream(story)
    await paused(stream, story)
    everything = Policy.of(load_rules(b"rules: [{name: all, pattern: .}]"))
    files = [h.service._pipeline.policy for h in two.tokenizers]  # type: ignore[attr-defined]
    before = [file.current for file in files]
    try:
        for file in files:
            file.current = everything
        await two.lose(two.busy())
        story.gate.set()
        assert await stream.finished() == TEXT
        refused = await two.api.post("/v1/completions", json=ASK)
        assert refused.json()["error"]["code"] == "content_policy"
    finally:
        for file, policy in zip(files, before, strict=True):
            file.current = policy


async def test_a_drain_at_the_end_of_its_grace_moves_what_still_runs(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    async for made in house(tmp_path, redis_url, namespace, 2):
        story = Story(TEXT, pauses_before=7)
        stream = await made.stream(story)
        await paused(stream, story)
        await made.lose(made.busy(), "draining")
        story.gate.set()
        assert await stream.finished() == TEXT


async def test_the_only_tokenizer_is_waited_for(one: House) -> None:
    story = Story(TEXT, pauses_before=7)
    stream = await one.stream(story)
    await paused(stream, story)
    await one.tokenizers[0].stop(grace_s=0)
    await until(lambda: not one.linked())
    story.gate.set()
    other = Host(TokenizerService, one.settings)
    await other.start()
    try:
        assert await stream.finished() == TEXT
    finally:
        await other.stop(grace_s=0)


async def test_no_tokenizer_within_the_patience_is_an_error_that_names_it(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    async for made in house(tmp_path, redis_url, namespace, 1, tokenizer_patience_s=0.0):
        story = Story(TEXT, pauses_before=7)
        stream = await made.stream(story)
        await paused(stream, story)
        await made.lose(made.busy())
        error = await stream.error()
        assert (error["stage"], error["code"]) == ("tokenizer", "no_replica")
