"""The caller's end of a link: connects, watches the peer's health, and carries requests."""

import asyncio
import enum
import itertools
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError

from protos.common_pb2 import Beside, Hello, LinkDown, LinkUp
from services.common.discovery import machine_id
from services.common.link.deadlines import Deadlines
from services.common.link.frames import (
    MAX_FRAME_BYTES,
    MAX_PENDING_BYTES,
    PROTOCOL,
    End,
    LinkLostError,
    Outbox,
    Status,
    Vitals,
    stage_of,
    status,
)
from services.common.link.health import PeerHealth
from services.common.link.local import LocalWire, Wire, read_all, taken, write_all
from services.common.transport import Transport, end_call

log = logging.getLogger(__name__)

T = TypeVar("T")

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.enable_retries", 0),  # a request is retried by who knows what it has already sent
    # One connection per link, and none of gRPC's own back-off, which subchannels would share.
    ("grpc.use_local_subchannel_pool", 1),
]

ACCOUNT_S = 0.1  # of a request's time, for the peer's end to travel
STOP_TIMEOUT_S = 2.0  # for the peer's end of a request that has given all that is wanted
EXPECTED_LOSSES = (LinkLostError, grpc.aio.AioRpcError, asyncio.InvalidStateError)


class LinkState(enum.Enum):
    CONNECTING = "connecting"  # never reached yet
    READY = "ready"  # the only state that takes requests
    DRAINING = "draining"  # running requests finish, new ones are refused
    DEAD = "dead"  # lost, silent or stalled; reconnecting or waiting for its steps to move
    CLOSED = "closed"


@dataclass(frozen=True)
class LinkOptions:
    """Times in seconds."""

    connect_timeout_s: float = 5.0  # until the peer's first frame
    heartbeat_s: float = 1.0
    heartbeat_timeout_s: float = 5.0  # without any frame
    stall_timeout_s: float = 10.0  # `steps` unmoved while `pending` is not 0; see Vitals.patience_s
    backoff_s: float = 0.1  # before the second attempt; doubles, with jitter
    backoff_max_s: float = 5.0
    max_pending_bytes: int = MAX_PENDING_BYTES


@dataclass
class LinkCounters:
    """Since the link was made; for metrics."""

    connects: int = 0
    frames: int = 0
    items: int = 0
    strays: int = 0  # items and ends of unknown requests, mostly of just cancelled ones


class LinkRequest:
    """One opened request. Made by `LinkClient.open`.

    `outcome` is what `ended` gives, as a future: for whoever waits for several things, which would
    take a task for each request. It is not to be cancelled.
    """

    def __init__(self, link: "LinkClient", id: int, on_item: Callable[[bytes], None]) -> None:
        self.id = id
        self._link = link
        self._on_item = on_item
        self.outcome: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self._settles = False  # its peer is ending it: what is late then is no fault

    async def ended(self) -> End:
        """The request's end, from the peer or made here; may be awaited any number of times.

        Cancelling the waiting task does not cancel the request: call `cancel()`.
        """
        if not self.outcome.done():
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            wake = partial(_wake, waiting)
            self.outcome.add_done_callback(wake)
            try:  # asyncio.shield takes three times the memory, of each stream
                await waiting
            finally:
                self.outcome.remove_done_callback(wake)
        return self.outcome.result()

    def cancel(self) -> None:
        """Ends the request here and now with CANCELLED and tells the peer; no item follows.

        Does nothing when the request has ended.
        """
        if not self.outcome.done():
            self._link._withdraw(self, grpc.StatusCode.CANCELLED, "cancelled", "cancelled")

    def stop(self) -> None:
        """Asks the peer to stop, and lets no further item through; `ended` goes on to wait.

        It gives the peer's end with its record, mostly CANCELLED, or soon CANCELLED from here. For
        a caller that has what it wants, and wants to know what happened below.
        """
        if not self.outcome.done():
            self._link._ask_to_stop(self)

    def settle(self) -> None:
        """Waits no longer than a moment for the peer's end.

        For a caller that has all it wants, from a peer that is ending the request by itself: its
        record is worth the wait for a healthy peer, and no more.
        """
        if not self.outcome.done():
            self._link._end_soon(self)

    def _finish(self, end: End) -> None:
        self._link._deadlines.drop(self.id)
        self._on_item = _drop  # whoever takes items mostly has the request: no circle is left
        if not self.outcome.done():
            self.outcome.set_result(end)


class LinkClient:
    """A link to one peer replica. `start()` it once, `close()` it when the peer left the registry.

    `on_news` gets each news message in order. `on_state` is told each change of `state`; on a loss
    it is told before the requests end. Exceptions of both are logged, no more.
    """

    def __init__(
        self,
        address: str,
        method: str,
        *,
        transport: Transport,
        peer_id: str,
        on_news: Callable[[bytes], None] | None = None,
        on_state: Callable[[LinkState], None] | None = None,
        options: LinkOptions = LinkOptions(),
    ) -> None:
        """`peer_id` is the own replica's id, shown in the peer's logs."""
        self.address = address
        self.stage = stage_of(method)
        self.state = LinkState.CONNECTING
        self.counters = LinkCounters()
        self._method = method
        self._transport = transport
        self._hello = LinkUp(hello=Hello(protocol=PROTOCOL, peer=peer_id, host=machine_id()))
        self._on_news = on_news
        self._on_state = on_state
        self._options = options
        self._ids = itertools.count(1)  # go on across connections: a late frame hits no new request
        self._requests: dict[int, LinkRequest] = {}
        self._deadlines = Deadlines(self._end_late)
        self._outbox = Outbox(LinkUp)
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._health = PeerHealth(options.heartbeat_timeout_s, options.stall_timeout_s)

    @property
    def vitals(self) -> Vitals:
        """As last told by the peer."""
        return self._health.vitals

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    async def start(self) -> None:
        """Begins to connect, and returns at once; see `wait_ready`."""
        self._task = asyncio.create_task(self._run(), name=f"link to {self.address}")

    async def wait_ready(self, timeout_s: float) -> None:
        """Returns when the link takes requests; raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._ready.wait()

    async def close(self) -> None:
        """Ends all requests with reason "peer_lost" and disconnects. Idempotent."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._set_state(LinkState.CLOSED)
        self._end_all("the link was closed", "peer_lost")

    # ---- requests ---------------------------------------------------------------------------

    def open(
        self,
        payload: bytes,
        *,
        deadline: float,
        on_item: Callable[[bytes], None],
        traceparent: str = "",
    ) -> LinkRequest:
        """Sends a request; never raises for the peer's sake.

        `deadline` is in `time.monotonic()` seconds; the peer is given a little less, so that its
        own account of a missed deadline is here in time. `on_item` is called on the loop for each
        item. A link that is not READY, a deadline in the past or too many bytes waiting give a
        request that has ended already.
        """
        loop = asyncio.get_running_loop()
        request = LinkRequest(self, next(self._ids), on_item)
        left_s = deadline - loop.time()
        refusal = self._refusal(left_s, len(payload))
        if refusal is not None:
            request._finish(End(id=request.id, status=refusal))
            return request
        self._outbox.frame.open.add(
            id=request.id,
            payload=payload,
            deadline_ms=min(math.ceil((left_s - min(ACCOUNT_S, left_s / 10)) * 1000), 2**32 - 1),
            traceparent=traceparent,
        )
        self._outbox.mark(len(payload))
        self._requests[request.id] = request
        self._deadlines.put(request.id, deadline)
        self._outbox.hurry()
        return request

    def _refusal(self, left_s: float, payload_bytes: int) -> Status | None:
        code, message, reason = grpc.StatusCode.UNAVAILABLE, f"{self.stage} is away", "peer_lost"
        if self.state is LinkState.DRAINING:
            message, reason = f"{self.stage} is draining", "draining"
        elif self.state is LinkState.READY:
            pending = self._outbox.pending_bytes + payload_bytes
            if left_s <= 0:
                code, reason = grpc.StatusCode.DEADLINE_EXCEEDED, "deadline"
                message = f"no time left before {self.stage}"
            elif pending > self._options.max_pending_bytes:
                code, reason = grpc.StatusCode.RESOURCE_EXHAUSTED, "link_congested"
                message = f"{self.stage} does not take requests fast enough"
            else:
                return None
        return status(code, message, stage=self.stage, reason=reason)

    def _ask_to_stop(self, request: LinkRequest) -> None:
        request._on_item = _drop
        self._outbox.frame.cancel.append(request.id)
        self._outbox.mark()
        self._end_soon(request)

    def _end_soon(self, request: LinkRequest) -> None:
        request._settles = True
        self._deadlines.put(request.id, asyncio.get_running_loop().time() + STOP_TIMEOUT_S)

    def _end_late(self, id: int) -> None:
        request = self._requests[id]
        if request._settles:
            self._withdraw(request, grpc.StatusCode.CANCELLED, "cancelled", "cancelled")
        else:
            late = f"{self.stage} did not finish in time"
            self._withdraw(request, grpc.StatusCode.DEADLINE_EXCEEDED, late, "deadline")

    def _withdraw(
        self, request: LinkRequest, code: grpc.StatusCode, message: str, reason: str
    ) -> None:
        """Ends a running request from this side; the peer is told to stop."""
        del self._requests[request.id]
        self._outbox.frame.cancel.append(request.id)
        self._outbox.mark()
        why = status(code, message, stage=self.stage, reason=reason)
        request._finish(End(id=request.id, status=why))

    def _end_all(self, message: str, reason: str) -> None:
        requests, self._requests = self._requests, {}
        why = status(grpc.StatusCode.UNAVAILABLE, message, stage=self.stage, reason=reason)
        for request in requests.values():
            request._finish(End(id=request.id, status=why))

    # ---- the connection ---------------------------------------------------------------------

    async def _run(self) -> None:
        """Connects again and again until closed."""
        backoff_s = self._options.backoff_s
        while True:
            connects, began = self.counters.connects, time.monotonic()
            try:
                await self._connection()
            except Exception:
                log.exception("link to %s at %s", self.stage, self.address)
                self._lose("an error of this end")
            if self._closing:  # a task group that ends by an error swallows the cancellation
                return
            # One that ends as soon as it is there begins nothing anew: each costs a snapshot.
            held = time.monotonic() - began >= self._options.heartbeat_s
            if held and self.counters.connects > connects:
                backoff_s = self._options.backoff_s
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(backoff_s * 2, self._options.backoff_max_s)

    async def _connection(self) -> None:
        """Runs one connection to its end, and ends with it the requests that it carried."""
        self._outbox = Outbox(LinkUp)
        # A channel of its own for each attempt: addresses are resolved anew, nothing is inherited.
        async with self._transport.dial(self.address, self.stage, CHANNEL_OPTIONS) as channel:
            call = channel.stream_stream(self._method, None, None)(None)
            try:
                async with asyncio.TaskGroup() as group, self._attached(call) as wire:
                    group.create_task(write_all(wire, self._outbox, LinkUp.SerializeToString))
                    group.create_task(self._beat())
                    await read_all(wire, lambda raw: self._receive(_decode(raw)))
            except* EXPECTED_LOSSES as lost:
                self._lose(_describe(lost.exceptions[0]))
            finally:
                end_call(call)

    def _lose(self, why: str) -> None:
        """`why` is for the log alone: it names the peer's address."""
        log.info("lost %s at %s: %s", self.stage, self.address, why)
        self._set_state(LinkState.DEAD)
        self._end_all(f"the {self.stage} was lost", "peer_lost")

    @asynccontextmanager
    async def _attached(
        self, call: "grpc.aio.StreamStreamCall[bytes, bytes]"
    ) -> AsyncIterator[Wire]:
        """Says hello; the peer's first frame makes the link READY. Gives what carries the rest."""
        wire: Wire = call
        beside: LocalWire | None = None
        try:
            try:
                async with asyncio.timeout(self._options.connect_timeout_s):
                    await call.write(self._hello.SerializeToString())
                    frame = _decode(await call.read())
                    if frame.HasField("beside"):
                        wire = beside = await self._step_aside(frame.beside)
                        frame = _decode(await beside.read())
            except TimeoutError:
                raise LinkLostError("no answer to the hello") from None
            self.counters.connects += 1
            self._health.connected()
            self._receive(frame)
            if self._health.well_at_first(_vitals(frame)):
                self._set_state(LinkState.DRAINING if frame.draining else LinkState.READY)
            yield wire
        finally:
            if beside is not None:
                beside.close()

    async def _step_aside(self, beside: Beside) -> LocalWire:
        """Onto the peer's socket. Raises LinkLostError where there is no way, and does not ask for
        it again."""
        wire = await taken(beside)
        if wire is None:
            self._hello.hello.host = ""
            raise LinkLostError("its socket cannot be reached from here")
        return wire

    async def _beat(self) -> None:
        """Pings, and gives up on a peer that is silent or stalled."""
        while True:
            await asyncio.sleep(self._options.heartbeat_s)
            if self._health.beat(self._options.heartbeat_s):
                self._give_up_stalled()
            self._outbox.frame.ping = 1
            self._outbox.mark()

    def _give_up_stalled(self) -> None:
        """Ends all requests, but stays connected to see the steps move again."""
        log.warning("%s at %s stalled at step %d", self.stage, self.address, self.vitals.steps)
        self._set_state(LinkState.DEAD)
        for id in self._requests:
            self._outbox.frame.cancel.append(id)
        self._outbox.mark()
        self._end_all(
            f"{self.stage} made no step for {self._health.unmoved_s:.1f} s", "peer_stalled"
        )

    def _receive(self, frame: LinkDown) -> None:
        """Takes one frame: news, items, ends, vitals, in this order."""
        self._health.heard()
        self.counters.frames += 1
        self.counters.items += len(frame.items)
        for news in frame.news:
            self._tell(self._on_news, news)
        for item in frame.items:
            request = self._requests.get(item.id)
            if request is None:
                self.counters.strays += 1
                continue
            try:
                request._on_item(item.payload)
            except Exception:
                log.exception("on_item of request %d failed", item.id)
                if item.id in self._requests:
                    self._withdraw(
                        request, grpc.StatusCode.INTERNAL, "an item could not be taken", "internal"
                    )
        for end in frame.ends:
            request = self._requests.pop(end.id, None)
            if request is None:
                self.counters.strays += 1
            else:
                request._finish(end)
        if frame.HasField("vitals") and self._health.observe(_vitals(frame)):
            self._set_state(LinkState.READY)
        if frame.draining and self.state is LinkState.READY:
            self._set_state(LinkState.DRAINING)

    def _set_state(self, state: LinkState) -> None:
        if state is self.state or self.state is LinkState.CLOSED:
            return
        self.state = state
        if state is LinkState.READY:
            self._ready.set()
        else:
            self._ready.clear()
        self._tell(self._on_state, state)

    def _tell(self, callback: Callable[[T], None] | None, news: T) -> None:
        if callback is not None:
            try:
                callback(news)
            except Exception:
                log.exception("a callback of the link to %s failed", self.address)


def _wake(waiting: "asyncio.Future[None]", _outcome: object) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _drop(_item: bytes) -> None:
    """`on_item` of a stopped request."""


def _vitals(frame: LinkDown) -> Vitals:
    told = frame.vitals
    return Vitals(told.steps, told.pending, told.step_ms / 1000)


def _decode(raw: object) -> LinkDown:
    if not isinstance(raw, bytes):
        raise LinkLostError("the peer ended the link")
    try:
        return LinkDown.FromString(raw)
    except DecodeError:
        raise LinkLostError("the peer sent a frame that cannot be decoded") from None


def _describe(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name} {error.details() or ''}".strip()
    return str(error) or type(error).__name__
