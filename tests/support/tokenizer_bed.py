"""The tokenizer service over its links: a gateway's end in front, scripted routers behind."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import grpc

from protos.common_pb2 import FINISH_LENGTH, Caller, Passage, Sampling, Usage
from protos.router_pb2 import GenerateRequest
from protos.tokenizer_pb2 import Chat, PromptRequest, TextDelta
from protos.worker_pb2 import TokenDelta
from services.common.config import PolicySettings, Settings, TokenizerSettings
from services.common.errors import PenstockError
from services.common.link import End, LinkCall, LinkClient, LinkServer
from services.common.redis import connect
from services.common.service import Host, Service
from services.common.telemetry.telemetry import decision, remote_parent
from services.common.text.content import said
from services.tokenizer.parts import Pipeline
from services.tokenizer.server import TokenizerService
from tests.support.prompts import prompt_of
from tests.support.served import checkpoint_of, listing
from tests.support.tokenizers import byte_level, write_tokenizer
from tests.support.transport import TRANSPORT
from tests.support.waiting import leaving_no_task, until

TOKENIZER = byte_level()
POLICY = "rules: [{name: secret, pattern: top secret}]"
_SPECIAL, _SIZE = 8, 320  # tokens of it
METHOD = "/penstock.v1.Tokenizer/Link"
Script = Callable[[LinkCall, GenerateRequest], Awaitable[None]]


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text).ids
    return found


class ScriptedRouter(Service):
    """Answers each GenerateRequest as `script` does; keeps the requests and counts the cancels."""

    name = "router"
    grpc_services = ("penstock.v1.Router",)
    script: ClassVar[Script]

    async def start(self, server: grpc.aio.Server) -> None:
        self.requests: list[GenerateRequest] = []
        self.cancelled = 0
        self.links = LinkServer("/penstock.v1.Router/Link", self._serve)
        self.links.add_to(server)

    async def _serve(self, call: LinkCall) -> None:
        request = GenerateRequest.FromString(call.payload)
        self.requests.append(request)
        call.on_cancel(self._count)
        with self.telemetry.span("router", remote_parent(call.traceparent)) as span:
            await type(self).script(call, request)
        record = self.telemetry.record(span, [decision("router", "placement", "here")])
        call.end(None, record)

    def _count(self) -> None:
        self.cancelled += 1

    async def stop(self) -> None:
        await self.links.drain(0)


def says(text: str, pause_before_finish: asyncio.Event | None = None) -> Script:
    """Streams the text's tokens one by one, then finishes with LENGTH."""

    async def script(call: LinkCall, request: GenerateRequest) -> None:
        prompt = len(prompt_of(request))
        for count, id in enumerate(ids(text)):
            delta = TokenDelta(token_ids=[id])
            if count == 0:
                delta.usage.CopyFrom(Usage(prompt_tokens=prompt, cached_tokens=3))
            call.send(delta.SerializeToString())
            await asyncio.sleep(0)
        if pause_before_finish is not None:
            await pause_before_finish.wait()
        usage = Usage(prompt_tokens=prompt, cached_tokens=3, completion_tokens=len(ids(text)))
        call.send(TokenDelta(finish=FINISH_LENGTH, usage=usage).SerializeToString())

    return script


class Story:
    """One answer, told by whichever router is asked, from where the request stands.

    `dies_before`: the routers' links are cut when so many tokens were told, once for each entry.
    `pauses_before`: when so many were told, the rest waits for `gate`.
    """

    def __init__(
        self,
        text: str,
        dies_before: Sequence[int] = (),
        how: str = "lost",
        pauses_before: int | None = None,
    ) -> None:
        self.ids = ids(text)
        self.gate = asyncio.Event()
        self.dies_before = list(dies_before)
        self.how = how
        self.pauses_before = pauses_before
        self.told = 0  # tokens, by all routers together
        self.pauses = 0  # requests that came to the pause
        self.waiting = 0  # and are there now

    async def __call__(self, call: LinkCall, request: GenerateRequest) -> None:
        begun = request.generated_prefix
        prompt = len(prompt_of(request)) - begun
        assert prompt_of(request)[prompt:] == self.ids[:begun]
        most = min(begun + request.sampling.max_tokens, len(self.ids))
        for position in range(begun, most):
            await self._perhaps_die(call, position)
            if position == self.pauses_before:
                await self._pause()
            delta = TokenDelta(token_ids=[self.ids[position]], draft_tokens=2, accepted_tokens=1)
            if position == begun:  # what a second router found cached is its own affair
                delta.usage.CopyFrom(Usage(prompt_tokens=prompt, cached_tokens=9 if begun else 3))
            if position == most - 1:
                delta.finish = FINISH_LENGTH
                delta.usage.CopyFrom(Usage(prompt_tokens=prompt, completion_tokens=most))
            call.send(delta.SerializeToString())
            self.told = position + 1
            await asyncio.sleep(0)
        await self._perhaps_die(call, most)

    async def _pause(self) -> None:
        self.pauses += 1
        self.waiting += 1
        try:
            await self.gate.wait()
        finally:
            self.waiting -= 1

    async def _perhaps_die(self, call: LinkCall, position: int) -> None:
        if position not in self.dies_before:
            return
        self.dies_before.remove(position)
        await asyncio.wait_for(call._link.outbox.flushed(), 5)  # what was told is on its way
        if self.how == "draining":
            await call._link._server.drain(0)
        cut_off(call._link._server)
        await asyncio.Event().wait()


def cut_off(links: LinkServer) -> None:
    """As the death of its process is seen at the other ends."""
    for link in list(links._links):
        link.close("lost")


def router_class(script: Script) -> type[ScriptedRouter]:
    return type("Router", (ScriptedRouter,), {"script": staticmethod(script)})


@dataclass
class Bed:
    """A tokenizer, its routers, and the link of a gateway."""

    settings: Settings
    tokenizer: Host
    routers: list[Host]
    link: LinkClient
    script: Script | None = None  # for tests that change it from request to request
    deltas: list[TextDelta] = field(default_factory=list)

    def router(self, index: int = 0) -> ScriptedRouter:
        service = self.routers[index].service
        assert isinstance(service, ScriptedRouter)
        return service

    @property
    def pipeline(self) -> Pipeline:
        service = self.tokenizer.service
        assert isinstance(service, TokenizerService)
        return service._pipeline

    def open(self, request: PromptRequest, timeout_s: float = 20.0):  # type: ignore[no-untyped-def]
        self.deltas = []
        return self.link.open(
            request.SerializeToString(),
            deadline=time.monotonic() + timeout_s,
            on_item=lambda payload: self.deltas.append(TextDelta.FromString(payload)),
            traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        )

    async def ask(self, request: PromptRequest) -> End:
        return await self.open(request).ended()

    async def refused(self, request: PromptRequest) -> PenstockError:
        end = await self.ask(request)
        assert end.status.code
        return PenstockError.from_status(end.status)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


def renumber(folder: Path) -> None:
    """Numbers its tokens from behind, but for the special ones."""
    path = folder / "tokenizer.json"
    told = json.loads(path.read_text())
    vocabulary = told["model"]["vocab"]
    for token, id in vocabulary.items():
        if id >= _SPECIAL:
            vocabulary[token] = _SIZE - 1 - (id - _SPECIAL)
    path.write_text(json.dumps(told))


def write_model(folder: Path) -> None:
    """What of a checkpoint a tokenizer reads."""
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))


@asynccontextmanager
async def bed(
    folder: Path,
    redis_url: str,
    namespace: str,
    *scripts: Script,
    patience_s: float = 5.0,
    max_requests: int = 2048,
    write: Callable[[Path], None] = write_model,
    policy: str = POLICY,
    generation_config: Literal["auto", "none"] = "auto",
    warm_tokens_per_minute: int = 0,
) -> AsyncIterator[Bed]:
    """A tokenizer between a gateway's link and scripted routers; of which no task is left."""
    write(folder)
    (folder / "policy.yaml").write_text(policy)
    settings = Settings(
        redis_url=redis_url,
        namespace=namespace,
        drain_grace_s=5.0,
        policy=PolicySettings(file=folder / "policy.yaml", look_every_s=0.05),
        tokenizer=TokenizerSettings(
            router_patience_s=patience_s,
            max_requests=max_requests,
            generation_config=generation_config,
            warm_tokens_per_minute=warm_tokens_per_minute,
        ),
    )
    async with leaving_no_task():
        redis = connect(redis_url)
        listed = await listing(redis, settings, checkpoint_of(folder, "tiny"))
        routers = [Host(router_class(script), settings) for script in scripts]
        for router in routers:
            await router.start()
        tokenizer = Host(TokenizerService, settings)
        replica = await tokenizer.start()
        link = LinkClient(replica.address, METHOD, transport=TRANSPORT, peer_id="gateway-test")
        await link.start()
        try:
            await link.wait_ready(60)
            made = Bed(settings, tokenizer, routers, link)
            peers = made.pipeline.routers
            await until(lambda: len(peers.ready()) == len(routers), what="routers linked")
            yield made
        finally:
            await link.close()
            for host in (tokenizer, *routers):
                await host.stop(grace_s=0)
            await listed.stop()
            await redis.aclose()


def question(text: str = "What is it?", **fields: object) -> PromptRequest:
    messages = [said("system", "Be brief."), said("user", text)]
    passages = [Passage(title="T", text="It is water.")]
    return PromptRequest(
        caller=Caller(request_id="r1", tenant="t"),
        model="tiny",
        chat=Chat(messages=messages, passages=passages),
        sampling=Sampling(max_tokens=40, temperature=0.5, seed=7, stop_token_ids=[9]),
        **fields,  # type: ignore[arg-type]
    )
