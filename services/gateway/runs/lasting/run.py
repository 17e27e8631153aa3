"""One run: a generation whose answer goes to Redis, and from there to whoever follows it."""

import asyncio
from collections.abc import Mapping

from protos.runs_pb2 import RunEvent, RunEvents, StoredRun
from protos.tokenizer_pb2 import TextDelta
from services.common.errors import PenstockError
from services.common.redis import RedisAway
from services.gateway.intake import Place
from services.gateway.metering.prices import Cost
from services.gateway.runs.delivery import joined
from services.gateway.runs.lasting.failures import lost
from services.gateway.runs.lasting.store import RunStore
from services.gateway.runs.lasting.stored import begun, finished, text_of, without_tokens
from services.gateway.runs.prompt import Answer, Prompt

GATHER_S = 0.05  # events that come within this are written at once
_RETRY_S = 0.2  # while Redis is away
_MAX_UNWRITTEN = 4 * 2**20  # bytes of deltas: with more, the answer waits for Redis


class Run:
    """front.Front: what comes is written, the first event at once and others as they gather.

    Nobody is shown what is not written. So whoever goes on with the run goes on behind all that
    anybody has seen.
    """

    authorization = None
    traceparent = None

    def __init__(
        self, store: RunStore, stored: StoredRun, prompts: list[Prompt], *, keeps_ids: bool
    ) -> None:
        """`keeps_ids`: the answer's tokens are stored while it runs."""
        self.request_id = stored.request_id
        self.route = stored.route
        self.endpoint = stored.endpoint
        self.place = (stored.caller.tenant, stored.request_id)
        self.news = asyncio.Event()  # set, and another one taken, when something was written
        self.admitted_or_over = asyncio.Event()
        self.was_admitted = False
        self.finishing = False  # what is written now is its end
        self.over: str | None = None  # why it was stopped: cancelled, lost, leaving, full
        self.task: asyncio.Task[None] | None = None
        self._was_anothers = False
        self._store = store
        self._prompts = prompts
        self._size = stored.ByteSize()
        self._keeps_ids = keeps_ids
        self._begun: set[int] = set()
        self._seq = 0
        self._events: list[RunEvent] = []  # not written yet
        self._deltas: list[tuple[int, TextDelta]] = []  # likewise, behind them
        self._bytes = 0
        self._unsent: tuple[str, dict[int, list[int]]] | None = None  # of write `_seq`
        self._some = asyncio.Event()
        self._writing = asyncio.Lock()
        self._writer: asyncio.Task[None] | None = None

    def goes_on(self, seq: int, answers: list[Answer], *, admitted: bool) -> None:
        """It was another gateway's, which has made `seq` writes."""
        self._seq = seq
        self._begun = {answer.index for answer in answers}
        self.was_admitted = self._was_anothers = admitted

    # ---- front.Front --------------------------------------------------------------------------

    async def read(self, place: Place) -> list[Prompt]:
        place.hold(self._size)
        return self._prompts

    def admitted(self, headers: Mapping[str, str]) -> None:
        if not self._was_anothers:
            self._events.append(RunEvent(admitted=RunEvent.Admitted(headers=headers)))
            self._some.set()
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_on(), name=f"run {self.request_id}")
        self.was_admitted = True
        self.admitted_or_over.set()

    @property
    def shown(self) -> bool:
        return bool(self._begun)

    async def write(self, answer: Answer, deltas: list[TextDelta]) -> None:
        if answer.index not in self._begun:
            self._begun.add(answer.index)
            self._gathered()
            self._events.append(begun(answer))
        self._deltas += [(answer.index, delta) for delta in deltas]
        self._bytes += sum(delta.ByteSize() for delta in deltas)
        self._some.set()
        if self._bytes > _MAX_UNWRITTEN:
            await self._write()

    async def finish(self, answers: list[Answer], cost: Cost | None) -> None:
        for answer in answers:  # one that said nothing was not written yet
            if answer.index not in self._begun:
                await self.write(answer, [])
        await self._end(finished(cost), forget=False)

    # ---- its end ------------------------------------------------------------------------------

    def stop(self, why: str) -> None:
        if self.over is None and self.task is not None:
            self.over = why
            self.task.cancel()

    async def fail(self, error: PenstockError) -> None:
        """Tells who follows it, and a retry is a new run."""
        await self._end(RunEvent(failed=error.to_status()), forget=True)

    async def _end(self, last: RunEvent, *, forget: bool) -> None:
        await self._write()
        self.finishing = True
        self._seq += 1
        events = text_of(RunEvents(events=[last]))
        while True:
            try:
                verdict = await self._store.finish(self.place, self._seq, events, forget=forget)
                break
            except RedisAway:
                await asyncio.sleep(_RETRY_S)
        self._tell()
        if verdict == "lost":
            raise lost()

    def close(self) -> None:
        """It is nobody's here any more."""
        if self._writer is not None:
            self._writer.cancel()
        self.admitted_or_over.set()
        self._tell()

    # ---- writing ------------------------------------------------------------------------------

    async def _write_on(self) -> None:
        while True:
            await self._some.wait()
            self._some.clear()
            await self._write()
            await asyncio.sleep(GATHER_S)

    async def _write(self) -> None:
        """All that has come; when it is there, those who follow it are told."""
        async with self._writing:
            while self._unsent is not None or self._events or self._deltas:
                if self._unsent is None:
                    self._unsent = self._packed()
                    self._seq += 1
                events, ids = self._unsent
                try:
                    verdict = await self._store.add(self.place, self._seq, events, ids)
                except RedisAway:
                    await asyncio.sleep(_RETRY_S)
                    continue
                self._unsent = None
                if verdict != "ok":
                    self.stop(verdict)
                    await asyncio.sleep(0)  # its own task goes no further than this
                    return
                self._tell()

    def _gathered(self) -> None:
        """Deltas that wait become events: of each answer, those of a kind as one."""
        deltas, self._deltas, self._bytes = self._deltas, [], 0
        of_answers: dict[int, list[TextDelta]] = {}
        for index, delta in deltas:
            of_answers.setdefault(index, []).append(delta)
        for index, some in of_answers.items():
            for delta in joined(some):
                self._events.append(RunEvent(delta=RunEvent.Delta(index=index, delta=delta)))

    def _packed(self) -> tuple[str, dict[int, list[int]]]:
        self._gathered()
        events, self._events = self._events, []
        ids: dict[int, list[int]] = {}
        for event in events:
            if event.HasField("delta"):
                if self._keeps_ids:
                    ids.setdefault(event.delta.index, []).extend(event.delta.delta.token_ids)
                without_tokens(event.delta.delta)
        return text_of(RunEvents(events=events)), ids

    def _tell(self) -> None:
        news, self.news = self.news, asyncio.Event()
        news.set()
