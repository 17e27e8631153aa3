"""A run's answer, told to a client by its events: the same whoever tells it, and how often."""

from collections.abc import Awaitable, Callable
from contextlib import aclosing

from services.common.errors import PenstockError
from services.gateway.identity.permissions import admit
from services.gateway.ids import not_found
from services.gateway.parts import Gateway
from services.gateway.runs.front import LastingFront, Teller
from services.gateway.runs.lasting.stored import answer_of, cost_of
from services.gateway.runs.prompt import Answer


async def serve_lasting(
    gateway: Gateway,
    front: LastingFront,
    begun: Callable[[], Awaitable[bool]] | None = None,
) -> None:
    """`pipeline.serve` of a run that goes on without its client. `begun` is asked once it runs:
    whether it is to be followed."""
    principal = await gateway.auth.identify(front.authorization)
    admit(principal, front.endpoint)
    with gateway.intake.visit(principal.tenant) as place:
        prompts = await front.read(place)
        id = await gateway.runs.begin(front, principal, prompts)
    front.joins(id)
    if begun is None or await begun():
        await follow(gateway, principal.tenant, id, front)


async def follow(gateway: Gateway, tenant: str, id: str, front: Teller) -> None:
    """Raises what ended the run."""
    answers: dict[int, Answer] = {}
    async with aclosing(gateway.runs.events(tenant, id)) as events:
        async for event in events:
            if event.HasField("admitted"):
                front.admitted(event.admitted.headers)
            elif event.HasField("begun"):
                answers[event.begun.index] = answer_of(id, event.begun)
            elif event.HasField("delta"):
                answer = answers[event.delta.index]
                answer.add([event.delta.delta])
                answer.echo = answers[answer.index - answer.choice].echo
                await front.write(answer, [event.delta.delta])
            elif event.HasField("finished"):
                ordered = [answers[index] for index in sorted(answers)]
                return await front.finish(ordered, cost_of(event.finished))
            elif event.HasField("failed"):
                raise PenstockError.from_status(event.failed)
    raise not_found("run", id)
