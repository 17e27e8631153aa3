"""Channels between workers: kept while they are used, dialled anew with new certificates."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from protos import worker_pb2, worker_pb2_grpc
from services.common.locks import certificates
from services.common.locks.certificates import CertificateFiles
from services.common.transport import Transport
from services.worker.kv_sender import Channels
from tests.support.authority import Authority
from tests.support.transport import SECRET

FORMAT = "of a checkpoint"


class Worker(worker_pb2_grpc.WorkerServicer):
    """Gives room to all, and notes what certificates they show."""

    def __init__(self) -> None:
        self.shown: list[bytes] = []

    async def PushKv(self, pushes: Any, context: Any) -> AsyncIterator[worker_pb2.KvPushReply]:
        self.shown += context.auth_context()["x509_pem_cert"]
        async for _ in pushes:
            reserved = worker_pb2.KvReserved(cached_blocks=0)
            yield worker_pb2.KvPushReply(reserved=reserved)


async def test_a_channel_shows_the_latest_certificate_and_running_pushes_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "_LOOK_EVERY_S", 0.0)
    authority = Authority()
    authority.identities(tmp_path, "worker")
    transport = Transport(SECRET, CertificateFiles.of_identity(tmp_path, "worker"))
    server, worker = transport.server(), Worker()
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    address = f"127.0.0.1:{transport.listen(server, '127.0.0.1', 0)}"
    await server.start()
    channels = Channels(transport, 30.0)
    try:
        async with channels.sender(address) as first:
            await first.reserve("one", 8, FORMAT)
            async with channels.sender(address) as second:
                await second.reserve("two", 8, FORMAT)
            authority.identities(tmp_path, "worker")
            async with channels.sender(address) as third:
                await third.reserve("three", 8, FORMAT)
                await first.reserve("one again", 8, FORMAT)
            assert len(channels) == 1
        async with channels.sender(address) as fourth:
            await fourth.reserve("four", 8, FORMAT)
        assert len(channels) == 1
    finally:
        await channels.close()
        await server.stop(None)
    one, two, three, four = worker.shown
    assert one == two != three == four
