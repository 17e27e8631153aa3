"""What is taken out in several steps, to its end, also where its gateway is lost over it.

What is searchable goes first, and last what says that there was something. So a removal that broke
off can be repeated, by its client as by its job.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import grpc
from pydantic import BaseModel

from protos.common_pb2 import Caller
from services.common.errors import PenstockError
from services.gateway.jobs.jobs import Jobs, Later
from services.gateway.jobs.places import Places
from services.gateway.jobs.queue import Claimed, Queue

_AT_ONCE = 1
_AGAIN_S = 5.0  # while retrieval is away


class Removal(BaseModel):
    """With a store and a file: that file, as it is attached there now. With one of them: all of
    it."""

    request_id: str
    store: str = ""
    file: str = ""
    attachment: str = ""


class Removals:
    """jobs.Kind."""

    name = "remove"

    def __init__(self, jobs: Jobs, redo: Callable[[Caller, Removal], Awaitable[None]]) -> None:
        """`redo`: does what of a removal was not done; may be nothing."""
        self.places = Places(_AT_ONCE)
        self._jobs = jobs
        self._redo = redo

    @asynccontextmanager
    async def insured(self, tenant: str, removal: Removal) -> AsyncIterator[None]:
        """For the steps of a removal."""
        queue = Queue(self.name, tenant, "all")
        async with self._jobs.insured(queue, removal.model_dump_json()):
            yield

    async def run(self, job: Claimed) -> None:
        removal = Removal.model_validate_json(job.body)
        caller = Caller(tenant=job.queue.tenant, request_id=removal.request_id)
        with again_if_away(job):
            await self._redo(caller, removal)

    async def give_up(self, job: Claimed, why: str) -> None:
        """Who asked for it was never told that it was done."""


@contextmanager
def again_if_away(job: Claimed) -> Iterator[None]:
    """While retrieval is away the job waits. What is there no more needs nothing done."""
    try:
        yield
    except PenstockError as error:
        if error.reason == "not_found":
            return
        if error.code is not grpc.StatusCode.UNAVAILABLE:
            raise
        raise Later(job.body, max(error.retry_after_s, _AGAIN_S)) from None
