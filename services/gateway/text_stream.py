"""One generation on a tokenizer link, seen from the gateway: deltas in batches, then the end."""

import asyncio
from collections.abc import AsyncGenerator

import grpc

from protos.tokenizer_pb2 import TextDelta
from services.common.errors import PenstockError
from services.common.link import End, LinkRequest
from services.common.peers import Peers

PATIENCE_S = 5.0  # for a tokenizer to appear: a restart, an upgrade
MAX_UNREAD_BYTES = 4 * 2**20  # of a stream whose client does not read
_ATTEMPTS = 3
_LOST = frozenset({"peer_lost", "peer_stalled", "draining"})


class TextStream:
    """Opens the request on the least loaded tokenizer, and gathers what comes.

    When a tokenizer is lost before anything came of it, the request goes to another one: the seed
    is in the request, so nothing differs. After the first delta the loss is the request's end.
    """

    def __init__(
        self, tokenizers: Peers, payload: bytes, *, deadline: float, traceparent: str
    ) -> None:
        """`payload` is a serialized PromptRequest, `deadline` in time.monotonic() seconds."""
        self._tokenizers = tokenizers
        self._payload = payload
        self._deadline = deadline
        self._traceparent = traceparent
        self._request: LinkRequest | None = None
        self._inbox: list[bytes] = []
        self._unread_bytes = 0
        self._overrun = False
        self._wake = asyncio.Event()
        self.end = End()
        self.attempts: list[str] = []  # ids of the tokenizers asked

    async def batches(self) -> AsyncGenerator[list[TextDelta], None]:
        """What has arrived since the last look, never empty. `end` is set after the last.

        Raises UNAVAILABLE when there is no tokenizer, RESOURCE_EXHAUSTED for a client that lets
        its answer pile up.
        """
        while True:
            ended = await self._open()
            try:
                while not ended.done() or self._inbox:
                    await self._wake.wait()
                    self._wake.clear()
                    if self._inbox:
                        yield self._take()
            finally:
                ended.cancel()
            if self._overrun:
                raise PenstockError(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    "the client did not read its answer",
                    stage="gateway",
                    reason="client_too_slow",
                )
            self.end = ended.result()
            if not self._worth_another():
                return

    def cancel(self) -> None:
        """Frees everything downstream; free when it has ended."""
        if self._request is not None:
            self._request.cancel()

    async def _open(self) -> "asyncio.Task[End]":
        peer = await self._tokenizers.pick_least_loaded(PATIENCE_S)
        self.attempts.append(peer.id)
        self._began = False
        self._request = peer.link.open(
            self._payload,
            deadline=self._deadline,
            traceparent=self._traceparent,
            on_item=self._on_item,
        )
        ended = asyncio.create_task(self._request.ended())
        ended.add_done_callback(lambda _: self._wake.set())
        return ended

    def _on_item(self, payload: bytes) -> None:
        self._began = True
        self._inbox.append(payload)
        self._unread_bytes += len(payload)
        self._wake.set()
        if self._unread_bytes > MAX_UNREAD_BYTES:
            self._overrun = True
            self.cancel()

    def _take(self) -> list[TextDelta]:
        inbox, self._inbox, self._unread_bytes = self._inbox, [], 0
        return [TextDelta.FromString(payload) for payload in inbox]

    def _worth_another(self) -> bool:
        status = self.end.status
        lost = status.stage == "tokenizer" and status.reason in _LOST
        return lost and not self._began and len(self.attempts) < _ATTEMPTS
