"""Answers of generations, as gRPC tells them."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from protos.gateway_pb2 import GenerateEvent
from protos.tokenizer_pb2 import TextDelta
from services.common.config import GatewaySettings
from services.gateway.api.grpc.calls import Context, Writer, cost_of
from services.gateway.api.rest.lasting import LAST, check_event
from services.gateway.metering.prices import Cost
from services.gateway.runs.prompt import Answer, total_usage


class Events:
    """front.Teller. Those of an answer that lasts are numbered: it may be told again, and then
    without those up to `after`, which `field` said."""

    write_now = None  # gRPC's writes are waited for

    def __init__(
        self,
        context: Context,
        settings: GatewaySettings,
        *,
        numbered: bool = False,
        after: int = 0,
        field: str = LAST,
    ) -> None:
        self._writer = Writer(context, settings)
        self._numbered = numbered
        self._after = after
        self._field = field
        self._number = 0
        self._begun: set[int] = set()  # prompts, by the index of their first answer
        self._turn = asyncio.Lock()  # answers to several prompts come at once

    def admitted(self, headers: Mapping[str, str]) -> None:
        self._writer.headers |= headers

    @property
    def shown(self) -> bool:
        return bool(self._begun)

    async def write(self, answer: Answer, deltas: list[TextDelta]) -> None:
        """One event for all that is ready."""
        event = event_of(answer, deltas)
        if (prompt := answer.index - answer.choice) not in self._begun:
            self._begun.add(prompt)
            tell_beginning(event, answer)
        says = event.text or event.reasoning or event.tool_calls or event.logprobs
        if says or event.HasField("plan"):
            await self._send(event)

    async def finish(self, answers: list[Answer], cost: Cost | None) -> None:
        *others, last = answers
        for answer in others:
            await self._send(ending_of(answer))
        ending = ending_of(last)
        tell_end(ending, answers, cost)
        await self._send(ending)
        check_event(self._after, self._number, self._field)

    async def _send(self, event: GenerateEvent) -> None:
        if self._numbered:
            self._number += 1
            event.number = self._number
            if self._number <= self._after:
                return
        async with self._turn:
            await self._writer.write(event)


def event_of(answer: Answer, deltas: Sequence[TextDelta]) -> GenerateEvent:
    return GenerateEvent(
        text="".join([delta.text for delta in deltas]),
        reasoning="".join([delta.reasoning for delta in deltas]),
        tool_calls=[call for delta in deltas for call in delta.tool_calls],
        logprobs=[one for delta in deltas for one in delta.logprobs],
        choice=answer.index,
    )


def ending_of(answer: Answer) -> GenerateEvent:
    """Why it ended, and what it says of its passages."""
    event = GenerateEvent(choice=answer.index, finish=answer.finish)
    if (checked := answer.citations) is not None:
        event.citations.cited, event.citations.quoted = checked.cited, checked.quoted
        event.citations.unknown.extend(checked.unknown)
        for one in checked.unfounded:
            event.citations.unfounded.add(**asdict(one))
    return event


def tell_beginning(event: GenerateEvent, answer: Answer) -> None:
    """With the first event to a prompt."""
    event.plan.CopyFrom(answer.plan)
    event.passages.extend(answer.passages_used)
    event.warning = answer.warning
    if answer.search is not None:
        event.search.CopyFrom(answer.search)
    if answer.echo is not None:
        event.echo.CopyFrom(answer.echo)


def tell_end(event: GenerateEvent, answers: Sequence[Answer], cost: Cost | None) -> None:
    """With the last of all."""
    event.usage.CopyFrom(total_usage(answers))
    if cost is not None:
        event.cost.MergeFrom(cost_of(cost))
