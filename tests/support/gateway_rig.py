"""A gateway through its Host, between a scripted tokenizer and a small real-gRPC retrieval."""

import asyncio
import hashlib
import json
import operator
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import grpc
import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI

from protos import retrieval_pb2 as rpb
from protos import retrieval_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from protos.common_pb2 import FINISH_STOP, Passage, Range, Usage
from protos.tokenizer_pb2 import Pool, Pooled, PromptPlan, PromptRequest, TextDelta
from services.common import retrieval_abilities
from services.common.blobs import Blobs
from services.common.config import (
    GatewaySettings,
    IdentitySettings,
    JobsSettings,
    MeteringSettings,
    PolicySettings,
    RetrievalSettings,
    RunsSettings,
    Settings,
)
from services.common.config.retrieval import ServedEmbedder
from services.common.errors import PenstockError, unavailable
from services.common.link import LinkCall, LinkServer
from services.common.redis import Redis, connect
from services.common.service import Host, Service
from services.common.telemetry.telemetry import decision, remote_parent, traceparent
from services.common.unary import serving
from services.gateway import models
from services.gateway.identity.keys import KeyStore
from services.gateway.server import GatewayService
from tests.support.blob_folder import blob_folder
from tests.support.described import as_described
from tests.support.waiting import leaving_no_task, until

MODEL = "tiny"
EMBEDDING_MODEL = "tiny-embed"

Script = Callable[[LinkCall, PromptRequest], Awaitable[None]]


def plan(request: PromptRequest, passages_used: int | None = None) -> PromptPlan:
    given = len(request.chat.passages)
    used = given if passages_used is None else passages_used
    return PromptPlan(window=512, user=5, template=3, passages_used=used)


def send(call: LinkCall, text: str = "", **fields: Any) -> None:
    call.send(TextDelta(text=text, token_ids=[17], **fields).SerializeToString())


def finish(call: LinkCall, tokens: int = 3, **fields: Any) -> None:
    usage = Usage(prompt_tokens=8, cached_tokens=4, completion_tokens=tokens)
    fields.setdefault("finish", FINISH_STOP)
    call.send(TextDelta(usage=usage, **fields).SerializeToString())


def say(*words: str) -> Script:
    """Answers with these deltas."""

    async def script(call: LinkCall, request: PromptRequest) -> None:
        for index, word in enumerate(words):
            send(call, word, **({"plan": plan(request)} if index == 0 else {}))
            await asyncio.sleep(0)
        finish(call, len(words))

    return script


def length_of(one: Pool.Input) -> int:
    return len(one.text) or len(one.token_ids.ids)


def numbers(pool: Pool, index: int) -> list[float]:
    """What the scripted tokenizer says of an input: scores rise with its length."""
    size = length_of(pool.inputs[index])
    if pool.task == Pool.SCORE:
        return [size / 10 + len(pool.queries) / 100]
    if pool.task == Pool.CLASSIFY:
        return [0.25, 0.75] if size > 3 else [0.625, 0.375]
    return [size, 0.5, -0.5, 7.0][: pool.dimensions or 4]


async def say_numbers(call: LinkCall, request: PromptRequest) -> None:
    """The last input first, each in a delta of its own."""
    pool = request.pool
    left = [i for i in reversed(range(len(pool.inputs))) if i not in request.resume.pooled]
    for index in left:
        delta = TextDelta(checkpoint="c", usage=Usage(prompt_tokens=length_of(pool.inputs[index])))
        values = np.array(numbers(pool, index), "<f4").tobytes()
        delta.pooled.append(Pooled(index=index, values=values))
        if pool.task == Pool.CLASSIFY and index == left[0]:
            delta.labels.extend(["no", "yes"])
        if index == left[-1]:
            delta.finish = FINISH_STOP
        call.send(delta.SerializeToString())


class ScriptedTokenizer(Service):
    """Answers each request as `script` says."""

    name = "tokenizer"
    grpc_services = ("penstock.v1.Tokenizer",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.script: Script = say("Hello", " wor", "ld")
        self.requests: list[PromptRequest] = []
        self.cancelled = 0
        self.links = LinkServer("/penstock.v1.Tokenizer/Link", self._handle)

    async def start(self, server: grpc.aio.Server) -> None:
        tokenizer_pb2_grpc.add_TokenizerServicer_to_server(_Models(), server)
        self.links.add_to(server)

    async def drain(self, grace_s: float) -> None:
        await self.links.drain(grace_s)

    async def _handle(self, call: LinkCall) -> None:
        request = PromptRequest.FromString(call.payload)
        self.requests.append(request)
        call.on_cancel(self._count_cancel)
        with self.telemetry.span("prompt", remote_parent(call.traceparent)) as span:
            await self.script(call, request)
        assert traceparent(span)
        call.end(None, self.telemetry.record(span, [decision("tokenizer", "context", "fits")]))

    def _count_cancel(self) -> None:
        self.cancelled += 1


class _Models(tokenizer_pb2_grpc.TokenizerServicer):
    async def ListModels(self, request: Any, context: Any) -> tokenizer_pb2.ListModelsReply:
        models = [
            tokenizer_pb2.ModelInfo(name=name, window=512, created=1_700_000_000, sampling=own)
            for name, own in ((MODEL, {}), ("other", {"temperature": 0.25}))
        ]
        return tokenizer_pb2.ListModelsReply(models=models)


class SmallRetrieval(Service):
    """Whole documents as passages, found by the words they share with the query."""

    name = "retrieval"
    grpc_services = ("penstock.v1.Retrieval",)
    embedder = "e1"
    further: ClassVar[dict[str, str]] = {"wide": "w1"}  # fingerprints of further models, by name

    async def start(self, server: grpc.aio.Server) -> None:
        self.servicer = _Retrieval(self)
        self.hold = asyncio.Event()
        self.hold.set()  # cleared: searches and indexing wait
        self.failure: PenstockError | None = None
        self.hold_index = asyncio.Event()
        self.hold_index.set()  # cleared: indexing waits, and nothing else does
        self.late_failure: PenstockError | None = None  # of an index call that has been done
        retrieval_pb2_grpc.add_RetrievalServicer_to_server(self.servicer, server)

    abilities = retrieval_abilities.ALL

    def describe(self) -> dict[str, str]:
        known = retrieval_abilities.told(self.abilities)
        each = {EMBEDDING_MODEL: self.embedder, **self.further}
        told = {name: {"fingerprint": one, "max_chunk_tokens": 0} for name, one in each.items()}
        return {
            "embedding_model": EMBEDDING_MODEL,
            "embedder": self.embedder,
            "embedders": json.dumps(told),
            **known,
        }


class _Retrieval(retrieval_pb2_grpc.RetrievalServicer):
    def __init__(self, service: SmallRetrieval) -> None:
        self._service = service
        self.documents: dict[tuple[str, str, str], rpb.IndexRequest] = {}
        self.embedders: dict[tuple[str, str, str], str] = {}
        self.texts: dict[str, str] = {}  # by blob
        self.calls = 0
        self.shown = b""  # the certificate of the last caller of Embed
        self.policy: str | None = None  # the version that is known; None: any
        self.searches: list[rpb.SearchRequest] = []
        self.by_words: list[str] = []  # collections of an earlier embedding model
        self.incomplete = False  # some of that cannot be read

    async def _gate(self, policy: str = "") -> None:
        self.calls += 1
        if self.policy not in (None, policy):
            raise unavailable("another policy", stage="retrieval", reason="other_policy")
        await self._service.hold.wait()
        if self._service.failure is not None:
            raise self._service.failure

    async def Embed(self, request: rpb.EmbedRequest, context: Any) -> rpb.EmbedReply:
        async with serving(self._service.telemetry, context, "embed"):
            (self.shown,) = context.auth_context().get("x509_pem_cert", (b"",))
            await self._gate(request.policy)
            vectors = [
                rpb.Vector(values=[b / 255 for b in hashlib.sha256(text.encode()).digest()[:8]])
                for text in request.texts
            ]
        return rpb.EmbedReply(model=EMBEDDING_MODEL, vectors=vectors, tokens=len(request.texts))

    async def Judge(self, request: rpb.JudgeRequest, context: Any) -> rpb.JudgeReply:
        """Locks are what its rule, "locks", is about."""
        async with serving(self._service.telemetry, context, "judge"):
            await self._gate(request.policy)
        reply = rpb.JudgeReply()
        for index, one in enumerate(request.texts):
            if "lock" in one.text.split():
                reply.matches.add(rule="locks", text=index, score=0.75)
        return reply

    async def Search(self, request: rpb.SearchRequest, context: Any) -> rpb.SearchReply:
        async with serving(self._service.telemetry, context, "search"):
            self.searches.append(request)
            await self._gate(request.policy)
            words = set(request.query.lower().split())
            found = []
            for (tenant, collection, source), document in self.documents.items():
                if tenant == request.caller.tenant and collection in request.collections:
                    text = self.texts[document.blob]
                    shared = len(words & set(text.lower().split())) / max(1, len(words))
                    if shared > request.score_threshold and _selects(request, document):
                        found.append(
                            Passage(
                                title=document.title,
                                text=text,
                                score=shared,
                                source_id=source,
                                attributes=document.attributes,
                                pages=Range(first=2, last=3) if ".pdf" in document.title else None,
                            )
                        )
        found.sort(key=lambda passage: -passage.score)
        return rpb.SearchReply(
            passages=found[: request.limit],
            tokens=len(request.query.split()),
            by_words=set(self.by_words) & set(request.collections),
            incomplete=self.incomplete,
        )

    async def Index(self, request: rpb.IndexRequest, context: Any) -> None:
        async with serving(self._service.telemetry, context, "index"):
            await self._gate(request.policy)
            # As a replica that does not hear that the call was given up, or hears it too late.
            await asyncio.shield(asyncio.create_task(self._service.hold_index.wait()))
            text = await self._text(request.blob) if request.blob else ""
            self.texts[request.blob] = text
            key = (request.caller.tenant, request.collection, request.source_id)
            service = self._service
            embedder = service.further.get(request.embedder, service.embedder)
            is_there = request.reindexing and self.embedders.get(key) == embedder
            self.embedders[key] = embedder
            there = self.documents.get(key)
            if there is None or there.revision <= request.revision:
                self.documents[key] = request
            if self._service.late_failure is not None:
                raise self._service.late_failure
            tokens = 0 if is_there else len(text.split())
            reply = rpb.IndexReply(chunks=1, tokens=tokens, embedder=embedder)
            await context.write(rpb.IndexNews(reply=reply))

    async def _text(self, blob: str) -> str:
        blobs = Blobs.of(self._service.settings)
        return b"".join([piece async for piece in blobs.read(blob)]).decode()

    async def Read(self, request: rpb.ReadRequest, context: Any) -> None:
        async with serving(self._service.telemetry, context, "read"):
            await self._gate(request.policy)
            text, at = await self._text(request.blob), 0
            for piece in (text[:7], text[7:]):
                await context.write(rpb.ReadPiece(at=at, text=piece))
                at += len(piece)

    async def Remove(self, request: rpb.RemoveRequest, context: Any) -> rpb.RemoveReply:
        async with serving(self._service.telemetry, context, "remove"):
            await self._gate()
            gone = [
                key
                for key, document in self.documents.items()
                if key[0] == request.caller.tenant
                and key[1] == request.collection
                and request.source_id in ("", key[2])
                and (not request.revision or document.revision <= request.revision)
            ]
            for key in gone:
                del self.documents[key]
        return rpb.RemoveReply(chunks=len(gone))

    async def SetAttributes(self, request: rpb.SetAttributesRequest, context: Any) -> Any:
        async with serving(self._service.telemetry, context, "set_attributes"):
            await self._gate()
            key = (request.caller.tenant, request.collection, request.source_id)
            if key in self.documents:
                self.documents[key].ClearField("attributes")
                self.documents[key].MergeFrom(rpb.IndexRequest(attributes=request.attributes))
        return rpb.SetAttributesReply()


def _selects(request: rpb.SearchRequest, document: rpb.IndexRequest) -> bool:
    return not request.HasField("filter") or _matches(request.filter, document)


def _matches(filter: rpb.Filter, document: rpb.IndexRequest) -> bool:
    if filter.HasField("compound"):
        each = [_matches(one, document) for one in filter.compound.filters]
        return any(each) if filter.compound.any else all(each)
    one = filter.comparison
    there = document.attributes.get(one.key) if one.key in document.attributes else None
    equal = there in one.values
    match rpb.Filter.Operator.Name(one.operator):
        case "EQ" | "IN":
            return equal
        case "NE" | "NIN":
            return not equal
        case name:
            compare = getattr(operator, name.lower().replace("te", "e"))
            return there is not None and compare(there.number, one.values[0].number)


@dataclass
class Rig:
    settings: Settings
    redis: Redis
    keys: KeyStore
    key: str
    host: Host
    tokenizer: ScriptedTokenizer
    tokenizer_host: Host
    retrieval: SmallRetrieval
    retrieval_host: Host
    stack: AsyncExitStack

    @property
    def gateway(self) -> Any:
        return self.host.service.gateway  # type: ignore[attr-defined]

    @property
    def url(self) -> str:
        assert self.host.replica is not None
        return self.host.replica.facts["url"]

    async def http(self, key: str | None = None) -> httpx.AsyncClient:
        client = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key or self.key}"},
            timeout=20,
            event_hooks={"response": [as_described]},
        )
        return await self.stack.enter_async_context(client)

    async def openai(self, key: str | None = None) -> AsyncOpenAI:
        client = AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=key or self.key, max_retries=0, timeout=20
        )
        return await self.stack.enter_async_context(client)

    async def channel(self) -> grpc.aio.Channel:
        assert self.host.replica is not None
        channel = grpc.aio.insecure_channel(self.host.replica.facts["grpc"])
        return await self.stack.enter_async_context(channel)

    async def start(self, service: type[Service], settings: Settings | None = None) -> Host:
        host = Host(service, settings or self.settings)
        await host.start()
        self.stack.push_async_callback(host.stop, 0)
        return host

    async def record(self, request_id: str) -> dict[str, Any]:
        """The request's record, once the gateway keeps it."""
        http = await self.http()

        async def kept() -> bool:
            return (await http.get(f"/v1/requests/{request_id}")).status_code == 200

        await until(kept, 5, "the record is kept")
        return dict((await http.get(f"/v1/requests/{request_id}")).json())


@asynccontextmanager
async def gateway_rig(
    redis_url: str,
    namespace: str,
    *,
    retrieval_timeout_s: float = 5.0,
    tls_dir: Path | None = None,
    identity: IdentitySettings | None = None,
    metering: MeteringSettings | None = None,
    runs: RunsSettings | None = None,
    jobs: JobsSettings | None = None,
    policy: PolicySettings | None = None,
    served_embedders: dict[str, ServedEmbedder] | None = None,
    **gateway: Any,
) -> AsyncIterator[Rig]:
    """Everything registered, linked and ready; `gateway` are GatewaySettings."""
    settings = Settings(
        tls_dir=tls_dir,
        redis_url=redis_url,
        blobs_url=blob_folder().as_uri(),
        namespace=namespace,
        lease_s=3.0,  # a busy loop must not lose the tokenizer by it
        log_level="WARNING",
        identity=identity or IdentitySettings(),
        gateway=GatewaySettings(**{"port": 0, "retrieval_patience_s": 1.0, **gateway}),
        metering=metering or MeteringSettings(),
        runs=runs or RunsSettings(),
        jobs=jobs or JobsSettings(),
        policy=policy or PolicySettings(),
        retrieval=RetrievalSettings(
            timeout_s=retrieval_timeout_s, served_embedders=served_embedders or {}
        ),
    )
    async with leaving_no_task(), AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for patience in ("_PATIENCE_S", "_TIMEOUT_S"):  # wherever the tokenizer has no turn
            patch.setattr(models, patience, 60.0)
        redis = connect(redis_url)
        stack.push_async_callback(redis.aclose)
        keys = KeyStore(redis, namespace)
        key, _ = await keys.create("acme", "test")
        hosts: list[Host] = []

        async def stop_all() -> None:
            await asyncio.gather(*(host.stop(0) for host in hosts))

        stack.push_async_callback(stop_all)
        for service in (ScriptedTokenizer, SmallRetrieval, GatewayService):
            host = Host(service, settings)
            await host.start()
            hosts.append(host)
        tokenizer, retrieval, gateway_host = hosts
        rig = Rig(
            settings,
            redis,
            keys,
            key,
            gateway_host,
            tokenizer.service,  # type: ignore[arg-type]
            tokenizer,
            retrieval.service,  # type: ignore[arg-type]
            retrieval,
            stack,
        )
        await until(lambda: rig.gateway.tokenizers.ready(), 10, "the tokenizer is linked")
        yield rig
