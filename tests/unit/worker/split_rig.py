"""A prefill worker and a decode worker, whose engines a test steps by hand."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from protos import worker_pb2
from services.common.discovery import host_id
from services.worker.engine import Request
from tests.support.waiting import until
from tests.unit.worker.worker_rig import (
    Answer,
    Work,
    Worker,
    running_worker,
)


class Split:
    """A prefill worker and a decode worker."""

    def __init__(self, prefill: Worker, decode: Worker) -> None:
        self.prefill, self.decode = prefill, decode
        self.met = 0
        """Pushes that have found their request at the decode worker."""
        receiver = decode.service._receiver
        meet = receiver._meet

        async def counted(*args: Any) -> Any:
            transfer = await meet(*args)
            self.met += 1
            return transfer

        receiver._meet = counted  # type: ignore[assignment, method-assign]

    async def decodes(self, transfer_id: str = "t") -> tuple[Answer, Request]:
        return await self.decode.ask(mode=Work.DECODE, transfer_id=transfer_id)

    def prefills(self, transfer_id: str = "t", host: str | None = None) -> Answer:
        to = worker_pb2.WorkerAddress(
            address=self.decode.address, host_id=host_id("127.0.0.1") if host is None else host
        )
        return self.prefill.open(mode=Work.PREFILL, transfer_id=transfer_id, push_to=to)

    async def begin(self, cached: int = 0) -> tuple[Answer, Request, Answer, Request]:
        """Both parts of a request, as far as the prompt's computing."""
        decoding, at_decode = await self.decodes()
        prefilling = self.prefills()
        self.decode.engine.reserve(at_decode.request_id, cached)
        await until(lambda: bool(self.prefill.engine.requests))
        return prefilling, self.prefill.engine.requests[0], decoding, at_decode


@asynccontextmanager
async def two_workers(folder: Path, **options: Any) -> AsyncIterator[Split]:
    async with (
        running_worker(folder, role="prefill", **options) as prefill,
        running_worker(folder, role="decode") as decode,
    ):
        yield Split(prefill, decode)
