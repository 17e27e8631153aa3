"""The tokenizer as a service: one link per gateway in, one per router out."""

import logging
from collections.abc import Awaitable, Mapping

import grpc
from google.protobuf.message import DecodeError

from protos import tokenizer_pb2, tokenizer_pb2_grpc
from protos.common_pb2 import Record
from protos.tokenizer_pb2 import PromptRequest
from services.common.errors import PenstockError, invalid
from services.common.fairness.fair_threads import FairThreads
from services.common.give_back import keep_pages
from services.common.link import LinkCall, LinkServer
from services.common.peers import Peers
from services.common.policy import PolicyFile
from services.common.service import Service
from services.common.telemetry.metrics_server import Page
from services.common.telemetry.spans import Span
from services.common.telemetry.telemetry import remote_parent
from services.tokenizer import metrics
from services.tokenizer.checkpoints.catalog import Catalog
from services.tokenizer.checkpoints.pools import Pools
from services.tokenizer.numbers.pool_prompts import check_pool
from services.tokenizer.numbers.pooled import pool
from services.tokenizer.parts import Pipeline
from services.tokenizer.pipeline import run
from services.tokenizer.tokens import tokens
from services.tokenizer.warming.warming import Warming

log = logging.getLogger(__name__)

_LARGE_BYTES = 8 * 2**20  # a text of 220 KB is tokenized in pieces of 1 MiB, one of 2 MB in 10


class _Unary(tokenizer_pb2_grpc.TokenizerServicer):
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    async def ListModels(
        self, _request: tokenizer_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> tokenizer_pb2.ListModelsReply:
        try:
            return tokenizer_pb2.ListModelsReply(models=await self._catalog.all())
        except PenstockError as error:
            await context.abort(error.code, error.message)
            raise


class TokenizerService(Service):
    """Ready once every listed model's tokenizer is read, or could not be; it does not wait for a
    router. Models that come and go later are read and left meanwhile."""

    name = "tokenizer"
    grpc_services = ("penstock.v1.Tokenizer",)

    _policy: PolicyFile | None = None
    _threads: FairThreads | None = None
    _pools: Pools | None = None
    _catalog: Catalog | None = None
    _routers: Peers | None = None
    _warming: Warming | None = None
    _links: LinkServer | None = None

    async def start(self, server: grpc.aio.Server) -> None:
        """Raises ValueError or OSError that name the rule or file that is wrong."""
        keep_pages(_LARGE_BYTES)
        settings = self.settings.tokenizer
        self._policy = PolicyFile.of_settings(self.settings.policy)
        await self._policy.start()
        self._threads = FairThreads(settings.threads, "tokenizer")
        self._pools = Pools(self.redis, self.settings)
        await self._pools.start()
        self._catalog = Catalog(self.redis, self.settings, self.id, self._pools)
        await self._catalog.start()
        self._routers = Peers(
            self.redis, self.settings, "router", identity="tokenizer", peer_id=self.id
        )
        await self._routers.start()
        self._warming = Warming(
            settings, self.redis, self.settings.namespace, self._routers, self.telemetry
        )
        # Else a request's own parts would fill the queue, and it be refused by an idle router.
        parts_at_once = max(1, self.settings.router.queue_limit)
        self._pipeline = Pipeline(
            self._catalog,
            self._policy,
            self._routers,
            settings.router_patience_s,
            min(settings.pooled_at_once, parts_at_once),
            parts_at_once,
            settings.max_pooled_tokens,
            self.telemetry,
            self._threads,
            self._warming,
        )
        tokenizer_pb2_grpc.add_TokenizerServicer_to_server(_Unary(self._catalog), server)
        self._links = LinkServer(
            "/penstock.v1.Tokenizer/Link", self._serve, max_requests=settings.max_requests
        )
        self._links.add_to(server)
        links = self._links
        metrics.RUNNING.set_function(lambda: links.running)

    def pages(self) -> Mapping[str, Page]:
        return self._policy.pages() if self._policy is not None else {}

    async def _serve(self, call: LinkCall) -> None:
        """Around a request's pipeline: its span, its record, and its end whatever happens."""
        record = Record()
        failure: PenstockError | None = None
        try:
            with self.telemetry.span("tokenizer", remote_parent(call.traceparent)) as span:
                try:
                    await self._work(call, span, record)
                except PenstockError as error:
                    failure = error
                except Exception:
                    log.exception("a request of %s failed", call.peer)
                    failure = PenstockError(grpc.StatusCode.INTERNAL, "the tokenizer failed")
                if failure is not None:
                    failure.stage = failure.stage or self.name
                    span.set_attribute("error", failure.reason or failure.code.name.lower())
        finally:  # a cancelled request has ended already: its spans are taken all the same
            told = self.telemetry.record(span, below=record)
            call.end(failure.to_status() if failure is not None else None, told)
            metrics.REQUESTS.labels(_outcome(call, failure)).inc()

    def _work(self, call: LinkCall, span: Span, record: Record) -> Awaitable[None]:
        """The request is whose work it is: nobody else holds it. Raises PenstockError."""
        request, call.payload = _parse(call.payload), b""
        work = pool if request.HasField("pool") else run
        if request.tokens_only:
            work = tokens
        return work(self._pipeline, call, request, span, record)

    async def drain(self, grace_s: float) -> None:
        if self._links is not None:
            await self._links.drain(grace_s)

    async def stop(self) -> None:
        if self._warming is not None:
            self._warming.stop()
        if self._policy is not None:
            await self._policy.stop()
        if self._catalog is not None:
            await self._catalog.stop()
        if self._pools is not None:
            await self._pools.stop()
        if self._routers is not None:
            await self._routers.stop()
        if self._threads is not None:
            self._threads.stop()


def _parse(payload: bytes) -> PromptRequest:
    try:
        request = PromptRequest.FromString(payload)
    except DecodeError:
        raise invalid("not a PromptRequest", "") from None
    if len(request.stop) > 4 or not all(request.stop):
        raise invalid("at most 4 stop strings, none of them empty", "stop")
    begun = [len(choice.token_ids) for choice in request.resume.choices]
    if request.HasField("pool"):
        check_pool(request.pool)
    elif request.HasField("resume") and not (begun and all(begun)):
        raise invalid("nothing of the answer is there to go on behind", "resume.choices")
    return request


def _outcome(call: LinkCall, failure: PenstockError | None) -> str:
    if call.cancelled:
        return "cancelled"
    return failure.code.name.lower() if failure is not None else "ok"
