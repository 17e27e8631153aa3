"""The prefill worker's end of a KV hand-over: blocks leave while the prompt is still computed.

The blocks go inline over gRPC or, between workers on one host, as references to shared memory; the
engine made them in the right form (`Request.export_kv`), so nothing is copied here.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from protos import worker_pb2, worker_pb2_grpc
from services.common.errors import PenstockError, unavailable
from services.common.grpc_options import KEEPALIVE, MESSAGE_LIMITS
from services.common.transport import Channel, Transport, end_call
from services.worker.engine import KvBlocks, SharedRef
from services.worker.engine.kv import payload as kv_payload

log = logging.getLogger(__name__)

_CHANNEL_OPTIONS = [
    *MESSAGE_LIMITS,
    *KEEPALIVE,  # room may be waited for as long as it takes, but not on a path that leads nowhere
    ("grpc.enable_retries", 0),  # a broken hand-over is retried by the router, as a whole
    # A worker that comes back is reached at once: gRPC would wait for up to two minutes, and by
    # default shares that state among all channels to an address.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


@dataclass
class _Channel:
    channel: Channel
    users: int = 0


class Channels:
    """One gRPC channel to each decode worker, for as long as it is used or connected."""

    def __init__(self, transport: Transport, progress_s: float) -> None:
        """`progress_s`: a decode worker that takes no bytes for so long has the push broken off."""
        self._transport = transport
        self._progress_s = progress_s
        self._channels: dict[str, _Channel] = {}

    def __len__(self) -> int:
        return len(self._channels)

    @asynccontextmanager
    async def sender(self, address: str) -> AsyncIterator["KvSender"]:
        """For one hand-over to the decode worker at `address`; closes the sender."""
        used = self._channels.get(address)
        if used is None or used.channel.outdated:
            if used is not None and not used.users:
                await used.channel.close()
            channel = self._transport.dial(address, "worker", _CHANNEL_OPTIONS)
            used = self._channels[address] = _Channel(channel)
        used.users += 1
        sender = KvSender(worker_pb2_grpc.WorkerStub(used.channel), self._progress_s)
        try:
            yield sender
        finally:
            sender.close()
            used.users -= 1
            if not used.users and self._channels.get(address) is not used:  # another took its place
                await used.channel.close()
            await self._drop_lost()

    async def close(self) -> None:
        while self._channels:
            _, one = self._channels.popitem()
            await one.channel.close()

    async def _drop_lost(self) -> None:
        """Workers come and go at new addresses: closes what nobody uses and leads nowhere."""
        for address, one in list(self._channels.items()):
            if not one.users and one.channel.get_state() is not grpc.ChannelConnectivity.READY:
                del self._channels[address]
                await one.channel.close()


class KvSender:
    """Reserves room, pushes one request's blocks, then its first token. `put` and `commit` never
    block: what waits here is at most the prompt's own KV, which the engine had to hold anyway.
    """

    def __init__(self, stub: worker_pb2_grpc.WorkerStub, progress_s: float) -> None:
        self._stream = stub.PushKv()
        self._progress_s = progress_s
        self._queue: asyncio.Queue[KvBlocks | int] = asyncio.Queue()
        self._unconfirmed: list[SharedRef] = []  # put, and not known to have arrived
        self.bytes_sent = 0

    async def reserve(self, transfer_id: str, prompt_tokens: int, kv_format: str) -> int:
        """Waits for room at the decode worker; returns how many leading blocks it has already.
        `kv_format`: of which checkpoint the blocks are, and how they lie.

        The prompt must not be computed before. It would hold blocks here while it waits for room
        there, where all blocks may be held by prompts that wait for room here.
        Raises PenstockError as `push` does.
        """
        begin = worker_pb2.KvBegin(
            transfer_id=transfer_id, prompt_tokens=prompt_tokens, kv_format=kv_format
        )
        async with _failures():
            await self._stream.write(worker_pb2.KvPush(begin=begin))
            reply = await self._stream.read()
        if reply is grpc.aio.EOF or not reply.HasField("reserved"):
            raise _failed("it did not reserve room")
        return int(reply.reserved.cached_blocks)

    def put(self, blocks: KvBlocks) -> None:
        """The next blocks, in order."""
        if isinstance(blocks.data, SharedRef):
            self._unconfirmed.append(blocks.data)
        self._queue.put_nowait(blocks)

    def commit(self, first_token: int) -> None:
        """All blocks were put; decoding may start after `first_token`."""
        self._queue.put_nowait(first_token)

    async def push(self) -> None:
        """Sends what is put, and returns when the decode worker has taken over.

        Raises PenstockError (UNAVAILABLE, reason "kv_transfer") when it cannot.
        """
        async with _failures():
            async for message in self._messages():
                async with asyncio.timeout(self._progress_s):
                    await self._stream.write(message)
            async with asyncio.timeout(self._progress_s):
                await self._stream.done_writing()
                reply = await self._stream.read()
        if reply is grpc.aio.EOF or not reply.HasField("done"):
            raise _failed("it did not confirm the commit")
        self._unconfirmed.clear()

    def close(self) -> None:
        """Ends the stream; if it has not ended well, removes all that was put.

        What was sent counts as not arrived before the commit was confirmed: it may have been
        dropped anywhere on the way. A decode worker that reads it after all finds nothing, and
        fails a request that has failed.
        """
        end_call(self._stream)
        for ref in self._unconfirmed:
            kv_payload.discard(ref)

    async def _messages(self) -> AsyncIterator[worker_pb2.KvPush]:
        while True:
            item = await self._queue.get()
            if isinstance(item, int):
                yield worker_pb2.KvPush(commit=worker_pb2.KvCommit(first_token=item))
                return
            message = _message(item)
            self.bytes_sent += len(message.blocks.inline) or message.blocks.shared.size
            yield message


def _message(blocks: KvBlocks) -> worker_pb2.KvPush:
    body = worker_pb2.KvBlocks(first_block=blocks.first_block, num_blocks=blocks.num_blocks)
    if isinstance(blocks.data, SharedRef):
        ref = blocks.data
        body.shared.name, body.shared.offset, body.shared.size = ref.name, ref.offset, ref.size
    else:
        body.inline = bytes(blocks.data)
    return worker_pb2.KvPush(blocks=body)


@asynccontextmanager
async def _failures() -> AsyncIterator[None]:
    """A stream that breaks becomes a PenstockError."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        log.warning("handing KV blocks over: %s %s", error.code().name, error.details())
        raise _failed("the stream broke off") from error
    except TimeoutError as error:
        raise _failed("it takes nothing any more") from error
    except asyncio.InvalidStateError as error:  # written to after its end
        raise _failed("the stream broke off") from error


def _failed(cause: str) -> PenstockError:
    return unavailable(
        f"handing KV blocks to the decode worker failed: {cause}",
        stage="worker",
        reason="kv_transfer",
        retry_after_s=0,
    )
