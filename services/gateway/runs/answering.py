"""One prompt's answers, from a tokenizer to the front."""

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable
from contextlib import aclosing
from typing import Any, NamedTuple, cast

import grpc

from protos.tokenizer_pb2 import TextDelta
from services.common.errors import PenstockError
from services.gateway import metrics
from services.gateway.parts import Gateway
from services.gateway.runs.behind import Behind
from services.gateway.runs.delivery import Delivery, Mode, joined
from services.gateway.runs.front import Front
from services.gateway.runs.judgement import Judgement
from services.gateway.runs.prompt import Answer, Prompt
from services.gateway.runs.records import Journal
from services.gateway.runs.routing import Routed
from services.gateway.runs.text_stream import TextStream


class Way(NamedTuple):
    """What the answers of one request share."""

    deadline: float  # monotonic seconds
    traceparent: str
    journal: Journal
    judgement: Judgement
    start: asyncio.Barrier | None  # that all prompts reach whose request stays with its model


async def answer_prompt(
    gateway: Gateway, front: Front, way: Way, prompt: Prompt, answers: list[Answer]
) -> None:
    """One prompt's answers, from a tokenizer to the front."""
    so_far = prompt.so_far
    stream = TextStream(
        gateway.tokenizers,
        prompt.put_away(),
        choices=len(answers),
        patience_s=gateway.settings.gateway.tokenizer_patience_s,
        deadline=way.deadline,
        traceparent=way.traceparent,
        told=so_far.deltas if so_far is not None and not so_far.anew else (),
    )
    behind: list[Behind] = []
    if so_far is not None and so_far.anew:
        behind = [Behind(so_far.of(answer.choice)) for answer in answers]
    own = gateway.settings.gateway
    wanted = cast(Mode, prompt.delivery) or own.delivery
    delivery = Delivery(wanted, own.hybrid_s, lambda: gateway.intake.running / own.max_requests)
    start, routed = way.start, ""

    def ready_of(answer: Answer, deltas: list[TextDelta]) -> list[TextDelta]:
        """What of its deltas leaves now."""
        _measure(way.journal, answer, deltas)
        answer.echo = answers[0].echo
        ready = delivery.ready(deltas)
        if behind:
            ready = behind[answer.choice].of(ready)
        return joined(ready)

    def tell(deltas: list[TextDelta]) -> None:
        """Of the only answer, while that waits for nobody."""
        write = front.write_now
        assert write is not None
        if ready := ready_of(answers[0], deltas):
            write(answers[0], ready)

    try:
        async with aclosing(stream.batches()) as batches:
            async for deltas in batches:
                if routed := deltas[0].model:
                    continue
                if start is not None:
                    await start.wait()
                    start = None
                await way.judgement.settled()
                for answer in answers:
                    its = deltas
                    if len(answers) > 1:
                        its = [delta for delta in deltas if delta.choice == answer.choice]
                    if its and (ready := ready_of(answer, its)):
                        await front.write(answer, ready)
                await delivery.pause(stream)
                if len(answers) == 1 and not delivery.pauses:
                    stream.straight = lambda: tell if front.write_now is not None else None
    finally:
        stream.cancel()
        way.journal.below.MergeFrom(stream.record)
    if routed:
        raise Routed(routed)
    if len(stream.attempts) > 1:
        lost = ", ".join(stream.attempts[:-1])
        way.journal.decide("tokenizer", stream.attempts[-1], lost=lost)
    if stream.finished:
        for answer in answers:
            rest = delivery.rest(answer)
            if behind:
                rest = behind[answer.choice].of(rest)
            if rest:
                await front.write(answer, list(rest))
            if (rate := answer.tokens_per_s) is not None:
                metrics.rate.labels(way.journal.served).observe(rate)
        return
    if stream.end.status.code:
        error = PenstockError.from_status(stream.end.status)
        if error.param in ("constraint", "grammar"):
            error.param = prompt.form or "tools"
        if prompt.param and error.param.startswith("prompt"):
            error.param = prompt.param + error.param.removeprefix("prompt")
        raise error
    raise PenstockError(grpc.StatusCode.INTERNAL, "the answer broke off", stage="tokenizer")


def all_at_once(works: Iterable[Coroutine[Any, Any, None]]) -> Awaitable[None]:
    """Returns when all are done; the first that fails ends the others, and its error is raised."""
    first, *others = works
    return _several((first, *others)) if others else first


async def _several(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


def _measure(journal: Journal, answer: Answer, deltas: list[TextDelta]) -> None:
    tokens, gap_s = answer.add(deltas)
    first = journal.arrived(tokens)
    if not journal.is_watched:
        return
    if first:
        metrics.ttft.labels(journal.served).observe(journal.first_text_s)
    if tokens and gap_s:
        metrics.itl.labels(journal.served).observe(gap_s / tokens)
