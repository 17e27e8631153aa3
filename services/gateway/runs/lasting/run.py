"""One run: a generation whose answer goes to Redis, and from there to whoever follows it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from protos.runs_pb2 import RunEvent, RunEvents, StoredRun
from protos.tokenizer_pb2 import TextDelta
from services.common.errors import PenstockError
from services.common.redis import RedisAway
from services.gateway.identity.principal import Principal
from services.gateway.intake import Place
from services.gateway.metering.prices import Cost
from services.gateway.parts import Gateway
from services.gateway.runs.delivery import joined
from services.gateway.runs.lasting.failures import away, cancelled, lost
from services.gateway.runs.lasting.store import Hold, RunStore
from services.gateway.runs.lasting.stored import (
    begun,
    failed,
    finished,
    text_of,
    without_tokens,
)
from services.gateway.runs.prompt import Answer, Prompt

T = TypeVar("T")
GATHER_S = 0.05  # events that come within this are written at once
_RETRY_S = 0.2  # while Redis is away
_MAX_UNWRITTEN = 4 * 2**20  # bytes of deltas: with more, the answer waits for Redis
_PATIENCE_S = 10.0  # with Redis, for the first write: until then nobody is told of it


Ending = Callable[[], Awaitable[Sequence[str]]]
"""What is done with an answer that is whole, before its end is told: it may be carried out twice,
which is the same as once. Returns what could not be done. Raises one of `RedisAway`."""

EndingOf = Callable[[Gateway, StoredRun], Awaitable[Ending | None]]


class Run:
    """front.Front: what comes is written, the first event at once and others as they gather.

    Nobody is shown what is not written. So whoever goes on with the run goes on behind all that
    anybody has seen.
    """

    authorization = None

    def __init__(
        self,
        store: RunStore,
        hold: Hold,
        stored: StoredRun,
        prompts: list[Prompt],
        *,
        ending: Ending | None,
        keeps_ids: bool,
        traceparent: str | None = None,
    ) -> None:
        """`ending`: None: nothing is to be done. `keeps_ids`: the answer's tokens are stored while
        it runs. `stored` may be large, and is not kept: Redis has it."""
        self.hold = hold
        self.traceparent = traceparent
        self.request_id = stored.request_id
        self.route = stored.route
        self.endpoint = stored.endpoint
        self.was_admitted = False
        self.let_in: asyncio.Future[PenstockError | None]
        """Once it is let in and that is written; or why it will not be."""
        self.let_in = asyncio.get_running_loop().create_future()
        self.finishing = False  # what is written now is its end
        self.over: str | None = None  # why: cancelled, lost, leaving, full, away, failed
        self.task: asyncio.Task[None] | None = None
        self._was_anothers = False
        self._store = store
        self._prompts = prompts
        self._ending = ending
        self._size = stored.ByteSize()
        self._keeps_ids = keeps_ids
        self._told: set[int] = set()  # answers, by their index
        self._seq = 0
        self._events: list[RunEvent] = []  # not written yet
        self._deltas: list[tuple[int, TextDelta]] = []  # likewise, behind them
        self._bytes = 0
        self._unsent: tuple[str, dict[int, list[int]]] | None = None  # of write `_seq`
        self._some = asyncio.Event()
        self._writing = asyncio.Lock()
        self._writer: asyncio.Task[None] | None = None

    def goes_on(self, seq: int, answers: list[Answer]) -> None:
        """It was another gateway's, which has made `seq` writes."""
        self._seq = seq
        self._told = {answer.index for answer in answers}
        self._was_anothers = True
        self.let_in.set_result(None)

    @property
    def is_let_in(self) -> bool:
        return self.let_in.done() and self.let_in.result() is None

    def not_let_in(self, error: PenstockError) -> None:
        if not self.let_in.done():
            self.let_in.set_result(error)

    # ---- front.Front --------------------------------------------------------------------------

    async def read(self, principal: Principal, place: Place) -> list[Prompt]:
        place.hold(self._size)
        return self._prompts

    def admitted(self, headers: Mapping[str, str]) -> None:
        self.was_admitted = True
        if not self._was_anothers:
            self._events.append(RunEvent(admitted=RunEvent.Admitted(headers=headers)))
            self._some.set()
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_on(), name=f"run {self.request_id}")

    @property
    def shown(self) -> bool:
        return bool(self._told)

    async def write(self, answer: Answer, deltas: list[TextDelta]) -> None:
        self._write_now(answer, deltas)
        if self._bytes > _MAX_UNWRITTEN:
            await self._write()

    @property
    def write_now(self) -> Callable[[Answer, list[TextDelta]], None] | None:
        return self._write_now if self._bytes <= _MAX_UNWRITTEN else None

    def _write_now(self, answer: Answer, deltas: list[TextDelta]) -> None:
        if answer.index not in self._told:
            self._told.add(answer.index)
            self._gathered()
            self._events.append(begun(answer))
        self._deltas += [(answer.index, delta) for delta in deltas]
        self._bytes += sum(delta.ByteSize() for delta in deltas)
        self._some.set()

    async def finish(self, answers: list[Answer], cost: Cost | None) -> None:
        for answer in answers:  # one that said nothing was not written yet
            if answer.index not in self._told:
                await self.write(answer, [])
        await self._write()
        warnings = await self._end()
        self.finishing = True
        self._seq += 1
        events = _packed(finished(cost, warnings))
        verdict = await _until_taken(lambda: self._store.finish(self.hold, self._seq, events))
        if verdict != "gone" or self._ending is None:
            _check(verdict)  # sealed it ends in no other way: it was deleted behind its end

    async def _end(self) -> Sequence[str]:
        """Does what is to be done with the answer, once however many gateways come to this: what of
        it could not be."""
        if self._ending is None:
            return ()
        _check(await _until_taken(lambda: self._store.seal(self.hold)))
        return await _until_taken(self._ending)

    # ---- its end ------------------------------------------------------------------------------

    def stop(self, why: str) -> None:
        if self.over is None and self.task is not None:
            self.over = why
            self.task.cancel()

    async def fail(self, error: PenstockError) -> None:
        """Tells who follows it, and a retry is a new run."""
        self.over = self.over or "failed"
        await self._write()
        self.finishing = True
        events = _packed(failed(error))
        await _until_taken(lambda: self._store.fail(self.hold, events))

    async def refuse(self, error: PenstockError | None) -> None:
        """It was not let in, and those who wait for it under its key hear that; without an `error`
        it was never there, and one of them begins it anew."""
        self.finishing = True
        events = "" if error is None else _packed(failed(error))
        await _until_taken(lambda: self._store.refuse(self.hold, events))

    def close(self) -> None:
        """It is nobody's here any more."""
        if self._writer is not None:
            self._writer.cancel()

    # ---- writing ------------------------------------------------------------------------------

    async def _write_on(self) -> None:
        while True:
            await self._some.wait()
            self._some.clear()
            await self._write()
            await asyncio.sleep(GATHER_S)

    async def _write(self) -> None:
        """All that has come; once the first of it is there, its client may be told of it."""
        async with self._writing:
            since = time.monotonic()
            while self._unsent is not None or self._events or self._deltas:
                if self._unsent is None:
                    self._unsent = self._gather()
                    self._seq += 1
                events, ids = self._unsent
                try:
                    verdict = await self._store.add(self.hold, self._seq, events, ids)
                except RedisAway:
                    if not self.let_in.done() and time.monotonic() - since > _PATIENCE_S:
                        self.not_let_in(away())
                        return await self._give_way("away")
                    await asyncio.sleep(_RETRY_S)
                    continue
                self._unsent = None
                if verdict != "ok":
                    return await self._give_way(verdict)
                if not self.let_in.done():
                    self.let_in.set_result(None)

    async def _give_way(self, why: str) -> None:
        self.stop(why)
        await asyncio.sleep(0)  # its own task goes no further than this

    def _gathered(self) -> None:
        """Deltas that wait become events: of each answer, those of a kind as one."""
        deltas, self._deltas, self._bytes = self._deltas, [], 0
        of_answers: dict[int, list[TextDelta]] = {}
        for index, delta in deltas:
            of_answers.setdefault(index, []).append(delta)
        for index, some in of_answers.items():
            for delta in joined(some):
                self._events.append(RunEvent(delta=RunEvent.Delta(index=index, delta=delta)))

    def _gather(self) -> tuple[str, dict[int, list[int]]]:
        self._gathered()
        events, self._events = self._events, []
        ids: dict[int, list[int]] = {}
        for event in events:
            if event.HasField("delta"):
                if self._keeps_ids:
                    ids.setdefault(event.delta.index, []).extend(event.delta.delta.token_ids)
                without_tokens(event.delta.delta)
        return text_of(RunEvents(events=events)), ids


def _packed(event: RunEvent) -> str:
    return text_of(RunEvents(events=[event]))


def _check(verdict: str) -> None:
    """Of a run that was to end."""
    if verdict == "cancelled":
        raise cancelled()
    if verdict != "ok":
        raise lost()


async def _until_taken(write: Callable[[], Awaitable[T]]) -> T:
    """However long Redis is away."""
    while True:
        try:
            return await write()
        except RedisAway:
            await asyncio.sleep(_RETRY_S)
