"""The serving end of a link: takes requests, runs a handler for each, gathers what they send."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import grpc
from google.protobuf.message import DecodeError

from protos.common_pb2 import LinkDown, LinkUp, Open
from services.common.discovery import machine_id
from services.common.errors import PenstockError
from services.common.link.call import UNWIND_S, LinkCall
from services.common.link.deadlines import Deadlines
from services.common.link.frames import (
    MAX_PENDING_BYTES,
    PROTOCOL,
    LinkLostError,
    Outbox,
    Status,
    Vitals,
    stage_of,
    status,
)
from services.common.link.local import LocalWire, Wire, offered, read_all, write_all

log = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 1.0  # for the last frames of a drain
CLIENT_BEATS = 5  # without a frame, in `client_timeout_s`


class LinkServer:
    """Serves links under one method of a `grpc.aio` server.

    `handler` runs as a task for each request. Its return ends the request with success, a
    PenstockError with its status, any other exception with INTERNAL, unless `end` was called
    before. When the request is cancelled, so is the task; the request ends when it has unwound.

    `vitals` is asked for with each frame: `pending` counts work that only this replica can move,
    and `steps` must move while there is any; (0, 0) claims nothing.
    `snapshot` is asked at each attach for the news that bring a new peer up to date, and `more` for
    those that may be many: each is made when the link has taken the one before it, among what is
    broadcast meanwhile.
    `max_requests` bounds the requests of all links together; more are refused.
    """

    def __init__(
        self,
        method: str,
        handler: Callable[[LinkCall], Awaitable[None]],
        *,
        vitals: Callable[[], Vitals] = lambda: Vitals(0, 0),
        snapshot: Callable[[], list[bytes]] | None = None,
        more: Callable[[], Iterator[bytes]] = lambda: iter(()),
        max_requests: int = 4096,
        max_pending_bytes: int = MAX_PENDING_BYTES,
        client_timeout_s: float = 15.0,
    ) -> None:
        """A client that sends nothing, pings included, for `client_timeout_s` is taken for lost."""
        self.method = method
        self.stage = stage_of(method)
        self.handler = handler
        self.vitals = vitals
        self.snapshot = snapshot
        self.more = more
        self.max_requests = max_requests
        self.max_pending_bytes = max_pending_bytes
        self.client_timeout_s = client_timeout_s
        self.draining = False
        self.running = 0  # requests that have not ended, over all links
        self.tasks: set[asyncio.Task[None]] = set()
        self._links: set[_Attachment] = set()

    @property
    def links(self) -> int:
        """Attached peers."""
        return len(self._links)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Mounts the method. Call it after `add_<Service>Servicer_to_server`, which would override
        it, and before the server starts."""
        service, name = self.method.strip("/").split("/")
        handlers = {name: grpc.stream_stream_rpc_method_handler(self._serve)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        server.add_registered_method_handlers(service, handlers)

    def broadcast(self, news: bytes) -> None:
        """Sends news to all attached peers, in the frame of this loop turn."""
        for link in self._links:
            link.outbox.frame.news.append(news)
            link.mark(len(news))

    async def drain(self, grace_s: float) -> None:
        """Announces the drain, refuses new requests, and returns when the running ones have ended,
        or after `grace_s`, when it ends the rest with UNAVAILABLE, reason "draining". The links are
        closed then. The health of the server and its port are the caller's.
        """
        self.draining = True
        for link in self._links:
            link.mark()
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=grace_s)
        rest = status(
            grpc.StatusCode.UNAVAILABLE,
            f"{self.stage} was shut down",
            stage=self.stage,
            reason="draining",
        )
        for link in list(self._links):
            link.cancel_all(rest)
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=UNWIND_S)
        flushes = [asyncio.create_task(link.outbox.flushed()) for link in self._links]
        if flushes:
            _, late = await asyncio.wait(flushes, timeout=FLUSH_TIMEOUT_S)
            for flush in late:
                flush.cancel()
        for link in list(self._links):
            link.close("drained")

    async def _serve(
        self, _requests: object, context: "grpc.aio.ServicerContext[bytes, bytes]"
    ) -> None:
        """Runs one peer's link to its end."""
        link = _Attachment(self, context)
        why = ""
        try:
            await link.say_hello()
            self._links.add(link)
            async with asyncio.TaskGroup() as group:
                for part in (link.read(), link.write(), link.watch(), link.tell_more()):
                    group.create_task(part)
        except* (LinkLostError, grpc.aio.InternalError) as lost:  # the latter: gRPC lost the peer
            why = str(lost.exceptions[0])
        finally:
            self._links.discard(link)
            link.cancel_all(_link_lost(self.stage))
            link.leave()
        log.info("link from %s: %s", link.peer or context.peer(), why)
        with contextlib.suppress(grpc.aio.InternalError):  # nobody may be left to tell
            await context.abort(grpc.StatusCode.UNAVAILABLE, why)


class _Attachment:
    """One attached peer."""

    def __init__(
        self, server: LinkServer, context: "grpc.aio.ServicerContext[bytes, bytes]"
    ) -> None:
        self.peer = ""
        self.outbox = Outbox(LinkDown)
        self._server = server
        self._wire: Wire = context
        self._calls: dict[int, LinkCall] = {}
        self._deadlines = Deadlines(self._end_late)
        self._heard = False
        self._more: Iterator[bytes] = iter(())
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def say_hello(self) -> None:
        """Checks the peer's first frame, and prepares the first of this end."""
        try:
            async with asyncio.timeout(self._server.client_timeout_s):
                frame = _decode(await self._wire.read())
        except TimeoutError:
            raise LinkLostError("no hello") from None
        if self._server.draining:
            raise LinkLostError("draining")
        if frame.hello.protocol != PROTOCOL:
            raise LinkLostError(f"hello with protocol {frame.hello.protocol}, not {PROTOCOL}")
        if frame.open or frame.cancel or frame.ping:
            raise LinkLostError("more than a hello in the first frame")
        self.peer = frame.hello.peer
        if frame.hello.host == machine_id():
            await self._step_aside()
        for news in self._server.snapshot() if self._server.snapshot is not None else ():
            self.outbox.frame.news.append(news)
            self.outbox.mark(len(news))
        self._more = self._server.more()
        self.outbox.mark()

    async def _step_aside(self) -> None:
        """Lets the peer, which is on this host, come to a socket, and goes on there; on the stream
        where there can be none."""
        try:
            async with offered() as (beside, coming):
                await self._wire.write(LinkDown(beside=beside).SerializeToString())
                try:
                    async with asyncio.timeout(self._server.client_timeout_s):
                        self._wire = await coming
                except TimeoutError:
                    raise LinkLostError("did not come to its socket") from None
        except OSError as error:  # no folder, or too long a path to it, or too many open files
            log.warning("no socket for %s: %s", self.peer, error)

    def leave(self) -> None:
        """What was written arrives still."""
        if isinstance(self._wire, LocalWire):
            self._wire.close()

    async def read(self) -> None:
        await read_all(self._wire, lambda raw: self._receive(_decode(raw)))

    async def tell_more(self) -> None:
        while True:
            await self.outbox.flushed()
            if (news := next(self._more, None)) is None:
                return
            self.outbox.frame.news.append(news)
            self.mark(len(news))

    async def write(self) -> None:
        await write_all(self._wire, self.outbox, self._sealed)

    def _receive(self, frame: LinkUp) -> None:
        self._heard = True
        if frame.HasField("hello"):
            raise LinkLostError("a second hello")
        if frame.ping:
            self.outbox.frame.pong = frame.ping
            self.mark()
        for opened in frame.open:
            self._open(opened)
        for id in frame.cancel:
            call = self._calls.get(id)
            if call is not None:
                call._cancel(_cancelled(self._server.stage))

    def _sealed(self, frame: LinkDown) -> bytes:
        vitals = self._server.vitals()
        frame.vitals.steps, frame.vitals.pending = vitals.steps, vitals.pending
        frame.vitals.step_ms = min(round(vitals.step_s * 1000), 2**32 - 1)
        frame.draining = self._server.draining
        return bytes(frame.SerializeToString())

    async def watch(self) -> None:
        """Ends the link when told to, or when the client has fallen silent.

        Time is counted in beats of this loop, see `PeerHealth`.
        """
        beats = 0
        while not self._over.done() and beats < CLIENT_BEATS:
            self._heard = False
            beat_s = self._server.client_timeout_s / CLIENT_BEATS
            await asyncio.wait([self._over], timeout=beat_s)
            beats = 0 if self._heard else beats + 1
        raise LinkLostError(self._over.result() if self._over.done() else "silent")

    def mark(self, payload_bytes: int = 0) -> None:
        """To call after each change of the outgoing frame; drops the link of a stuck reader."""
        self.outbox.mark(payload_bytes)
        if self.outbox.pending_bytes > self._server.max_pending_bytes and not self._over.done():
            self.close("the peer does not read")
            # Not here: the caller may be in the middle of its own bookkeeping.
            asyncio.get_running_loop().call_soon(self.cancel_all, _link_lost(self._server.stage))

    def close(self, why: str) -> None:
        if not self._over.done():
            self._over.set_result(why)

    def cancel_all(self, why: Status) -> None:
        for call in list(self._calls.values()):
            call._cancel(why)

    def forget(self, call: LinkCall) -> None:
        if call._timer is not None:
            call._timer.cancel()
        self._deadlines.drop(call._id)
        del self._calls[call._id]
        self._server.running -= 1

    def _open(self, opened: Open) -> None:
        server = self._server
        if opened.id == 0 or opened.id in self._calls:
            raise LinkLostError(f"bad request id {opened.id}")
        refusal = self._refusal(opened)
        if refusal is not None:
            self.outbox.frame.ends.add(id=opened.id, status=refusal)
            self.mark()
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + opened.deadline_ms / 1000
        call = self._calls[opened.id] = LinkCall(self, opened, deadline)
        server.running += 1
        self._deadlines.put(opened.id, deadline)
        call._task = loop.create_task(self._run(call))
        server.tasks.add(call._task)
        call._task.add_done_callback(partial(self._ran, call))

    def _end_late(self, id: int) -> None:
        stage = self._server.stage
        why = f"{stage} did not finish in time"
        late = status(grpc.StatusCode.DEADLINE_EXCEEDED, why, stage=stage, reason="deadline")
        self._calls[id]._cancel(late)

    def _ran(self, call: LinkCall, task: asyncio.Task[None]) -> None:
        self._server.tasks.discard(task)
        # A task cancelled before its first step runs nothing, so nothing in it can end the request.
        if not call._ended:
            call.end(_cancelled(self._server.stage))

    def _refusal(self, opened: Open) -> Status | None:
        stage = self._server.stage
        if self._server.draining:
            code, message, reason = grpc.StatusCode.UNAVAILABLE, f"{stage} is draining", "draining"
        elif self._server.running >= self._server.max_requests:
            code, reason = grpc.StatusCode.RESOURCE_EXHAUSTED, "too_many_requests"
            message = f"{stage} runs {self._server.running} requests, its limit"
        elif not opened.deadline_ms:
            code, message = grpc.StatusCode.INVALID_ARGUMENT, "a request needs a deadline"
            reason = "deadline"
        else:
            return None
        return status(code, message, stage=stage, reason=reason)

    async def _run(self, call: LinkCall) -> None:
        stage = self._server.stage
        try:
            await self._server.handler(call)
            call.end()
        except PenstockError as error:
            why = error.to_status()
            why.stage = why.stage or stage
            call.end(why)
        except Exception:
            log.exception("a request of %s failed", self.peer)
            message = f"{stage} failed on this request"
            call.end(status(grpc.StatusCode.INTERNAL, message, stage=stage, reason="internal"))
        except asyncio.CancelledError:  # of a request not cancelled: the handler's own doing
            call.end(_cancelled(stage))
            raise


def _cancelled(stage: str) -> Status:
    return status(grpc.StatusCode.CANCELLED, "cancelled", stage=stage, reason="cancelled")


def _link_lost(stage: str) -> Status:
    """What a request's end says when nobody is left to read it."""
    return status(grpc.StatusCode.UNAVAILABLE, "link lost", stage=stage, reason="peer_lost")


def _decode(raw: object) -> LinkUp:
    if not isinstance(raw, bytes):
        raise LinkLostError("closed by the peer")
    try:
        return LinkUp.FromString(raw)
    except DecodeError:
        raise LinkLostError("sent a frame that cannot be decoded") from None
