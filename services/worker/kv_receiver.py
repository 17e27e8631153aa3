"""The decode worker's end of a KV hand-over.

Two parties speak of one transfer: the router opens the DECODE request on the link, and the prefill
worker opens a PushKv stream. They meet here by transfer id, whichever comes first.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import grpc

from protos import worker_pb2
from services.common.errors import PenstockError, unavailable
from services.common.waiting import first_done
from services.worker.engine import EngineClient, EngineDied, KvBlocks, SharedRef

log = logging.getLogger(__name__)

_MEETING_S = 10.0  # how long a push waits for the router's word of it


class Transfer:
    """One awaited hand-over. `broken` raises when the push failed; it never yields a value."""

    def __init__(self, request_id: str) -> None:
        loop = asyncio.get_running_loop()
        self.request_id = request_id
        self.reserved: asyncio.Future[int] = loop.create_future()  # leading blocks cached here
        self.broken: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()  # nobody wants it any more


class KvReceiver:
    """Takes pushed blocks into the engine."""

    def __init__(self, engine: EngineClient, kv_format: str) -> None:
        """`kv_format`: of which checkpoint the engine's blocks are, and how they lie."""
        self._engine = engine
        self._kv_format = kv_format
        self._meetings: dict[str, asyncio.Future[Transfer]] = {}  # by transfer id
        self._by_request: dict[str, Transfer] = {}

    def add_to(self, server: grpc.aio.Server) -> None:
        """Mounts `penstock.v1.Worker/PushKv`."""
        handler = grpc.stream_stream_rpc_method_handler(
            self.push_kv,
            request_deserializer=worker_pb2.KvPush.FromString,
            response_serializer=worker_pb2.KvPushReply.SerializeToString,
        )
        methods = {"PushKv": handler}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("penstock.v1.Worker", methods),)
        )

    @contextmanager
    def expect(self, transfer_id: str, request_id: str) -> Iterator[Transfer]:
        """While the block runs, a push of `transfer_id` feeds the engine's request `request_id`."""
        meeting = self._meeting(transfer_id)
        if meeting.done():
            raise PenstockError(
                grpc.StatusCode.ALREADY_EXISTS,
                "the transfer id is in use",
                stage="worker",
                param="transfer_id",
            )
        transfer = self._by_request[request_id] = Transfer(request_id)
        meeting.set_result(transfer)
        try:
            yield transfer
        finally:
            self._meetings.pop(transfer_id, None)
            del self._by_request[request_id]
            transfer.closed.set_result(None)
            transfer.broken.cancel()
            transfer.reserved.cancel()

    def reserved(self, request_id: str, cached_blocks: int) -> None:
        """The engine holds room for the request's prompt."""
        transfer = self._by_request.get(request_id)
        if transfer is not None and not transfer.reserved.done():
            transfer.reserved.set_result(cached_blocks)

    async def push_kv(
        self, pushes: AsyncIterator[worker_pb2.KvPush], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.KvPushReply]:
        """The PushKv stream: begin → reserved → blocks … → commit → done."""
        first = await anext(aiter(pushes), None)
        if first is None or not first.HasField("begin"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "begin must come first")
            return
        transfer = await self._meet(first.begin.transfer_id, context)
        committed = False
        try:
            if first.begin.kv_format != self._kv_format:
                raise _WrongFormat(first.begin.kv_format, self._kv_format)
            cached_blocks = await _unless_closed(transfer.reserved, transfer)
            yield worker_pb2.KvPushReply(
                reserved=worker_pb2.KvReserved(cached_blocks=cached_blocks)
            )
            async for push in pushes:
                await self._take(push, transfer)
                committed = push.HasField("commit")
                if committed:
                    break
            if committed:
                yield worker_pb2.KvPushReply(done=worker_pb2.KvDone())
        except (EngineDied, _Closed) as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except _WrongFormat as error:
            log.error("KV blocks were refused: %s", error)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        finally:
            if not committed and not transfer.broken.done():
                transfer.broken.set_exception(
                    unavailable(
                        "the prefill worker's push of KV blocks broke off",
                        stage="worker",
                        reason="kv_transfer",
                        retry_after_s=0,
                    )
                )

    async def _take(self, push: worker_pb2.KvPush, transfer: Transfer) -> None:
        if transfer.closed.done():
            raise _Closed  # what was pushed is the sender's to remove
        if push.HasField("blocks"):
            self._engine.write_kv(_blocks(push.blocks, transfer.request_id))
            await self._engine.drain()  # the engine's pace is the sender's pace
        elif push.HasField("commit"):
            self._engine.start_decode(transfer.request_id, push.commit.first_token)

    def _meeting(self, transfer_id: str) -> asyncio.Future[Transfer]:
        if transfer_id not in self._meetings:
            self._meetings[transfer_id] = asyncio.get_running_loop().create_future()
        return self._meetings[transfer_id]

    async def _meet(self, transfer_id: str, context: grpc.aio.ServicerContext) -> Transfer:
        meeting = self._meeting(transfer_id)
        try:
            return await asyncio.wait_for(asyncio.shield(meeting), _MEETING_S)
        except TimeoutError:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no request awaits this transfer")
            raise
        finally:
            if not meeting.done():
                self._meetings.pop(transfer_id, None)


class _WrongFormat(Exception):
    """The blocks mean something else here."""

    def __init__(self, theirs: str, ours: str) -> None:
        super().__init__(f"the KV blocks are of {theirs!r}, this engine's of {ours!r}")


class _Closed(Exception):
    """The request that awaited the transfer is gone."""

    def __str__(self) -> str:
        return "the request was ended"


async def _unless_closed(reserved: asyncio.Future[int], transfer: Transfer) -> int:
    await first_done(reserved, transfer.closed)
    if transfer.closed.done():
        raise _Closed
    return reserved.result()


def _blocks(message: worker_pb2.KvBlocks, request_id: str) -> KvBlocks:
    if message.HasField("shared"):
        shared = message.shared
        data: SharedRef | bytes = SharedRef(shared.name, shared.offset, shared.size)
    else:
        data = message.inline
    return KvBlocks(request_id, message.first_block, message.num_blocks, data)
