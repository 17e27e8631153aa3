"""A run's answer, told to a client by its events: the same whoever tells it, and how often."""

from contextlib import aclosing

from services.common.errors import PenstockError
from services.gateway.identity.permissions import admit
from services.gateway.ids import not_found
from services.gateway.parts import Gateway
from services.gateway.runs.front import LastingFront, Teller
from services.gateway.runs.lasting.stored import answer_of, cost_of
from services.gateway.runs.prompt import Answer


async def serve_lasting(gateway: Gateway, front: LastingFront) -> None:
    """`pipeline.serve` of a run that goes on without its client. It has a place of its own."""
    principal = admit(await gateway.auth.identify(front.authorization), front.endpoint)
    with gateway.intake.slot(principal.tenant) as place:
        prompts = await front.read(place)
    id = await gateway.runs.begin(front, principal, prompts)
    front.joins(id)
    await follow(gateway, principal.tenant, id, front)


async def follow(gateway: Gateway, tenant: str, id: str, front: Teller) -> None:
    """Raises what ended the run; and UNAVAILABLE ("draining") where this gateway ends before."""
    with gateway.intake.attended():
        await _tell(gateway, tenant, id, front)


async def _tell(gateway: Gateway, tenant: str, id: str, front: Teller) -> None:
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
